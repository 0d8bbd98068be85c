"""The one table of element types; every size, limit and name elsewhere is derived from its rows.

The rows are in the order of the safetensors format's own list (``Dtype`` in ``tensor.rs``), which is
also the order, reversed, in which its library lays tensors out: ``DType.rank`` is that position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .errors import UsageError

__all__ = ["BF16", "CASTABLE", "DTYPES", "FP16", "FP32", "FP64", "TORCH_ONLY", "DType", "by_code", "dtype"]

#: ``quantized`` are codes of a scale kept elsewhere, ``bits`` are opaque.
Kind = Literal["bool", "int", "uint", "float", "complex", "quantized", "bits"]
#: Which magnitude patterns are not numbers: ``ieee`` the whole top exponent (Inf, NaN), ``fn`` the one
#: pattern of all ones, ``fnuz`` none (NaN is -0, the bias is one larger), ``finite`` none, ``e8m0`` a bare
#: exponent without sign, zero or subnormals (OCP Microscaling Formats v1.0; ml_dtypes).
Encoding = Literal["ieee", "fn", "fnuz", "finite", "e8m0"]


@dataclass(frozen=True, eq=False)
class DType:
    """One element type.  Equal to its own name, so ``info.dtype == "bf16"`` does what it says."""

    name: str  #: what a user types and what reports print
    code: str  #: the safetensors header's spelling; empty where the format has none
    bits: int  #: size of an element
    kind: Kind
    torch: str  #: attribute of ``torch``; may be missing in older releases
    aliases: tuple[str, ...] = ()
    exponent: int = 0  #: bits; floats only
    mantissa: int = 0  #: explicit bits; floats only
    encoding: Encoding = "ieee"

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, str) and other == self.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[object, ...]:
        return (dtype, (self.name,))

    @cached_property
    def is_castable(self) -> bool:
        """Whether precconv may change values of this type: FP64, FP32, FP16 and BF16."""
        return self in CASTABLE

    @cached_property
    def rank(self) -> int:
        """Position in the table; the safetensors library writes higher ranks first.

        Raises ValueError for the types that format has no code for.
        """
        return DTYPES.index(self)

    @cached_property
    def itemsize(self) -> int:
        """Bytes an element; raises ValueError where elements are smaller than a byte."""
        if self.bits % 8:
            raise ValueError(f"{self.name} elements are {self.bits} bits")
        return self.bits // 8

    # Limits, floats only.  Magnitude patterns are the bits without the sign: they sort as their values do.

    @cached_property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - (0 if self.encoding == "fnuz" else 1)

    @cached_property
    def max_bits(self) -> int:
        """Magnitude pattern of the largest finite value."""
        ones = (1 << (self.exponent + self.mantissa)) - 1
        reserved = {"ieee": 1 << self.mantissa, "fn": 1, "e8m0": 1, "fnuz": 0, "finite": 0}
        return ones - reserved[self.encoding]

    def magnitude(self, pattern: int) -> float:
        """The value of a finite magnitude pattern."""
        field, fraction = pattern >> self.mantissa, pattern & ((1 << self.mantissa) - 1)
        if field == 0 and self.encoding != "e8m0":
            return math.ldexp(fraction, 1 - self.bias - self.mantissa)
        return math.ldexp((1 << self.mantissa) + fraction, field - self.bias - self.mantissa)

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return self.magnitude(self.max_bits)

    @cached_property
    def smallest_normal(self) -> float:
        return self.magnitude(0 if self.encoding == "e8m0" else 1 << self.mantissa)

    @cached_property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return self.magnitude(0 if self.encoding == "e8m0" else 1)

    @cached_property
    def overflow_bound(self) -> float:
        """Where finite values stop fitting: halfway from the largest to the next that would follow it.

        Inf for FP64, whose bound no Python float can hold and no source can reach.
        """
        if self.max >= 2.0**1023:
            return math.inf
        power = math.frexp(self.max)[1] - 1
        return self.max + math.ldexp(0.5, power - self.mantissa)

    @cached_property
    def overflow_inclusive(self) -> bool:
        """Whether a value exactly on the bound overflows too: the tie goes to the even neighbour.

        Even is the significand's last bit, which is the implicit one where there is no mantissa.
        """
        return self.mantissa == 0 or bool(self.max_bits & 1)

    @cached_property
    def underflow_bound(self) -> float:
        """Largest magnitude that rounds to zero: half the smallest subnormal, the tie going to even."""
        return self.smallest_subnormal / 2


def _int(name: str, code: str, bits: int, kind: Kind, *aliases: str) -> DType:
    return DType(name, code, bits, kind, name, aliases)


DTYPES: tuple[DType, ...] = (
    _int("bool", "BOOL", 8, "bool"),
    DType("fp4", "F4", 4, "float", "float4_e2m1fn_x2", ("fp4_e2m1",), 2, 1, "finite"),
    DType("fp6_e2m3", "F6_E2M3", 6, "float", "float6_e2m3fn", (), 2, 3, "finite"),
    DType("fp6_e3m2", "F6_E3M2", 6, "float", "float6_e3m2fn", (), 3, 2, "finite"),
    _int("uint8", "U8", 8, "uint", "byte"),
    _int("int8", "I8", 8, "int", "char"),
    DType("fp8_e5m2", "F8_E5M2", 8, "float", "float8_e5m2", ("float8_e5m2",), 5, 2),
    DType("fp8_e4m3", "F8_E4M3", 8, "float", "float8_e4m3fn", ("fp8_e4m3fn", "float8_e4m3fn"), 4, 3, "fn"),
    DType("fp8_e8m0", "F8_E8M0", 8, "float", "float8_e8m0fnu", ("fp8_e8m0fnu", "float8_e8m0fnu"), 8, 0, "e8m0"),
    DType("fp8_e4m3fnuz", "F8_E4M3FNUZ", 8, "float", "float8_e4m3fnuz", ("float8_e4m3fnuz",), 4, 3, "fnuz"),
    DType("fp8_e5m2fnuz", "F8_E5M2FNUZ", 8, "float", "float8_e5m2fnuz", ("float8_e5m2fnuz",), 5, 2, "fnuz"),
    _int("int16", "I16", 16, "int", "short"),
    _int("uint16", "U16", 16, "uint"),
    DType("fp16", "F16", 16, "float", "float16", ("float16", "f16", "half"), 5, 10),
    DType("bf16", "BF16", 16, "float", "bfloat16", ("bfloat16",), 8, 7),
    _int("int32", "I32", 32, "int", "int"),
    _int("uint32", "U32", 32, "uint"),
    DType("fp32", "F32", 32, "float", "float32", ("float32", "f32", "float"), 8, 23),
    DType("complex64", "C64", 64, "complex", "complex64", ("cfloat",)),
    DType("fp64", "F64", 64, "float", "float64", ("float64", "f64", "double"), 11, 52),
    _int("int64", "I64", 64, "int", "long"),
    _int("uint64", "U64", 64, "uint"),
)


def _torch_only(name: str, bits: int, kind: Kind, *aliases: str) -> DType:
    return DType(name, "", bits, kind, name, aliases)


#: What torch stores and the safetensors format has no code for: they pass through torch checkpoints bit for
#: bit and can go nowhere else.  Without a rank; their bits are those torch keeps an element in.
TORCH_ONLY: tuple[DType, ...] = (
    _torch_only("complex32", 32, "complex", "chalf"),
    _torch_only("bcomplex32", 32, "complex"),
    _torch_only("complex128", 128, "complex", "cdouble"),
    _torch_only("quint8", 8, "quantized"),
    _torch_only("qint8", 8, "quantized"),
    _torch_only("qint32", 32, "quantized"),
    _torch_only("quint4x2", 8, "quantized"),
    _torch_only("quint2x4", 8, "quantized"),
    _torch_only("bits8", 8, "bits"),
    _torch_only("bits16", 16, "bits"),
    _torch_only("bits1x8", 8, "bits"),
    _torch_only("bits2x4", 8, "bits"),
    _torch_only("bits4x2", 8, "bits"),
    *(_torch_only(f"{sign}int{bits}", 8, "bits") for sign in ("u", "") for bits in range(1, 8)),
)

_BY_CODE = {d.code: d for d in DTYPES}
_BY_NAME = {n: d for d in DTYPES for n in (d.name, d.code.lower(), d.torch, *d.aliases)}
_BY_NAME |= {n: d for d in TORCH_ONLY for n in (d.name, *d.aliases)}

FP64, FP32, FP16, BF16 = (_BY_NAME[n] for n in ("fp64", "fp32", "fp16", "bf16"))
#: The types whose values precconv converts; every other type passes through bit for bit.
CASTABLE: tuple[DType, ...] = (FP64, FP32, FP16, BF16)
#: What ``--to`` takes.
TARGETS: tuple[DType, ...] = (FP32, FP16, BF16)


def by_code(code: str) -> DType | None:
    """The type of a safetensors header code, exactly spelled."""
    return _BY_CODE.get(code)


def dtype(key: object) -> DType:
    """A type by name, alias, header code or ``torch.dtype``; raises UsageError with the known names."""
    if isinstance(key, DType):
        return key
    found = _BY_NAME.get(str(key).lower().removeprefix("torch."))
    if found is None:
        raise UsageError(f"unknown dtype {str(key)!r}", hint=f"known: {', '.join(d.name for d in DTYPES)}")
    return found


def target(key: object) -> DType:
    """A type that ``--to`` may name; raises UsageError for the others."""
    found = _BY_NAME.get(str(key).lower().removeprefix("torch."))
    if found is None or found not in TARGETS:
        raise UsageError(f"cannot convert to {str(key)!r}", hint=f"targets: {', '.join(d.name for d in TARGETS)}")
    return found
