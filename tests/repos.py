"""Model directories made by hand, and what a conversion made of one, read by safetensors itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from precconv.fileio import PART_SUFFIX
from precconv.provenance import KEY

from .samples import write_checkpoint

Tensors = Mapping[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
CONFIG = '{\n  "model_type": "toy",\n  "torch_dtype": "float32"\n}\n'


def shard(number: int, total: int, suffix: str = ".safetensors") -> str:
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    return f"{stem}-{number:05d}-of-{total:05d}{suffix}"


def weight(seed: int, shape: tuple[int, ...] = (4, 8)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers(count: int) -> list[dict[str, torch.Tensor]]:
    """One shard's tensors a layer: two matrices."""
    return [{f"layer.{n}.a": weight(2 * n), f"layer.{n}.b": weight(2 * n + 1, (3, 5))} for n in range(count)]


def sharded(
    root: Path,
    parts: Sequence[Tensors],
    *,
    names: Sequence[str] = (),
    metadata: Mapping[str, object] | None = None,
    weight_map: Mapping[str, object] | None = None,
    config: str | None = CONFIG,
) -> Path:
    """A directory with ``parts`` as shards and a true index, but for what is given otherwise."""
    root.mkdir(parents=True, exist_ok=True)
    names = names or [shard(n, len(parts)) for n in range(1, len(parts) + 1)]
    true_map: dict[str, object] = {}
    for name, tensors in zip(names, parts, strict=True):
        write_checkpoint(root / name, tensors, {"format": "pt"})
        true_map |= dict.fromkeys(tensors, name)
    size = sum(x.nbytes for tensors in parts for x in tensors.values())
    write_index(root, true_map if weight_map is None else weight_map, metadata or {"total_size": size})
    if config is not None:
        (root / "config.json").write_text(config)
    return root


def write_index(root: Path, weight_map: Mapping[str, object], metadata: Mapping[str, object]) -> None:
    (root / INDEX).write_text(json.dumps({"metadata": dict(metadata), "weight_map": dict(weight_map)}))


def single(root: Path, tensors: Tensors, *, config: str | None = CONFIG, stem: str = "model") -> Path:
    """A directory with one checkpoint in one file."""
    root.mkdir(parents=True, exist_ok=True)
    write_checkpoint(root / f"{stem}.safetensors", tensors, {"format": "pt"})
    if config is not None:
        (root / "config.json").write_text(config)
    return root


def pipeline(root: Path, **components: Tensors) -> Path:
    """A directory of components, as diffusers saves one."""
    root.mkdir(parents=True)
    index: dict[str, object] = {"_class_name": "ToyPipeline"}
    for name, tensors in components.items():
        single(root / name, tensors, stem="diffusion_pytorch_model", config='{"_class_name": "Toy"}')
        index[name] = ["diffusers", "Toy"]
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def read_index(root: Path) -> dict[str, Any]:
    """The index, after it was compared with the shards it names."""
    index: dict[str, Any] = json.loads((root / INDEX).read_text("utf-8"))
    held = {name: load_file(root / name) for name in set(index["weight_map"].values())}
    assert index["weight_map"] == {tensor: name for name, found in held.items() for tensor in found}
    assert index["metadata"]["total_size"] == sum(x.nbytes for found in held.values() for x in found.values())
    return index


def load(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors files."""
    return {name: x for path in sorted(root.glob("*.safetensors")) for name, x in load_file(path).items()}


def record(path: Path) -> dict[str, Any]:
    """What a safetensors file says of how it was made."""
    with safe_open(path, "pt") as f:
        found: dict[str, Any] = json.loads(f.metadata()[KEY])
    return found


def files(root: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def stages(directory: Path) -> list[Path]:
    """What unfinished runs left in a directory."""
    return sorted(directory.glob(f".*{PART_SUFFIX}"))
