"""Directories that transformers saved, converted: its own loader takes them for what they say they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict

import precconv

from .loading import HALVES, assert_close, assert_same_state, dtypes, loaded, one_thread, stored
from .tiny_models import (
    bert,
    bert_states,
    deepseek_v3,
    gpt2,
    llama,
    llava,
    llava_logits,
    logits,
    mixtral,
    t5,
    t5_logits,
    train,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings are not this project's

SHARDED = "20KB"


@dataclass(frozen=True)
class Family:
    """A kind of model and what to ask it."""

    build: Callable[[], Any]
    run: Callable[[Any], Any]
    tied: tuple[tuple[str, str], ...] = ()  #: an embedding and what is made from it


FAMILIES = {
    "llama": Family(llama, logits),
    "gpt2": Family(gpt2, logits, (("transformer.wte.weight", "lm_head.weight"),)),
    "t5": Family(
        t5,
        t5_logits,
        (("shared.weight", "encoder.embed_tokens.weight"), ("shared.weight", "decoder.embed_tokens.weight")),
    ),
    "mixtral": Family(mixtral, logits),
    "deepseek_v3": Family(deepseek_v3, logits),
    "llava": Family(llava, llava_logits),
    "bert": Family(bert, bert_states),
}


@dataclass(frozen=True)
class Saved:
    """A model in FP32 and the directories it was saved to."""

    family: Family
    model: Any
    single: Path
    sharded: Path

    def reference(self, to: str) -> Any:
        """The FP32 source, loaded in the target's dtype by its own class."""
        return loaded(self.model, self.single, dtype=HALVES[to])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Saved]]:
    """A model by its family's name, made once."""
    made: dict[str, Saved] = {}

    def make(name: str) -> Saved:
        if name not in made:
            folder, family = tmp_path_factory.mktemp(name), FAMILIES[name]
            torch.manual_seed(0)
            model = family.build().eval()
            train(model)
            model.save_pretrained(folder / "single")
            model.save_pretrained(folder / "sharded", max_shard_size=SHARDED)
            made[name] = Saved(family, model, folder / "single", folder / "sharded")
        return made[name]

    with one_thread():
        yield make


def index_of(folder: Path, name: str = "model.safetensors.index.json") -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def dtype_values(value: Any) -> Iterator[str]:
    """Every dtype that a config names, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("dtype", "torch_dtype") and isinstance(inner, str):
                yield inner
            yield from dtype_values(inner)


def assert_is_the_cast(saved: Saved, folder: Path, to: str, **options: Any) -> Any:
    """The directory loads as the library's own cast of the source: bit for bit, outputs too."""
    got, reference = loaded(saved.model, folder, dtype="auto", **options), saved.reference(to)
    assert_same_state(got.state_dict(), reference.state_dict())
    with torch.inference_mode():
        output = saved.family.run(got)
        assert torch.equal(output, saved.family.run(reference))
        assert_close(output, saved.family.run(saved.model), to)
    for a, b in saved.family.tied:
        assert got.get_parameter(a) is got.get_parameter(b)
    return got


# Every family, as transformers saves it


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_loads_as_the_librarys_own_cast_of_it(
    models: Callable[[str], Saved], name: str, layout: str, tmp_path: Path
) -> None:
    saved = models(name)
    source: Path = getattr(saved, layout)
    to = "fp16" if layout == "single" else "bf16"
    precconv.convert(source, to=to, output=tmp_path / "out")
    model = assert_is_the_cast(saved, tmp_path / "out", to)
    assert HALVES[to] in dtypes(model).values()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in source.iterdir()}
    before = list(dtype_values(json.loads((source / "config.json").read_text("utf-8"))))
    after = list(dtype_values(json.loads((tmp_path / "out/config.json").read_text("utf-8"))))
    assert before == ["float32"] * len(after)
    assert after == [{"bf16": "bfloat16", "fp16": "float16"}[to]] * len(before)
    assert len(after) == (3 if name == "llava" else 1)


