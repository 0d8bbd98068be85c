"""Which tensors go into which file of an output, and the index that says so; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

__all__ = ["index_json", "split"]

T = TypeVar("T")


def split(items: Sequence[T], sizes: Sequence[int], limit: int) -> list[list[T]]:
    """Items in their order, in groups of at most ``limit`` bytes; one that is larger has a group of its own.

    ``sizes``: bytes of each in the output.  As huggingface_hub splits a state dict.
    """
    groups: list[list[T]] = []
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if not groups or (held + size > limit and groups[-1]):
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size
    return groups


def index_json(metadata: Mapping[str, object], total_size: int, weight_map: Mapping[str, str]) -> str:
    """An index as transformers writes it: names sorted; ``metadata`` kept, with the bytes of tensor data written."""
    index = {
        "metadata": {**metadata, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2, allow_nan=False) + "\n"
