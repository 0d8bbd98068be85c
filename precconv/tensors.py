"""What is known of a tensor before its data is read."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from .dtypes import DType

__all__ = ["TensorInfo", "prefixed"]


def prefixed(component: str, tensor: str) -> str:
    """A tensor's name among those of several components, as reports have it."""
    return f"{component}/{tensor}" if component else tensor


class TensorInfo(NamedTuple):
    """A tensor's identity and where its bytes lie.

    A named tuple, not a dataclass: checkpoints with 100,000 tensors build one for each.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int  #: first byte in the file; -1 where its elements do not lie one after the other, as they are
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)