def test_the_index_keeps_its_metadata_and_states_the_bytes_that_were_written(
    models: Callable[[str], Saved], tmp_path: Path
) -> None:
    source = models("llama").sharded
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    before, after = index_of(source), index_of(tmp_path / "out")
    assert len(set(before["weight_map"].values())) > 3
    assert after["weight_map"] == before["weight_map"]
    size = sum(t.nbytes for t in stored(tmp_path / "out").values())
    assert after["metadata"] == {**before["metadata"], "total_size": size}
    assert size < before["metadata"]["total_size"]
    assert after["metadata"]["total_parameters"] == sum(p.numel() for p in models("llama").model.parameters())


# Torch files, as transformers saved them before version 5


def save_bin(saved: Saved, folder: Path, *, max_shard_size: str) -> Path:
    """With every name of the state dict, tied ones sharing memory."""
    folder.mkdir()
    state = saved.model.state_dict()
    for a, b in saved.family.tied:
        assert state[a].data_ptr() == state[b].data_ptr()
    save_torch_state_dict(
        state,
        folder,
        filename_pattern="pytorch_model{suffix}.bin",
        max_shard_size=max_shard_size,
        safe_serialization=False,
    )
    saved.model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [SHARDED, "1GB"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_torch_files_become_safetensors_with_the_right_names_and_index(
    models: Callable[[str], Saved], name: str, size: str, tmp_path: Path
) -> None:
    saved = models(name)
    source = save_bin(saved, tmp_path / "source", max_shard_size=size)
    precconv.convert(source, to="bf16", output=tmp_path / "out", format="safetensors")
    assert_is_the_cast(saved, tmp_path / "out", "bf16")
    renamed = {p.name.replace("pytorch_model", "model").replace(".bin", ".safetensors") for p in source.iterdir()}
    assert {p.name for p in (tmp_path / "out").iterdir()} == renamed
    tensors = stored(tmp_path / "out")
    assert tensors.keys() & {b for _, b in saved.family.tied} == set()
    if size == SHARDED:
        index = index_of(tmp_path / "out")
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("size", [SHARDED, "1GB"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_torch_files_stay_torch_files_in_which_tied_tensors_share_memory(
    models: Callable[[str], Saved], name: str, size: str, tmp_path: Path
) -> None:
    saved = models(name)
    source = save_bin(saved, tmp_path / "source", max_shard_size=size)
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in source.iterdir()}
    assert_is_the_cast(saved, tmp_path / "out", "bf16")
    where: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.bin"):
        where |= torch.load(path, weights_only=True)
    assert where.keys() == saved.model.state_dict().keys()
    for a, b in saved.family.tied:
        assert where[a].data_ptr() == where[b].data_ptr()
    if size == SHARDED:
        before, after = (index_of(f, "pytorch_model.bin.index.json") for f in (source, tmp_path / "out"))
        assert after["weight_map"] == before["weight_map"]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in where.values()}
        assert after["metadata"]["total_size"] == sum(storages.values())


# Variants


@pytest.mark.parametrize("size", [SHARDED, "1GB"])
def test_the_only_variant_there_is_is_converted_and_loads_without_one(
    models: Callable[[str], Saved], size: str, tmp_path: Path
) -> None:
    saved = models("gpt2")
    saved.model.save_pretrained(tmp_path / "source", variant="fp16", max_shard_size=size)
    report = precconv.convert(tmp_path / "source", to="bf16", output=tmp_path / "out")
    assert any("variant fp16 only" in note for note in report.plan.notes)
    assert_is_the_cast(saved, tmp_path / "out", "bf16")
    assert not any("fp16" in p.name for p in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_an_output_variant_is_found_by_its_name(models: Callable[[str], Saved], layout: str, tmp_path: Path) -> None:
    saved = models("gpt2")
    precconv.convert(getattr(saved, layout), to="bf16", output=tmp_path / "out", variant="bf16")
    assert_is_the_cast(saved, tmp_path / "out", "bf16", variant="bf16")
    names = {p.name for p in (tmp_path / "out").glob("model*")}
    if layout == "single":
        assert names == {"model.bf16.safetensors"}
    else:
        assert "model.safetensors.index.bf16.json" in names
        assert all(n.startswith("model.bf16-0") for n in names if n.endswith(".safetensors"))


@pytest.mark.parametrize("size", [SHARDED, "1GB"])
def test_one_of_several_variants_is_chosen_and_the_others_are_left_out(
    models: Callable[[str], Saved], size: str, tmp_path: Path
) -> None:
    saved = models("gpt2")
    half = loaded(saved.model, saved.single, dtype=torch.float16)
    saved.model.save_pretrained(tmp_path / "source", max_shard_size=size)
    half.save_pretrained(tmp_path / "source", variant="fp16", max_shard_size=size)
    report = precconv.convert(tmp_path / "source", to="fp32", output=tmp_path / "out", from_variant="fp16")
    model = loaded(saved.model, tmp_path / "out", dtype="auto")
    assert_same_state(model.state_dict(), half.float().state_dict())
    left = {f.path for f in report.files if f.action == "left out"}
    assert left == {p.name for p in (tmp_path / "source").glob("model*") if "fp16" not in p.name}


# Other files than the source's


def assert_shards_fit(folder: Path, limit: int) -> int:
    shards = [list(stored(folder, p.name).values()) for p in folder.glob("*.safetensors")]
    assert all(len(held) == 1 or sum(t.nbytes for t in held) <= limit for held in shards)
    return len(shards)


@pytest.mark.parametrize(("size", "limit"), [("5KB", 5_000), ("12KB", 12_000), ("40KB", 40_000), ("1GB", 10**9)])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_is_cut_anew_into_shards_of_at_most_the_size_asked_for(
    models: Callable[[str], Saved], name: str, size: str, limit: int, tmp_path: Path
) -> None:
    saved = models(name)
    precconv.convert(saved.sharded, to="bf16", output=tmp_path / "out", shard_size=size)
    count = assert_shards_fit(tmp_path / "out", limit)
    assert_is_the_cast(saved, tmp_path / "out", "bf16")
    names = {p.name for p in (tmp_path / "out").glob("model*")}
    if size == "1GB":
        assert names == {"model.safetensors"}
    else:
        assert count > 1
        numbered = {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
        assert names == {*numbered, "model.safetensors.index.json"}


def test_torch_shards_are_cut_anew_as_safetensors(models: Callable[[str], Saved], tmp_path: Path) -> None:
    saved = models("gpt2")
    source = save_bin(saved, tmp_path / "source", max_shard_size="60KB")
    options: dict[str, Any] = {"to": "bf16", "format": "safetensors", "shard_size": "12KB"}
    precconv.convert(source, output=tmp_path / "out", **options)
    assert assert_shards_fit(tmp_path / "out", 12_000) > len(list(source.glob("*.bin")))
    assert_is_the_cast(saved, tmp_path / "out", "bf16")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_sharded_model_becomes_one_file_with_the_same_tensors(
    models: Callable[[str], Saved], kind: str, tmp_path: Path
) -> None:
    saved = models("llama")
    source = saved.sharded if kind == "safetensors" else save_bin(saved, tmp_path / "bin", max_shard_size=SHARDED)
    precconv.convert(source, to="bf16", output=tmp_path / "out", format="safetensors")
    precconv.convert(source, to="bf16", output=tmp_path / "model.safetensors")
    assert_same_state(stored(tmp_path), stored(tmp_path / "out"))


def test_a_sharded_model_becomes_one_torch_file_that_transformers_loads(
    models: Callable[[str], Saved], tmp_path: Path
) -> None:
    saved = models("gpt2")
    torch_source = save_bin(saved, tmp_path / "source", max_shard_size=SHARDED)
    out = tmp_path / "out"
    out.mkdir()
    for source in (torch_source, saved.sharded):
        precconv.convert(source, to="bf16", output=out / "pytorch_model.bin", force=True)
        precconv.convert(source, to="bf16", output=tmp_path / "whole", force=True)
        (out / "config.json").write_bytes((tmp_path / "whole/config.json").read_bytes())
        assert_is_the_cast(saved, out, "bf16")
