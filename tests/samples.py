"""Inputs that several tests share: awkward values of every type, and checkpoints made of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from precconv.dtypes import CASTABLE, DTYPES, DType

#: Every property test runs so: the same examples each time, and however long a busy machine needs.
PROPERTY = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

#: Types of which torch can make tensors and safetensors can save them.
STORABLE: tuple[DType, ...] = tuple(
    d for d in DTYPES if d.bits >= 8 and hasattr(torch, d.torch) and d.name != "fp8_e8m0"
)


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch)
    assert isinstance(found, torch.dtype)
    return found


def specials(dtype: DType) -> list[int]:
    """Bit patterns of a castable type at which something happens, for it or for a narrower one; both signs."""
    magnitudes = {0, 1, 2, dtype.max_bits, dtype.max_bits + 1, dtype.max_bits + 2, (1 << (dtype.bits - 1)) - 1}
    magnitudes |= {(1 << dtype.mantissa) + i for i in (-1, 0, 1)}
    for other in CASTABLE:
        for value in (other.overflow_bound, other.max, other.smallest_normal, other.underflow_bound):
            near = _pattern(value, dtype)
            magnitudes |= {near + i for i in range(-2, 3)}
    kept = [m for m in magnitudes if 0 <= m < 1 << (dtype.bits - 1)]
    return sorted([*kept, *(m | 1 << (dtype.bits - 1) for m in kept)])


def _pattern(value: float, dtype: DType) -> int:
    """The largest magnitude pattern whose value is at most ``value``."""
    low, high = 0, dtype.max_bits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if dtype.magnitude(middle) <= value else (low, middle - 1)
    return low


def from_bits(bits: np.ndarray | list[int], dtype: DType) -> torch.Tensor:
    """A flat tensor with these bit patterns."""
    array = np.asarray(bits, dtype=f"uint{dtype.bits}")
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch_dtype(dtype)) if array.size else empty(dtype)


def empty(dtype: DType) -> torch.Tensor:
    return torch.empty(0, dtype=torch_dtype(dtype))


def bits_of(x: torch.Tensor) -> np.ndarray:
    """The bit patterns of a tensor, flat."""
    flat = x.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.view(f"uint{8 * x.element_size()}")


def is_nan(bits: np.ndarray, dtype: DType) -> np.ndarray:
    return (bits & ((1 << (dtype.bits - 1)) - 1)) > dtype.max_bits + 1


def assert_same_values(got: torch.Tensor, want: torch.Tensor, dtype: DType) -> None:
    """Bit for bit the same, but for which NaN it is; prints the first that differs."""
    assert got.dtype == want.dtype
    assert got.numel() == want.numel()
    a, b = bits_of(got), bits_of(want)
    differ = (a != b) & ~(is_nan(a, dtype) & is_nan(b, dtype))
    where = np.flatnonzero(differ)
    assert not where.size, f"{where.size} differ, the first at {where[0]}: {a[where[0]]:#x} for {b[where[0]]:#x}"


def random_tensor(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Ordinary values for a castable type (they fit everywhere), random bytes for any other."""
    g = torch.Generator().manual_seed(seed)
    if dtype in CASTABLE:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(torch_dtype(dtype))
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=g, dtype=torch.uint8).to(torch.bool)
    n = int(np.prod(shape, dtype=np.int64))
    raw = torch.randint(0, 256, (n * dtype.bits // 8,), generator=g, dtype=torch.uint8)
    return raw.view(torch_dtype(dtype)).view(shape) if n else torch.empty(shape, dtype=torch_dtype(dtype))


def write_checkpoint(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file with the tensors in the order given, which the library would choose itself."""
    import json

    from precconv.dtypes import dtype

    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        header[name] = {"dtype": dtype(x.dtype).code, "shape": list(x.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for x in tensors.values():
            f.write(bits_of(x.reshape(-1).view(torch.uint8)).tobytes() if x.numel() else b"")
    return path
