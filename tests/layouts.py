"""Model directories as other libraries lay them out, made by hand, and what is in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import precconv

from .loading import stored

__all__ = ["CONFIG", "directory", "kinds", "left", "linear", "names", "sharded", "values"]

Tensors = Mapping[str, torch.Tensor]
CONFIG: Mapping[str, object] = {"model_type": "llama", "torch_dtype": "float32", "architectures": ["LlamaForCausalLM"]}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def directory(root: Path, files: Mapping[str, object]) -> Path:
    """Tensors become a checkpoint by the file's suffix, other objects JSON, bytes what they are."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".safetensors":
            assert isinstance(content, dict)
            save_file(content, path, {"format": "pt"})
        elif path.suffix in (".bin", ".pt", ".pth"):
            torch.save(content, path)
        else:
            path.write_text(json.dumps(content, indent=2), "utf-8")
    return root


def sharded(shards: Mapping[str, Tensors], index: str = "model.safetensors.index.json", **metadata: Any) -> Any:
    """The shards and their index, as files of ``directory``."""
    weight_map = {tensor: name for name, held in shards.items() for tensor in held}
    return {**shards, index: {"metadata": metadata, "weight_map": weight_map}}


def linear() -> dict[str, torch.Tensor]:
    return {"layer.weight": values(4, 8), "layer.bias": values(4)}


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


def kinds(folder: Path) -> dict[str, str]:
    return {name: str(t.dtype).removeprefix("torch.") for name, t in stored(folder).items()}


def left(report: precconv.Report) -> dict[str, str]:
    return {f.path: f.why for f in report.files if f.action == "left out"}
