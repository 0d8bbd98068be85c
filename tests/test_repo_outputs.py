"""The files that a directory's tensors go to: names, indexes, shared memory, and what is in their way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import precconv
from precconv.errors import InputError, NumericError, UsageError

from .layouts import CONFIG, directory, kinds, names, sharded, values

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def three_shards(root: Path, *, scale: float = 1, prefix: str = "") -> Path:
    shards = {
        f"model-0000{n}-of-00003.safetensors": {
            f"{prefix}layers.{n}.weight": values(8, 8, seed=n) * scale, f"{prefix}layers.{n}.bias": values(8, seed=n),
        }
        for n in (1, 2, 3)
    }  # fmt: skip
    return directory(root, {**sharded(shards, total_size=1, format="own"), "config.json": CONFIG})


def read_index(folder: Path, name: str = INDEX) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names(folder)}


def test_the_output_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    source = three_shards(tmp_path / "in")
    made = []
    for workers in (1, 2, 5):
        precconv.convert(source, to="bf16", output=tmp_path / f"out{workers}", workers=workers)
        made.append(contents(tmp_path / f"out{workers}"))
    assert made[0] == made[1] == made[2]
    assert made[0].keys() == names(source)


def test_shards_of_which_nothing_is_left_are_not_counted(tmp_path: Path) -> None:
    precconv.convert(three_shards(tmp_path / "in"), to="bf16", output=tmp_path / "out", rule=["layers.2.*=drop"])
    shards = {n: f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert names(tmp_path / "out") == {*shards.values(), INDEX, "config.json"}
    index = read_index(tmp_path / "out")
    assert index["weight_map"] == {
        f"layers.{n}.{leaf}": shards[1 if n == 1 else 2] for n in (1, 3) for leaf in ("bias", "weight")
    }
    assert index["metadata"] == {"total_size": 2 * (64 + 8) * 2, "format": "own"}


def test_wrappers_are_taken_out_of_the_index_too(tmp_path: Path) -> None:
    source = three_shards(tmp_path / "in", prefix="_orig_mod.")
    precconv.convert(source, to="bf16", output=tmp_path / "out", strip_wrappers=True)
    assert read_index(tmp_path / "out")["weight_map"].keys() == kinds(tmp_path / "out").keys()
    assert all(name.startswith("layers.") for name in kinds(tmp_path / "out"))


@pytest.mark.parametrize("workers", [1, 3])
def test_values_that_do_not_fit_are_named_for_every_shard_and_nothing_is_written(workers: int, tmp_path: Path) -> None:
    source = three_shards(tmp_path / "in", scale=1e6)
    with pytest.raises(NumericError) as caught:
        precconv.convert(source, to="fp16", output=tmp_path / "out", workers=workers)
    assert caught.value.report is not None
    assert [f.tensor for f in caught.value.report.findings] == [f"layers.{n}.weight" for n in (1, 2, 3)]
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_the_index_states_the_bytes_of_tensors_that_turned_out_not_to_fit(tmp_path: Path) -> None:
    source = three_shards(tmp_path / "in", scale=1e6)
    precconv.convert(source, to="fp16", output=tmp_path / "out", on_overflow="fp32")
    assert {name for name, kind in kinds(tmp_path / "out").items() if kind == "float32"} == {
        f"layers.{n}.weight" for n in (1, 2, 3)
    }
    assert read_index(tmp_path / "out")["metadata"]["total_size"] == 3 * (64 * 4 + 8 * 2)


# Files in the way


@pytest.mark.parametrize("options", [{"from_variant": "fp16"}, {"format": "pt"}])
def test_with_copy_all_no_carried_file_takes_the_place_of_a_converted_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = directory(tmp_path / "in", {
        "model.safetensors": {"x.weight": values(4, 4, seed=1)}, "model.fp16.safetensors": {"x.weight": values(4, 4)},
        "pytorch_model.bin": {"x.weight": values(4, 4, seed=2)},
    })  # fmt: skip
    with pytest.raises(InputError, match="would be written twice"):
        precconv.convert(source, to="bf16", output=tmp_path / "out", copy_all=True, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    report = precconv.convert(source, to="bf16", output=tmp_path / "out", copy_all=True, variant="new", **options)
    (made,) = (f.path for f in report.files if f.action == "converted")
    assert (tmp_path / "out" / made).stem.endswith(".new")
    used = "model.fp16.safetensors" if "from_variant" in options else "model.safetensors"
    assert names(tmp_path / "out") == {made} | (names(source) - {used})


def test_an_output_whose_name_is_another_files_where_case_does_not_count_is_refused(tmp_path: Path) -> None:
    files = {"pytorch_model.bin": {"x.weight": values(4, 4)}, "Model.safetensors": {"x.weight": values(4, 4)}}
    source = directory(tmp_path / "in", files)
    with pytest.raises(InputError, match="are one name"):
        precconv.convert(source, to="bf16", output=tmp_path / "out", format="safetensors", copy_all=True)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# Tied tensors of torch shards


def tied_shards(root: Path) -> Path:
    table = values(10, 10)
    first = {"wte.weight": table, "lm_head.weight": table, "layers.1.weight": values(10, 10, seed=1)}
    shards = {"pytorch_model-00001-of-00002.bin": first,
              "pytorch_model-00002-of-00002.bin": {"layers.2.weight": values(10, 10, seed=2)}}  # fmt: skip
    return directory(root, {**sharded(shards, BIN_INDEX), "config.json": CONFIG})


def torch_state(path: Path) -> dict[str, torch.Tensor]:
    found = torch.load(path, weights_only=True)
    assert isinstance(found, dict)
    return found


def test_tied_tensors_of_torch_shards_share_memory_in_new_shards_and_in_one_file(tmp_path: Path) -> None:
    source = tied_shards(tmp_path / "in")
    precconv.convert(source, to="bf16", output=tmp_path / "out", shard_size="400B", verify="full")
    precconv.convert(source, to="bf16", output=tmp_path / "one.bin", verify="full")
    one, table = torch_state(tmp_path / "one.bin"), values(10, 10).bfloat16()
    for state in (torch_state(tmp_path / "out/pytorch_model-00001-of-00002.bin"), one):
        assert torch.equal(state["wte.weight"], table)
        assert state["wte.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
    assert torch.equal(one["layers.2.weight"], values(10, 10, seed=2).bfloat16())
    assert read_index(tmp_path / "out", BIN_INDEX)["metadata"]["total_size"] == 3 * 200


def test_the_index_of_torch_shards_counts_tied_tensors_once_and_that_of_safetensors_what_is_there(
    tmp_path: Path,
) -> None:
    source = tied_shards(tmp_path / "in")
    precconv.convert(source, to="bf16", output=tmp_path / "same")
    assert read_index(tmp_path / "same", BIN_INDEX)["metadata"]["total_size"] == 3 * 200
    options: dict[str, Any] = {"to": "bf16", "format": "safetensors"}
    for shared, count in (("drop", 3), ("clone", 4)):
        options["shared"] = shared
        precconv.convert(source, output=tmp_path / shared, **options)
        assert read_index(tmp_path / shared)["metadata"]["total_size"] == count * 200


def test_tied_tensors_of_torch_shards_with_rules_of_their_own_are_apart(tmp_path: Path) -> None:
    source = tied_shards(tmp_path / "in")
    precconv.convert(source, to="bf16", output=tmp_path / "one.bin", rule=["lm_head.weight=fp32"], verify="full")
    single = directory(
        tmp_path / "single", {"pytorch_model.bin": torch_state(tmp_path / "in/pytorch_model-00001-of-00002.bin")}
    )
    precconv.convert(single, to="bf16", output=tmp_path / "single-out", rule=["lm_head.weight=fp32"])
    one, want = torch_state(tmp_path / "one.bin"), torch_state(tmp_path / "single-out/pytorch_model.bin")
    for name, tensor in want.items():
        assert one[name].dtype is tensor.dtype
        assert torch.equal(one[name], tensor)


@pytest.mark.parametrize("torch_first", [False, True])
def test_shards_of_different_formats_are_written_in_the_one_that_is_said(tmp_path: Path, torch_first: bool) -> None:
    source, out = three_shards(tmp_path / "in"), tmp_path / "out"
    name = f"model-0000{1 if torch_first else 3}-of-00003.safetensors"
    before = {key: x.clone() for key, x in load_file(source / name).items()}  # not the file that is replaced
    torch.save(before, source / name)
    with pytest.raises(UsageError, match="its shards are of different formats: ") as caught:
        precconv.convert(source, to="bf16", output=out)
    assert "--format safetensors" in str(caught.value.hint)
    assert not out.exists()
    precconv.convert(source, to="bf16", output=out, format="safetensors")
    assert names(out) == names(source)
    assert load_file(out / name).keys() == before.keys()


def test_a_component_that_is_asked_for_in_two_ways_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="component 'unet' is asked for as fp32 and as fp16"):
        precconv.plan(tmp_path, to="bf16", component=["unet=fp32,vae=keep", "unet=fp16"])
    with pytest.raises(InputError, match="there are no files"):  # which comes after the options
        precconv.plan(tmp_path, to="bf16", component=["unet=fp32", "unet=float32"])
