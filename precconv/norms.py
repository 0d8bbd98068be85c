"""Recognising the tensors of normalisation layers, which are never narrowed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .tensors import TensorInfo

__all__ = ["find_norms"]

#: The last component of a norm module's name, or the parameter itself: ``input_layernorm``, ``ln_f``, ``bn2``.
_MODULE = re.compile(r"(?:.*norm.*|ln|ln_?\d+|ln_[a-z]+|bn|bn_?\d+)", re.IGNORECASE)
_LEAVES = frozenset({"weight", "bias", "gamma", "beta", "scale", "running_mean", "running_var"})


def find_norms(infos: Sequence[TensorInfo]) -> frozenset[str]:
    """Names of the floating-point tensors that belong to a norm."""
    return frozenset(t.name for t in infos if t.dtype.kind == "float" and _is_norm(t))


def _is_norm(t: TensorInfo) -> bool:
    if sum(d != 1 for d in t.shape) > 1:
        return False
    parts = t.name.rsplit(".", 2)
    if parts[-1] in ("running_mean", "running_var"):
        return True
    return len(parts) > 1 and parts[-1] in _LEAVES and _MODULE.fullmatch(parts[-2]) is not None
