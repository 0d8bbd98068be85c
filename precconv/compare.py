"""The kernel of a comparison: chunks of two tensors in, how far they lie apart out.  No I/O, no policy.

Beside the cast the only module that computes with torch.  Floats are compared in FP64, to which every other float
widens exactly; integers as 64-bit patterns or, where those overflow, as Python's; all else by its bits.
Work is done in blocks that start at whole multiples of ``BLOCK`` elements of a tensor, each summed by itself,
so a result does not depend on how a tensor is cut into chunks as long as chunks start there too.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable
from functools import cache

with warnings.catch_warnings():  # numpy is not needed, and torch complains where it is not installed
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from .deviation import Comparison, Deviation, Tolerance, Worst, exact
from .dtypes import DType

__all__ = ["BLOCK", "Lanes"]

#: Elements.  Measured on 2 MB of FP32 against BF16, one thread: 16 K 1.95 ms, 64 K 1.5 ms, 128 K 1.4 ms, for which
#: it needs three times the cache.
BLOCK = 1 << 16

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOWEST = -(1 << 63)


class Lanes:
    """The two buffers of one thread, and the comparison of what is in them."""

    def __init__(self, size: int) -> None:
        """``size``: bytes of the largest chunk of either side."""
        self._raw = [mmap.mmap(-1, size) for _ in range(2)]
        self._views = [memoryview(m) for m in self._raw]
        self._bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in self._raw]

    def buffers(self, a: int, b: int) -> tuple[memoryview, memoryview]:
        """Where to put so many bytes of each side."""
        return self._views[0][:a], self._views[1][:b]

    def compare(self, pair: Comparison, start: int, n: int, tolerance: Tolerance | None) -> Deviation:
        """Compare the ``n`` elements in the buffers, which are a tensor's from ``start`` on, a multiple of BLOCK."""
        look = _LOOK[pair.how]
        total = Deviation()
        for first in range(0, n, BLOCK):
            count = min(BLOCK, n - first)
            a, b = (
                raw[first * d.bits // 8 : (first + count) * d.bits // 8]
                for raw, d in zip(self._bytes, (pair.a, pair.b), strict=True)
            )
            if pair.a is pair.b and _same_bytes(a, b):
                total += Deviation(count, squares=_squares_alone(a, pair))
            else:
                total += look(a, b, pair, start + first, tolerance)
        return total


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = a.numel() // 8 * 8  # in the wide type torch compares seven times as fast
    wide = (x[:whole].view(torch.int64) for x in (a, b))
    return torch.equal(*wide) and torch.equal(a[whole:], b[whole:])


# --- floats -------------------------------------------------------------------------------------------------


@cache
def _values(dtype: DType) -> torch.Tensor:
    """The value of every pattern of an 8-bit float type, from the dtype table: torch cannot widen all of them."""
    signs = 1 if dtype.encoding == "e8m0" else 2
    magnitudes = [
        dtype.magnitude(m) if m <= dtype.max_bits else math.inf if _is_inf(m, dtype) else math.nan
        for m in range(256 // signs)
    ]
    values = [sign * m for sign in (1.0, -1.0)[:signs] for m in magnitudes]
    if dtype.encoding == "fnuz":
        values[128] = math.nan  # what would be -0.0
    return torch.tensor(values, dtype=torch.float64)


def _is_inf(magnitude: int, dtype: DType) -> bool:
    return dtype.encoding == "ieee" and magnitude == dtype.max_bits + 1


def _widened(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Bytes as FP64 values, exactly."""
    if dtype.bits == 8:
        return _values(dtype)[x.long()]
    kind = getattr(torch, dtype.torch)
    assert isinstance(kind, torch.dtype)
    return x.view(kind).double()


def _square_sum(x: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x))
    return norm * norm  # Inf where ** would raise


def _squares_alone(x: torch.Tensor, pair: Comparison) -> int:
    if pair.how != "float":
        return 0
    a = _widened(x, pair.a)
    total = _square_sum(a)
    if not math.isfinite(total):
        total = _square_sum(a.masked_fill_(~torch.isfinite(a), 0))
    return exact(total)


def _floats(x: torch.Tensor, y: torch.Tensor, pair: Comparison, start: int, tolerance: Tolerance | None) -> Deviation:
    a, b = _widened(x, pair.a), _widened(y, pair.b)
    error = a - b
    squares, noise = _square_sum(a), _square_sum(error)
    odd = None  # where one side is not finite and the other is something else
    size, reference = error.abs_(), a
    if not math.isfinite(squares) or not math.isfinite(noise):
        finite = torch.isfinite(a) & torch.isfinite(b)
        odd = ~finite & (a != b) & ~(torch.isnan(a) & torch.isnan(b))
        size, reference = size.masked_fill(~finite, 0), a.masked_fill(~finite, 0)
        squares, noise = _square_sum(reference), _square_sum(size)
    differs = size != 0 if odd is None else (size != 0) | odd
    found = int(differs.sum())
    beyond = None
    if tolerance is not None:
        beyond = size > tolerance.atol + tolerance.rtol * reference.abs()
        beyond = beyond if odd is None else beyond | odd
    bits = _other_bits(x, y, pair) if pair.a is pair.b else None
    changed = 0 if bits is None else int(bits.sum())
    nans = 0 if bits is None or odd is None else int((bits & torch.isnan(a) & torch.isnan(b)).sum())
    at = _worst_at(size, odd, beyond, differs if found else bits)
    return Deviation(
        n=a.numel(),
        differing=found,
        nonfinite=0 if odd is None else int(odd.sum()),
        zeros=changed - found - nans if bits is not None else 0,
        nans=nans,
        beyond=0 if beyond is None else int(beyond.sum()),
        max_abs_error=float(size.max()),
        squares=exact(squares),
        squared_errors=exact(noise),
        worst=None if at is None else _worst(x, y, pair, start, *at, float(size[at[1]])),
    )


def _other_bits(x: torch.Tensor, y: torch.Tensor, pair: Comparison) -> torch.Tensor:
    kind = _INT[pair.a.itemsize]
    return x.view(kind) != y.view(kind)


def _worst_at(
    size: torch.Tensor, odd: torch.Tensor | None, beyond: torch.Tensor | None, differs: torch.Tensor | None
) -> tuple[int, int] | None:
    """(rank, position) of the worst element, as ``Worst`` ranks them; None where all are the same."""
    if odd is not None and bool(odd.any()):
        return 3, _first(odd)
    if beyond is not None and bool(beyond.any()):
        return 2, int(size.masked_fill(~beyond, 0).argmax())
    largest = int(size.argmax())  # the first of several
    if bool(size[largest] > 0):
        return 1, largest
    if differs is not None and bool(differs.any()):
        return 0, _first(differs)
    return None


def _first(mask: torch.Tensor) -> int:
    return int(mask.to(torch.uint8).argmax())


def _worst(x: torch.Tensor, y: torch.Tensor, pair: Comparison, start: int, rank: int, at: int, error: float) -> Worst:
    a, b = (float(_widened(_element(raw, at, d), d)) for raw, d in ((x, pair.a), (y, pair.b)))
    return Worst(rank, error, start + at, a, b, _pattern(x, at, pair.a), _pattern(y, at, pair.b))


def _element(raw: torch.Tensor, at: int, dtype: DType) -> torch.Tensor:
    return raw[at * dtype.itemsize : (at + 1) * dtype.itemsize]


def _pattern(raw: torch.Tensor, at: int, dtype: DType) -> int:
    """The bits of an element, little-endian; those of packed ones follow each other from the lowest bit up."""
    first, end = at * dtype.bits // 8, -(-(at + 1) * dtype.bits // 8)
    whole = int.from_bytes(bytes(raw[first:end].tolist()), "little")
    return whole >> (at * dtype.bits - first * 8) & ((1 << dtype.bits) - 1)


# --- integers -----------------------------------------------------------------------------------------------


def _wide_int(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Bytes as 64-bit integers: the values, but of uint64 the bits."""
    if dtype.bits == 8:
        return (x if dtype.kind != "int" else x.view(torch.int8)).long()
    values = x.view(_INT[dtype.itemsize]).long()
    return values & ((1 << dtype.bits) - 1) if dtype.kind == "uint" and dtype.bits < 64 else values


def _unsigned(x: torch.Tensor) -> torch.Tensor:
    """64-bit patterns as the nearest FP64 of the unsigned integer."""
    return x.double() + (x < 0) * 2.0**64


def _ints(x: torch.Tensor, y: torch.Tensor, pair: Comparison, start: int, tolerance: Tolerance | None) -> Deviation:
    a, b = _wide_int(x, pair.a), _wide_int(y, pair.b)
    high_a, high_b = (d.kind == "uint" and d.bits == 64 for d in (pair.a, pair.b))
    if high_a != high_b and bool(((a if high_a else b) < 0).any()):
        return _python_ints(a, b, pair, start, tolerance)
    turn = _LOWEST if high_a and high_b else 0  # the top bit turned: unsigned patterns sort as signed ones
    # The distance of two signed numbers fits 64 bits without a sign.
    distance = torch.where((a ^ turn) > (b ^ turn), a - b, b - a)
    order = distance ^ _LOWEST
    largest = int(order.max()) - _LOWEST
    if not largest:
        return Deviation(a.numel())
    outside = 0
    if tolerance is not None:
        reference = _unsigned(a) if high_a else a.double().abs()
        within = _unsigned(distance) <= tolerance.atol + tolerance.rtol * reference
        outside = a.numel() - int(within.sum())
        if outside:
            order = order.masked_fill(within, _LOWEST)
    at = int(order.argmax())
    rank, error = 2 if outside else 1, float(int(order[at]) - _LOWEST)
    return Deviation(
        n=a.numel(),
        differing=int((distance != 0).sum()),
        beyond=outside,
        max_abs_error=largest,
        worst=_int_worst(x, y, pair, start, rank, error, at),
    )


def _python_ints(
    a: torch.Tensor, b: torch.Tensor, pair: Comparison, start: int, tolerance: Tolerance | None
) -> Deviation:
    """uint64 that no int64 holds, against another type: rare, and 65 bits."""
    masks = [(1 << d.bits) - 1 for d in (pair.a, pair.b)]
    left, right = (
        [v & mask if d == "uint64" else v for v in x.tolist()]
        for x, d, mask in zip((a, b), (pair.a, pair.b), masks, strict=True)
    )
    total = Deviation(len(left))
    for i, (p, q) in enumerate(zip(left, right, strict=True)):
        if p != q:
            error = abs(p - q)
            outside = tolerance is not None and float(error) > tolerance.atol + tolerance.rtol * float(abs(p))
            worst = Worst(2 if outside else 1, float(error), start + i, p, q, p & masks[0], q & masks[1])
            total += Deviation(differing=1, beyond=int(outside), max_abs_error=error, worst=worst)
    return total


def _int_worst(
    x: torch.Tensor, y: torch.Tensor, pair: Comparison, start: int, rank: int, error: float, at: int
) -> Worst:
    patterns = [_pattern(raw, at, d) for raw, d in ((x, pair.a), (y, pair.b))]
    a, b = (
        p - (1 << d.bits) if d.kind == "int" and p >> (d.bits - 1) else p
        for p, d in zip(patterns, (pair.a, pair.b), strict=True)
    )
    return Worst(rank, error, start + at, a, b, *patterns)


# --- bits ---------------------------------------------------------------------------------------------------


def _bits(x: torch.Tensor, y: torch.Tensor, pair: Comparison, start: int, tolerance: Tolerance | None) -> Deviation:
    """Elements of one dtype as they are; every other one is beyond any tolerance."""
    bits = pair.a.bits
    if bits % 8:
        changed = (x ^ y).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
        differs = changed.view(-1, bits).any(1)
    else:
        differs = (x != y).view(-1, bits // 8).any(1)
    found, at = int(differs.sum()), _first(differs)
    beyond = found if tolerance is not None else 0
    a, b = (_pattern(raw, at, pair.a) for raw in (x, y))
    values = [_text(raw, at, pair.a) for raw in (x, y)]
    return Deviation(
        differs.numel(),
        found,
        beyond=beyond,
        worst=Worst(2 if beyond else 1, 0.0, start + at, values[0], values[1], a, b),
    )


def _text(raw: torch.Tensor, at: int, dtype: DType) -> str:
    """A complex number as Python writes it, anything else as its bits."""
    if dtype in ("complex64", "complex128"):
        kind = torch.complex64 if dtype == "complex64" else torch.complex128
        return str(_element(raw, at, dtype).view(kind).item())
    return f"{_pattern(raw, at, dtype):#0{2 + -(-dtype.bits // 4)}x}"


_Look = Callable[[torch.Tensor, torch.Tensor, Comparison, int, Tolerance | None], Deviation]
_LOOK: dict[str, _Look] = {"float": _floats, "int": _ints, "bits": _bits}
