"""Warnings before a conversion: each where it saves somebody, and silence everywhere else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from precconv import presets
from precconv.advice import advise
from precconv.dtypes import BF16, FP16, FP32, DType, dtype
from precconv.tensors import TensorInfo

PLAIN = {"model.embed_tokens.weight": "fp32", "model.layers.0.mlp.up_proj.weight": "fp32"}
VAE = ("decoder.mid.block_1.conv1.weight", "encoder.down.0.block.0.conv1.weight")


def infos(tensors: Mapping[str, str], shape: tuple[int, ...] = (64, 64)) -> list[TensorInfo]:
    found = []
    for name, code in tensors.items():
        kind = dtype(code)
        found.append(TensorInfo(name, kind, shape, 0, 64 * 64 * kind.itemsize))
    return found


def floats(*names: str) -> list[TensorInfo]:
    return infos(dict.fromkeys(names, "fp32"))


def test_an_ordinary_model_gets_no_advice() -> None:
    for target in (FP32, FP16, BF16):
        assert advise(infos(PLAIN), {"model_type": "llama"}, target, "org/Llama-3-8B") == []


# ------------------------------------------------------------------------------------------------ VAE


def test_force_upcast_warns_for_fp16_alone() -> None:
    config = {"_class_name": "AutoencoderKL", "force_upcast": True}
    (text,) = advise(floats(*VAE), config, FP16, "vae")
    assert "force_upcast" in text
    assert advise(floats(*VAE), config, BF16, "vae") == []


@pytest.mark.parametrize("config", [{"_class_name": "AutoencoderKL", "force_upcast": False}, {"force_upcast": "yes"}])
def test_a_vae_whose_config_does_not_force_is_left_in_peace(config: Mapping[str, object]) -> None:
    assert advise(floats(*VAE), config, FP16, "sdxl-vae.safetensors") == []


@pytest.mark.parametrize(
    "mark", ["conditioner.embedders.1.model.ln_final.weight", "model.diffusion_model.label_emb.0.0.weight"]
)
def test_the_vae_in_an_sdxl_file_is_recognised_by_its_neighbours(mark: str) -> None:
    vae = "first_stage_model.decoder.mid.block_1.conv1.weight"
    (text,) = advise(floats(vae, mark), None, FP16, "model.safetensors")
    assert "SDXL VAE" in text
    assert advise(floats(vae, mark), None, BF16, "model.safetensors") == []
    assert advise(floats(mark), None, FP16, "model.safetensors") == []


def test_the_vae_in_an_sd1_file_is_fine() -> None:
    names = ["first_stage_model.decoder.mid.block_1.conv1.weight", "cond_stage_model.transformer.x.weight"]
    assert advise(floats(*names), None, FP16, "v1-5-pruned.ckpt") == []


def test_a_vae_on_its_own_is_told_by_its_file_name() -> None:
    assert "SDXL VAE" in advise(floats(*VAE), None, FP16, "models/sdxl_vae.safetensors")[0]
    assert "SDXL VAE" in advise(floats(*VAE), None, FP16, "vae-sd-xl.safetensors")[0]
    assert advise(floats(*VAE), None, FP16, "vae-ft-mse-840000.safetensors") == []
    assert advise(floats(*VAE), None, FP16, "sdxl-vae-fp16-fix.safetensors") == []


# ------------------------------------------------------------------------------------- odd tensors


def test_float_position_ids_are_named() -> None:
    name = "cond_stage_model.transformer.text_model.embeddings.position_ids"
    (text,) = advise(floats(name), None, FP16, "model.ckpt")
    assert name in text
    assert "int64" in text
    assert advise(infos({name: "int64"}), None, FP16, "model.ckpt") == []
    assert advise(floats(name + ".weight"), None, FP16, "model.ckpt") == []


def test_empty_weights_are_named_with_a_zero3_hint() -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(5)]
    (text,) = advise(infos(dict.fromkeys(names, "fp16"), (0,)), None, BF16, "model.bin")
    assert all(repr(name) in text for name in names[:3])
    assert "and 2 more" in text
    assert "ZeRO-3" in text


def test_a_weight_with_a_dimension_of_zero_is_named_without_blaming_zero3() -> None:
    (text,) = advise(infos({"decoder.sampling_offsets.weight": "fp32"}, (0, 256)), None, BF16, "model.bin")
    assert "'decoder.sampling_offsets.weight'" in text
    assert "ZeRO" not in text


def test_other_empty_tensors_are_no_matter() -> None:
    assert advise(infos({"model.layers.0.bias": "fp16"}, (0,)), None, BF16, "model.bin") == []


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.fp16.safetensors", "fp32", "the name says fp16, the content is 100 % fp32"),
        (
            "models/flux1-dev-BF16.safetensors",
            "fp8_e4m3",
            "the name says bf16, the content is 100 % fp8_e4m3",
        ),
        ("org/model-fp16", "bf16", "the name says fp16, the content is 100 % bf16"),
        ("model_half.ckpt", "fp32", "the name says fp16"),
        ("model.fp32.safetensors", "fp16", "the name says fp32, the content is 100 % fp16"),
        ("C:\\models\\x-bfloat16.pt", "fp32", "the name says bf16"),
    ],
)
def test_a_name_that_says_another_precision_is_told(name: str, content: str, said: str) -> None:
    (text,) = advise(infos(dict.fromkeys(PLAIN, content)), None, FP32, name)
    assert text.startswith(said)


@pytest.mark.parametrize(
    "name",
    [
        "model.fp32.safetensors",
        "model.safetensors",
        "fp16/model.safetensors",  # a directory, not the file
        "model-fp16-to-bf16.safetensors",
        "flux-fp8-bf16.safetensors",
        "llama-w4a16-fp16.safetensors",
        "half-life-2.safetensors.bak/model.pt",
        "halfbf16ish.pt",
    ],
)
def test_names_that_are_right_or_speak_of_something_else_are_not(name: str) -> None:
    assert advise(infos(PLAIN), None, BF16, name) == []


def test_the_larger_part_counts() -> None:
    tensors = {"a.weight": "fp16", "b.weight": "fp16", "norm.weight": "fp32", "position_ids": "int64"}
    assert advise(infos(tensors), None, BF16, "model.fp16.safetensors") == []


def test_no_tensors_no_advice() -> None:
    assert advise([], None, FP16, "model.fp16.safetensors") == []


# --------------------------------------------------------------------------------------- fp16 range


@pytest.mark.parametrize(
    "name",
    [
        "encoder.block.0.layer.1.DenseReluDense.wo.weight",
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.1.DenseReluDense.wo.weight",
        "blocks.0.ffn.gate.0.weight",
    ],
)
def test_a_t5_feed_forward_warns_for_fp16_alone(name: str) -> None:
    (text,) = advise(floats(name), None, FP16, "model.safetensors")
    assert "66246" in text
    assert advise(floats(name), None, BF16, "model.safetensors") == []


@pytest.mark.parametrize(
    ("config", "target", "said"),
    [
        ({"_class_name": "LTXVideoTransformer3DModel"}, FP16, "LTX-Video"),
        ({"_class_name": "AutoencoderKLMochi"}, BF16, "Mochi's VAE"),
        ({"_class_name": "QwenImageTransformer2DModel"}, FP16, "Qwen-Image"),
    ],
)
def test_architectures_that_are_not_run_in_a_precision_are_told(
    config: Mapping[str, object], target: DType, said: str
) -> None:
    tables = presets.select(config, [])
    (text,) = advise([], config, target, "x", tables)
    assert text.startswith(said)
    assert advise([], config, FP32, "x", tables) == []
    assert advise([], config, target, "x") == []


@pytest.mark.parametrize("config", [{"force_upcast": [True]}, {"force_upcast": {}}, {"_class_name": 3, "x": [[[]]]}])
def test_odd_configs_are_as_good_as_none(config: Mapping[str, object]) -> None:
    assert advise(floats(*PLAIN), config, FP16, "") == []


def test_each_piece_of_advice_is_one_sentence_on_one_line() -> None:
    tensors = floats("position_ids", "x.DenseReluDense.wo.weight", *VAE)
    for text in advise(tensors, {"force_upcast": True}, FP16, "model.bf16.safetensors"):
        assert "\n" not in text
        assert len(text) < 300
