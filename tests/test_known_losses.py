"""What other converters have been reported to destroy: converted here, it is there bit for bit and the report says why.

Each case keeps the property of the file that bit somebody, in a checkpoint of a few tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import precconv
from precconv.dtypes import DType
from precconv.tensors import TensorInfo

from .command import run
from .test_quantized import FORMATS, IDS, PLAIN, Tensors, infos

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = {"bf16": BF16, "fp16": FP16}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def convert(
    tensors: Mapping[str, torch.Tensor], to: str, folder: Path, config: Mapping[str, object] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The output through the command line, and the report's reason by tensor."""
    path, report = folder / "model.safetensors", folder / "report.json"
    save_file(dict(tensors), path)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    result = run(path, "--to", to, "-o", folder / "out.safetensors", "--verify", "full", "--report", report)
    assert result.exit_code == 0, result.stderr
    whys = {t["name"]: t["why"] for t in json.loads(report.read_text())["tensors"]}
    return load_file(folder / "out.safetensors"), whys


@pytest.fixture(params=HALVES)
def to(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("leaf", ["gate.e_score_correction_bias", "router.expert_bias", "gate.expert_bias"])
def test_a_routing_bias_keeps_its_238_values(leaf: str, to: str, tmp_path: Path) -> None:
    bias = torch.linspace(6.817, 7.063, 256)[torch.arange(256) % 238]  # a narrow band at a large offset
    assert [len(set(values.tolist())) for values in (bias, bias.to(BF16))] == [238, 8]
    tensors = {f"model.layers.3.mlp.{leaf}": bias, "model.layers.3.mlp.gate.weight": randn(256, 16)}
    output, whys = convert(tensors, to, tmp_path)
    assert same(output[f"model.layers.3.mlp.{leaf}"], bias)
    assert whys[f"model.layers.3.mlp.{leaf}"] == "preset universal: MoE selection bias"
    assert output["model.layers.3.mlp.gate.weight"].dtype is HALVES[to]


def test_a_counter_of_batches_stays_an_int64_without_dimensions(to: str, tmp_path: Path) -> None:
    norm = {f"bn.{leaf}": randn(8).abs() for leaf in ("weight", "bias", "running_mean", "running_var")}
    tensors = {**norm, "bn.num_batches_tracked": torch.tensor(400_000), "conv.weight": randn(8, 3, 3, 3)}
    output, whys = convert(tensors, to, tmp_path)
    assert same(output["bn.num_batches_tracked"], torch.tensor(400_000))
    assert whys["bn.num_batches_tracked"] == "int64 is not cast"
    assert {n: t.dtype for n, t in output.items() if n in norm} == dict.fromkeys(norm, FP32)
    assert output["conv.weight"].dtype is HALVES[to]


def test_a_variance_above_the_range_of_fp16_does_not_become_inf(tmp_path: Path) -> None:
    norm = {f"bn.{leaf}": randn(4) for leaf in ("weight", "bias", "running_mean")}
    variance = torch.tensor([7e4, 1e6, 1e-9, 1.0])
    output, whys = convert({**norm, "bn.running_var": variance, "fc.weight": randn(4, 4)}, "fp16", tmp_path)
    assert same(output["bn.running_var"], variance)
    assert whys["bn.running_var"].startswith("preset universal: batch norm")


@pytest.mark.parametrize("leaf", ["rotary_emb.inv_freq", "rope.inv_freq", "rope.freqs_cis", "rotary_emb.cos_cached"])
def test_a_rotary_table_is_not_rounded(leaf: str, to: str, tmp_path: Path) -> None:
    table = 1 / 10_000 ** (torch.arange(0, 64, 2) / 64)
    name = f"model.layers.0.self_attn.{leaf}"
    output, whys = convert({name: table, "model.layers.0.self_attn.q_proj.weight": randn(8, 8)}, to, tmp_path)
    assert same(output[name], table)
    assert whys[name] == "preset universal: rotary table"
    assert output["model.layers.0.self_attn.q_proj.weight"].dtype is HALVES[to]


WAN = {
    "scale_shift_table": randn(1, 2, 16),
    "blocks.0.scale_shift_table": randn(1, 6, 16),  # three dimensions: no rule about vectors finds it
    "blocks.0.norm2.weight": randn(16),
    "blocks.0.norm2.bias": randn(16),
    "blocks.0.attn1.norm_q.weight": randn(16),
    "condition_embedder.time_embedder.linear_1.weight": randn(16, 8),
    "blocks.0.attn1.to_q.weight": randn(16, 16),
}


@pytest.mark.parametrize("config", [None, {"_class_name": "WanTransformer3DModel"}], ids=["names", "config"])
def test_modulation_tables_and_norms_of_a_video_transformer_stay(
    config: Mapping[str, object] | None, to: str, tmp_path: Path
) -> None:
    output, whys = convert(WAN, to, tmp_path, config)
    assert [name for name, tensor in output.items() if tensor.dtype is not FP32] == ["blocks.0.attn1.to_q.weight"]
    assert all(same(output[name], tensor) for name, tensor in WAN.items() if output[name].dtype is FP32)
    assert whys["blocks.0.scale_shift_table"].endswith(": modulation table")
    assert whys["condition_embedder.time_embedder.linear_1.weight"].endswith(": time embedding")


@pytest.mark.parametrize("names", ["hc_{}_{}", "mhc_{}_mix{}"], ids=["known", "unheard of"])
def test_the_few_fp32_parameters_of_a_16_bit_model_are_left_alone(names: str, to: str, tmp_path: Path) -> None:
    small = {
        f"layers.{i}." + names.format(part, leaf): 1 + 1e-4 * randn(*shape, seed=i)
        for i in range(3)
        for part in ("attn", "ffn")
        for leaf, shape in (("base", (24,)), ("scale", (3,)))
    }
    large = {f"layers.{i}.wo.weight": randn(64, 64, dtype=BF16) for i in range(3)}
    output, whys = convert({**small, **large}, to, tmp_path)
    assert all(same(output[name], tensor) for name, tensor in small.items())
    assert {whys[name] for name in small} <= {"preset universal: hyper-connection parameter", "mixed source"}
    assert {output[name].dtype for name in large} == {HALVES[to]}


def test_a_mask_constant_does_not_become_minus_infinity(tmp_path: Path) -> None:
    fill, mask = torch.tensor(-1e9), torch.ones(1, 1, 8, 8).tril().bool()
    tensors = {"h.0.attn.masked_bias": fill, "h.0.attn.bias": mask, "h.0.attn.c_attn.weight": randn(8, 24)}
    output, whys = convert(tensors, "fp16", tmp_path)
    assert same(output["h.0.attn.masked_bias"], fill)
    assert same(output["h.0.attn.bias"], mask)
    assert whys["h.0.attn.masked_bias"] == "scalar"
    assert whys["h.0.attn.bias"] == "bool is not cast"
    assert output["h.0.attn.c_attn.weight"].dtype is FP16


def test_nibbles_packed_in_a_float_type_are_not_cast(to: str, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj."
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}).encode()
    packed = {
        "weight": torch.randint(-(2**15), 2**15, (1024, 1), dtype=torch.int16).view(BF16),  # NaN patterns among them
        "weight.absmax": randn(64).abs(),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    tensors = {module + name: tensor for name, tensor in packed.items()}
    output, whys = convert({**tensors, "model.embed_tokens.weight": randn(8, 8)}, to, tmp_path)
    assert all(same(output[name], tensor) for name, tensor in tensors.items())
    assert {whys[name] for name in tensors} == {"quantized: bitsandbytes 4-bit"}
    assert output["model.embed_tokens.weight"].dtype is HALVES[to]


# Quantized modules, through a conversion


def write(path: Path, tensors: Mapping[str, tuple[TensorInfo, bytes]]) -> None:
    """A safetensors file of types that no library makes tensors of; wide types first, as they must be aligned."""
    header: dict[str, object] = {}
    end, data = 0, b""
    for name, (info, raw) in sorted(tensors.items(), key=lambda item: -item[1][0].dtype.bits):
        header[name] = {"dtype": info.dtype.code, "shape": info.shape, "data_offsets": [end, end + len(raw)]}
        end, data = end + len(raw), data + raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def raw_tensors(path: Path) -> dict[str, tuple[DType, Sequence[int], bytes]]:
    data = path.read_bytes()
    found = precconv.inspect(path)
    return {t.name: (t.dtype, t.shape, data[t.offset : t.offset + t.nbytes]) for t in found}


def plain(info: TensorInfo) -> bytes:
    """Values that fit every type, for what is not quantized."""
    if info.dtype.kind != "float":
        return bytes(prod(info.shape) * info.dtype.itemsize)
    return bytes_of(randn(*info.shape, dtype=getattr(torch, info.dtype.torch)))


@pytest.fixture
def quantized(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    module: Tensors = request.param
    path = tmp_path / "model.safetensors"
    packed = {i.name: (i, os.urandom(prod(i.shape) * i.dtype.bits // 8)) for i in infos(module)}
    write(path, {i.name: (i, plain(i)) for i in infos(PLAIN)} | packed)
    return path


BY_FORMAT = [pytest.param(tensors, name, tensors, id=i) for (name, tensors), i in zip(FORMATS, IDS, strict=True)]


@pytest.mark.parametrize(("quantized", "name", "module"), BY_FORMAT, indirect=["quantized"])
def test_every_byte_of_a_quantized_module_survives_a_conversion(
    quantized: Path, name: str, module: Tensors, to: str
) -> None:
    output = quantized.with_name("out.safetensors")
    report = precconv.convert(quantized, to=to, output=output, verify="full")
    before, after = raw_tensors(quantized), raw_tensors(output)
    assert before.keys() == after.keys()
    assert {n: after[n] for n in module} == {n: before[n] for n in module}
    assert after["lm_head.weight"][0] == to
    assert {i.why for i in report.plan.items if i.src.name in module} == {f"quantized: {name}"}


@pytest.mark.parametrize(("quantized", "name", "module"), BY_FORMAT, indirect=["quantized"])
def test_the_plan_says_which_format_was_recognised(quantized: Path, name: str, module: Tensors, to: str) -> None:
    lines = run("inspect", quantized, "--to", to).stdout.splitlines()
    assert sum(int(line.split()[0]) for line in lines if line.endswith(f"  quantized: {name}")) == len(module)
