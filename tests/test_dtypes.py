"""The dtype table against the libraries that define these types: every row, every derived limit."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from precconv.dtypes import (
    BF16,
    CASTABLE,
    DTYPES,
    FP16,
    FP32,
    FP64,
    TARGETS,
    TORCH_ONLY,
    DType,
    by_code,
    dtype,
    target,
)
from precconv.errors import UsageError

from .samples import torch_dtype

FLOATS = [d for d in DTYPES if d.kind == "float"]
ML = {
    "fp4": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e8m0": ml_dtypes.float8_e8m0fnu,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp64": np.float64,
}
#: Those that round to something that is not a number beyond their bound; the others saturate.
ROUNDING = [d for d in FLOATS if d.encoding != "finite" and d is not FP64]
each_float = pytest.mark.parametrize("d", FLOATS, ids=str)
each_rounding = pytest.mark.parametrize("d", ROUNDING, ids=str)
each = pytest.mark.parametrize("d", DTYPES, ids=str)


def in_torch(value: float, d: DType) -> float:
    """The value after torch rounded it to ``d``, by way of nothing narrower than FP64 where torch can."""
    source = torch.float64 if d is FP32 else torch.float32
    return float(torch.tensor([value] * 64, dtype=source).to(torch_dtype(d)).float()[0])


def in_numpy(value: float, d: DType) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.float64(value).astype(ML[d.name]).astype(np.float64))


def references(d: DType) -> tuple[Callable[[float, DType], float], ...]:
    """Who says what a value becomes in ``d``; some releases of torch saturate the ``fn`` type, others give NaN."""
    return (in_numpy,) if d.encoding == "fn" else (in_torch, in_numpy)


def neighbours(value: float, d: DType) -> tuple[float, float]:
    """The values next to ``value`` in the type that torch rounds from."""
    wide = np.float64 if d is FP32 else np.float32
    return tuple(float(np.nextafter(wide(value), wide(to))) for to in (0.0, math.inf))  # type: ignore[return-value]


@each
def test_every_type_has_the_size_that_torch_gives_it(d: DType) -> None:
    if not hasattr(torch, d.torch) or d.name == "fp4":  # torch's packs two elements into one of its own
        pytest.skip("torch has no such elements")
    assert torch_dtype(d).itemsize * 8 == d.bits
    assert torch_dtype(d).itemsize == d.itemsize
    assert torch_dtype(d).is_floating_point == (d.kind == "float")
    assert torch_dtype(d).is_complex == (d.kind == "complex")


@each
def test_only_elements_of_whole_bytes_have_an_itemsize(d: DType) -> None:
    if d.bits % 8:
        with pytest.raises(ValueError, match=f"{d.name} elements are {d.bits} bits"):
            _ = d.itemsize
    else:
        assert d.itemsize * 8 == d.bits


@each_float
def test_the_fields_of_a_float_fill_its_bits(d: DType) -> None:
    sign = 0 if d.encoding == "e8m0" else 1
    assert sign + d.exponent + d.mantissa == d.bits


@each_float
def test_limits_are_those_of_ml_dtypes_and_numpy(d: DType) -> None:
    info: Any = ml_dtypes.finfo(ML[d.name])  # type: ignore[no-untyped-call]
    assert d.bits == info.bits
    assert d.max == float(info.max)
    assert d.smallest_normal == float(info.smallest_normal)
    assert d.smallest_subnormal == float(info.smallest_subnormal)
    assert d.mantissa == info.nmant


@each_float
def test_limits_are_those_of_torch(d: DType) -> None:
    if not hasattr(torch, d.torch) or d.name == "fp4":
        pytest.skip("torch has no finfo of it")
    info = torch.finfo(torch_dtype(d))
    assert d.max == info.max
    assert d.smallest_normal == info.smallest_normal


@each_float
def test_every_magnitude_pattern_has_the_value_that_ml_dtypes_reads(d: DType) -> None:
    patterns = np.arange(min(d.max_bits + 1, 1 << 16), dtype=np.uint64)
    if d.bits > 16:  # the start, the end, and each power of two with its neighbours
        powers = [(e << d.mantissa) + i for e in range(1, 1 << d.exponent) for i in (-1, 0, 1)]
        patterns = np.array([0, 1, *(p for p in powers if p <= d.max_bits), d.max_bits], dtype=np.uint64)
    values = patterns.astype(f"uint{max(d.bits, 8)}").view(ML[d.name]).astype(np.float64)
    assert [d.magnitude(int(p)) for p in patterns] == values.tolist()


@each_float
def test_the_pattern_after_the_largest_is_not_a_finite_positive_number(d: DType) -> None:
    after = d.max_bits + 1
    if after >> (d.bits - (d.encoding != "e8m0")):
        return  # there is no such pattern
    value = float(np.array([after], f"uint{max(d.bits, 8)}").view(ML[d.name]).astype(np.float64)[0])
    assert not math.isfinite(value)


@each_rounding
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_overflow_bound_is_where_rounding_leaves_the_finite_numbers(d: DType, sign: float) -> None:
    if d.encoding == "e8m0" and sign < 0:
        pytest.skip("has no sign")
    below, above = neighbours(d.overflow_bound, d)
    for rounded in references(d):
        assert rounded(sign * below, d) == sign * d.max
        assert not math.isfinite(rounded(sign * above, d))


@each_rounding
def test_the_bound_itself_follows_the_tie_rule(d: DType) -> None:
    for rounded in references(d):
        assert math.isfinite(rounded(d.overflow_bound, d)) == (not d.overflow_inclusive)


def test_the_bounds_of_the_targets_are_the_known_ones() -> None:
    assert FP16.overflow_bound == 65520
    assert BF16.overflow_bound == pytest.approx(3.39617753e38, rel=1e-8)
    assert Fraction(FP32.overflow_bound) == Fraction(2) ** 128 - Fraction(2) ** 103
    assert FP64.overflow_bound == math.inf
    assert all(d.overflow_inclusive for d in TARGETS)


@pytest.mark.parametrize("d", [d for d in ROUNDING if d.encoding != "e8m0"], ids=str)
def test_the_underflow_bound_is_the_largest_value_that_becomes_zero(d: DType) -> None:
    _, above = neighbours(d.underflow_bound, d)
    for rounded in references(d):
        assert rounded(d.underflow_bound, d) == 0
        assert rounded(above, d) == d.smallest_subnormal


def test_no_name_code_or_alias_means_two_types() -> None:
    names = [n.lower() for d in (*DTYPES, *TORCH_ONLY) for n in {d.name, d.code.lower(), d.torch, *d.aliases} - {""}]
    assert sorted(names) == sorted(set(names))


@each
def test_a_type_is_found_by_each_of_its_names_in_any_case(d: DType) -> None:
    for name in (d.name, d.code, d.torch, *d.aliases):
        for spelling in (name, name.lower(), name.upper(), f"torch.{name}"):
            assert dtype(spelling) is d
    assert dtype(d) is d
    assert by_code(d.code) is d


def test_codes_are_found_only_as_they_are_spelled() -> None:
    assert by_code("bf16") is None
    assert by_code("BFLOAT16") is None


@each
def test_a_type_is_found_by_its_torch_dtype(d: DType) -> None:
    if not hasattr(torch, d.torch):
        pytest.skip("this torch has no such type")
    assert dtype(torch_dtype(d)) is d


@pytest.mark.parametrize("d", TORCH_ONLY, ids=str)
def test_a_type_of_torch_alone_has_torchs_size_and_no_code(d: DType) -> None:
    assert (d.code, d.is_castable, d in DTYPES) == ("", False, False)
    assert by_code(d.code) is None
    with pytest.raises(ValueError, match="not in tuple"):
        _ = d.rank
    if hasattr(torch, d.torch):
        assert torch_dtype(d).itemsize * 8 == d.bits
        assert dtype(torch_dtype(d)) is d


@pytest.mark.parametrize(
    ("alias", "name"),
    [("half", "fp16"), ("float", "fp32"), ("double", "fp64"), ("f32", "fp32"), ("F16", "fp16"), ("bfloat16", "bf16")],
)
def test_the_usual_aliases_are_known(alias: str, name: str) -> None:
    assert dtype(alias).name == name
    assert dtype(getattr(torch, alias, alias)).name == name


@pytest.mark.parametrize("key", ["fp17", "", "torch.", "torch.tensor", None, 16, torch.Tensor, "bf16 "])
def test_an_unknown_type_is_refused_with_the_known_ones(key: object) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(str(key)))) as e:
        dtype(key)
    assert e.value.hint is not None
    assert all(d.name in e.value.hint for d in DTYPES)


@each
def test_only_the_three_targets_can_be_converted_to(d: DType) -> None:
    if d.name in ("fp32", "fp16", "bf16"):
        assert target(d.name) is d
        assert target(d) is d
        assert target(torch_dtype(d)) is d
    else:
        with pytest.raises(UsageError, match=f"cannot convert to '{d.name}'") as e:
            target(d)
        assert e.value.hint == "targets: fp32, fp16, bf16"


def test_four_types_are_castable() -> None:
    assert [d.name for d in DTYPES if d.is_castable] == ["fp16", "bf16", "fp32", "fp64"]
    assert set(CASTABLE) == {FP64, FP32, FP16, BF16}


def test_the_codes_are_those_of_the_safetensors_library_and_no_others(tmp_path: Path) -> None:
    import json
    import struct

    from safetensors import SafetensorError, safe_open

    path = tmp_path / "x.safetensors"
    raw = json.dumps({"x": {"dtype": "nonsense", "shape": [], "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(SafetensorError, match="unknown variant") as e, safe_open(path, "pt"):
        pass
    listed = re.findall(r"`(\w+)`", str(e.value).split("expected one of")[1])
    assert [d.code for d in DTYPES] == listed


def test_the_order_of_the_table_is_the_order_in_which_the_library_lays_out(tmp_path: Path) -> None:
    from safetensors import safe_open

    by_name = {d.name: torch.zeros(8, dtype=torch.uint8) for d in DTYPES if d.bits >= 8 and hasattr(torch, d.torch)}
    path = tmp_path / "x.safetensors"
    save_file({n: x.view(torch_dtype(dtype(n))) for n, x in by_name.items()}, path)
    with safe_open(path, "pt") as f:
        assert f.offset_keys() == sorted(by_name, key=lambda n: -dtype(n).rank)
    assert {n: dtype(x.dtype).name for n, x in load_file(path).items()} == {n: n for n in by_name}


@each
def test_a_type_stays_itself_through_pickle_and_copy(d: DType) -> None:
    assert pickle.loads(pickle.dumps(d)) is d
    assert copy.copy(d) is d
    assert copy.deepcopy(d) is d


@each
def test_a_type_equals_its_own_name_and_nothing_else(d: DType) -> None:
    assert d == d.name
    assert d.name == d
    assert hash(d) == hash(d.name)
    assert d in {d.name, ""}
    assert str(d) == d.name
    assert d != d.code
    assert d != torch_dtype(d) if hasattr(torch, d.torch) else True
    assert [o for o in DTYPES if o == d] == [d]


def test_a_type_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        FP16.bits = 32  # type: ignore[misc]
