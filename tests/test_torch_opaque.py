"""Tensors that cannot be cast, such as sparse ones: they stay in a torch checkpoint, or their loss is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import precconv
from precconv import OutputError

from .repos import shard, weight

INDEX = "pytorch_model.bin.index.json"
SPARSE = torch.eye(4).to_sparse()

pytestmark = pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")


def single(path: Path) -> Path:
    torch.save({"a": weight(1), "b": weight(2), "s": SPARSE}, path)
    return path


def model(root: Path, *parts: dict[str, Any]) -> Path:
    root.mkdir()
    names = [shard(n, len(parts), ".bin") for n in range(1, len(parts) + 1)]
    for name, tensors in zip(names, parts, strict=True):
        torch.save(tensors, root / name)
    weight_map = {tensor: name for name, tensors in zip(names, parts, strict=True) for tensor in tensors}
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def read(path: Path) -> dict[str, torch.Tensor]:
    found = torch.load(path, weights_only=True)
    assert isinstance(found, dict)
    return found


def test_one_that_a_rule_drops_is_gone(tmp_path: Path) -> None:
    source, out = single(tmp_path / "in.pt"), tmp_path / "out.pt"
    precconv.convert(source, to="bf16", output=out, rule=["s=drop"])
    assert list(read(out)) == ["a", "b"]
    precconv.convert(source, to="bf16", output=out, rule=["s=drop", "b=drop"], force=True)
    assert list(read(out)) == ["a"]


def test_one_is_not_lost_with_the_structure_when_another_tensor_is_dropped(tmp_path: Path) -> None:
    source, out = single(tmp_path / "in.pt"), tmp_path / "out.pt"
    with pytest.raises(OutputError, match="tensor 's': is a sparse tensor, which cannot be written"):
        precconv.convert(source, to="bf16", output=out, rule=["b=drop"])
    assert not out.exists()


def test_the_first_rule_that_matches_one_counts(tmp_path: Path) -> None:
    source, out = single(tmp_path / "in.pt"), tmp_path / "out.pt"
    precconv.convert(source, to="bf16", output=out, rule=["s=keep", "[s]=drop"])
    assert list(read(out)) == ["a", "b", "s"]


def test_a_training_checkpoint_keeps_its_structure_so_nothing_of_it_is_dropped(tmp_path: Path) -> None:
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"state_dict": {"a": weight(1), "s": SPARSE}, "epoch": 3}, source)
    with pytest.raises(precconv.UsageError, match="a rule cannot drop tensors from a checkpoint that keeps its"):
        precconv.convert(source, to="bf16", output=out, rule=["s=drop"])
    assert not out.exists()


def test_a_shard_that_holds_nothing_else_is_part_of_the_output_and_its_index(tmp_path: Path) -> None:
    root, out = model(tmp_path / "m", {"a": weight(1)}, {"s": SPARSE}, {"b": weight(2), "t": SPARSE}), tmp_path / "out"
    precconv.convert(root, to="bf16", output=out)
    source, made = (json.loads((at / INDEX).read_text())["weight_map"] for at in (root, out))
    assert made == source
    for name in set(made.values()):
        assert list(read(out / name)) == list(read(root / name))
    assert read(out / shard(2, 3, ".bin"))["s"].to_dense().equal(torch.eye(4))


def test_a_shard_that_holds_nothing_else_cannot_become_safetensors(tmp_path: Path) -> None:
    root = model(tmp_path / "m", {"a": weight(1)}, {"s": SPARSE})
    with pytest.raises(OutputError, match="tensor 's': is a sparse tensor, which cannot be written"):
        precconv.convert(root, to="bf16", output=tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()
    precconv.convert(root, to="bf16", output=tmp_path / "out", format="safetensors", rule=["s=drop"])
    assert list(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]) == ["a"]
