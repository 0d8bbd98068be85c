"""Model directories of other libraries, and the files around the weights: carried over, rewritten or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import precconv

from .layouts import CONFIG, directory, kinds, left, linear, names, sharded, values
from .loading import stored

# Libraries beside transformers and diffusers


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_peft_adapter_keeps_its_layout(file: str, tmp_path: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{prefix}.lora_A.weight": values(4, 16), f"{prefix}.lora_B.weight": values(16, 4)}
    config = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 4, "lora_alpha": 8}
    source = directory(
        tmp_path / "lora",
        {"adapter_config.json": config, file: tensors, "README.md": b"---\nlibrary_name: peft\n---\n"},
    )
    precconv.convert(source, to="fp16")
    out = tmp_path / "lora-fp16"
    assert names(out) == names(source)
    assert (out / "adapter_config.json").read_bytes() == (source / "adapter_config.json").read_bytes()
    read = load_file(out / file) if file.endswith("s") else torch.load(out / file, weights_only=True)
    assert {name: t.dtype for name, t in read.items()} == dict.fromkeys(tensors, torch.float16)
    precconv.convert(source, to="fp16", output=tmp_path / "safe", format="safetensors")
    assert (tmp_path / "safe/adapter_model.safetensors").exists()


def test_several_adapters_below_one_another_are_converted_each(tmp_path: Path) -> None:
    adapter = {"x.lora_A.weight": values(4, 8), "x.lora_B.weight": values(8, 4)}
    source = directory(
        tmp_path / "in", {f"{d}/{n}": c for d in ("one", "two")
                          for n, c in (("adapter_config.json", {}), ("adapter_model.safetensors", adapter))}
    )  # fmt: skip
    precconv.convert(source, to="bf16", output=tmp_path / "out", component=["two=fp16"])
    assert set(kinds(tmp_path / "out/one").values()) == {"bfloat16"}
    assert set(kinds(tmp_path / "out/two").values()) == {"float16"}


@pytest.mark.filterwarnings("default")
def test_a_timm_model_is_loaded_by_timm_and_its_torch_twin_left_out(tmp_path: Path) -> None:
    import timm
    from timm.models import save_for_hf

    options = {"num_classes": 10, "depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
    model = timm.create_model("convnext_atto", **options).eval()
    save_for_hf(model, tmp_path / "in", model_args=options, safe_serialization="both")
    assert {"config.json", "model.safetensors", "pytorch_model.bin"} <= names(tmp_path / "in")
    report = precconv.convert(tmp_path / "in", to="bf16", output=tmp_path / "out")
    assert left(report) == {"pytorch_model.bin": "the same weights in another format; model.safetensors is converted"}
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "in/config.json").read_bytes()
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, **options).eval()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], tensor, rtol=2**-8, atol=0)
    assert kinds(tmp_path / "out")["stem.0.weight"] == "bfloat16"
    assert kinds(tmp_path / "out")["stem.1.weight"] == "float32"


def test_an_open_clip_repo_has_two_models_side_by_side_and_both_are_converted(tmp_path: Path) -> None:
    own = {"visual.conv1.weight": values(4, 3, 2, 2), "ln_final.weight": values(8), "ln_final.bias": values(8),
           "logit_scale": torch.tensor(4.6)}  # fmt: skip
    theirs = {"vision_model.embeddings.patch_embedding.weight": values(4, 3, 2, 2),
              "text_model.final_layer_norm.weight": values(8), "logit_scale": torch.tensor(4.6)}  # fmt: skip
    source = directory(tmp_path / "in", {
        "open_clip_config.json": {"model_cfg": {"embed_dim": 8}}, "open_clip_model.safetensors": own,
        "open_clip_pytorch_model.bin": own, "config.json": {"model_type": "clip", "torch_dtype": "float32"},
        "model.safetensors": theirs, "pytorch_model.bin": theirs,
    })  # fmt: skip
    report = precconv.convert(source, to="fp16", output=tmp_path / "out")
    assert names(tmp_path / "out") == names(source) - {"open_clip_pytorch_model.bin", "pytorch_model.bin"}
    assert left(report).keys() == {"open_clip_pytorch_model.bin", "pytorch_model.bin"}
    for file, first, norm in (("open_clip_model", "visual.conv1.weight", "ln_final.weight"),
                              ("model", *list(theirs)[:2])):  # fmt: skip
        read = load_file(tmp_path / "out" / f"{file}.safetensors")
        assert (read[first].dtype, read[norm].dtype) == (torch.float16, torch.float32)
        assert read["logit_scale"].dtype is torch.float32
    config = (tmp_path / "out/open_clip_config.json").read_bytes()
    assert config == (source / "open_clip_config.json").read_bytes()


@pytest.mark.parametrize(("other", "own"), [("open_clip_model", "open_clip_config.json"),
                                            ("adapter_model", "adapter_config.json")])  # fmt: skip
def test_a_config_is_about_the_model_and_not_about_what_lies_beside_it(other: str, own: str, tmp_path: Path) -> None:
    source = directory(tmp_path / "in", {
        "config.json": CONFIG, "model.safetensors": linear(), f"{other}.safetensors": linear(), own: {},
    })  # fmt: skip
    for to in ("fp16", "keep"):
        precconv.convert(source, to="bf16", output=tmp_path / f"other-{to}", component={other: to})
        assert b'"bfloat16"' in (tmp_path / f"other-{to}/config.json").read_bytes()
    precconv.convert(source, to="bf16", output=tmp_path / "model-keep", component={"model": "keep"})
    assert (tmp_path / "model-keep/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_every_module_of_a_sentence_transformers_repo_is_converted(tmp_path: Path) -> None:
    modules = [{"idx": n, "name": str(n), "path": path, "type": "sentence_transformers.models"}
               for n, path in enumerate(("", "1_Pooling", "2_Dense"))]  # fmt: skip
    bert = {"embeddings.word_embeddings.weight": values(8, 4), "embeddings.LayerNorm.weight": values(4)}
    source = directory(tmp_path / "in", {
        "modules.json": modules, "config_sentence_transformers.json": {"prompts": {}}, "model.safetensors": bert,
        "config.json": {"model_type": "bert", "torch_dtype": "float32"}, "sentence_bert_config.json": {},
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": 8}, "2_Dense/model.safetensors": {"linear.weight": values(4, 8)},
        "2_Dense/pytorch_model.bin": {"linear.weight": values(4, 8)},
    })  # fmt: skip
    report = precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert names(tmp_path / "out") == names(source) - {"2_Dense/pytorch_model.bin"}
    assert kinds(tmp_path / "out") == dict(zip(bert, ("bfloat16", "float32"), strict=True))
    assert kinds(tmp_path / "out/2_Dense") == {"linear.weight": "bfloat16"}
    assert [i.src.name for i in report.plan.items][-1] == "2_Dense/linear.weight"
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


# Recognising what a tensor is takes all shards


def gptq(prefix: str) -> dict[str, torch.Tensor]:
    words = torch.arange(32, dtype=torch.int32).reshape(4, 8)
    return {
        f"{prefix}.qweight": words, f"{prefix}.qzeros": words[:1].clone(), f"{prefix}.scales": values(1, 8).half(),
        f"{prefix}.g_idx": torch.zeros(32, dtype=torch.int32), f"{prefix}.bias": values(8),
    }  # fmt: skip


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_quantized_module_is_recognised_though_its_parts_lie_in_two_shards(method: str, tmp_path: Path) -> None:
    module = gptq("model.layers.0.mlp.up_proj")
    if method == "awq":
        del module["model.layers.0.mlp.up_proj.g_idx"]
    plain = {"model.embed_tokens.weight": values(8, 8), "model.layers.1.mlp.up_proj.scales": values(8)}
    first = {n: t for n, t in module.items() if n.endswith(("qweight", "qzeros", "g_idx"))}
    second = {n: t for n, t in module.items() if n not in first}
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": {**second, **plain}}
    config = {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}}
    source = directory(tmp_path / "in", {**sharded(shards), "config.json": config})
    report = precconv.convert(source, to="bf16", output=tmp_path / "out", mixed="cast")
    after = stored(tmp_path / "out")
    assert {i.src.name: i.why for i in report.plan.items if i.src.name in module} == dict.fromkeys(
        module, f"quantized: {method}"
    )
    for name, tensor in module.items():
        assert after[name].dtype is tensor.dtype
        assert torch.equal(after[name], tensor)
    assert {after[name].dtype for name in plain} == {torch.bfloat16}


def test_a_norm_is_recognised_though_its_running_mean_lies_in_another_shard(tmp_path: Path) -> None:
    first = {"features.1.weight": values(8), "features.0.weight": values(8, 3, 3, 3)}
    second = {"features.1.bias": values(8), "features.1.running_mean": values(8), "features.1.running_var": values(8)}
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    source = directory(tmp_path / "in", sharded(shards))
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    float32 = {name for name, kind in kinds(tmp_path / "out").items() if kind == "float32"}
    assert float32 == {"features.1.weight", *second}


def test_tensors_of_two_torch_files_are_not_taken_for_tied_because_both_are_the_first_in_theirs(
    tmp_path: Path,
) -> None:
    shards = {f"pytorch_model-0000{n}-of-00002.bin": {f"layers.{n}.weight": values(4, 4, seed=n)} for n in (1, 2)}
    source = directory(tmp_path / "in", {**sharded(shards, "pytorch_model.bin.index.json"), "config.json": CONFIG})
    options: dict[str, Any] = {"to": "bf16", "format": "safetensors", "shard_size": "1GB"}
    precconv.convert(source, output=tmp_path / "out", **options)
    assert stored(tmp_path / "out").keys() == {"layers.1.weight", "layers.2.weight"}
    precconv.convert(source, to="bf16", output=tmp_path / "one.safetensors", shared="drop")
    assert load_file(tmp_path / "one.safetensors").keys() == {"layers.1.weight", "layers.2.weight"}


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_transposed_tensor_in_a_torch_shard_comes_out_whole_in_one_file(suffix: str, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": values(6, 4, seed=n).t() for n in (1, 2)}
    shards = {f"pytorch_model-0000{n}-of-00002.bin": {name: t} for n, (name, t) in enumerate(tensors.items(), 1)}
    source = directory(tmp_path / "in", sharded(shards, "pytorch_model.bin.index.json"))
    out = tmp_path / f"model{suffix}"
    precconv.convert(source, to="bf16", output=out, verify="full")
    read = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    assert read.keys() == tensors.keys()
    assert [name for name, t in tensors.items() if not torch.equal(read[name], t.bfloat16())] == []
