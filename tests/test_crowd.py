"""Small tensors measured together against the same tensors measured one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precconv.cast import one_thread
from precconv.crowd import measure_crowd
from precconv.dtypes import BF16, CASTABLE, FP16, FP32, FP64, DType
from precconv.measures import Measure
from precconv.spectrum import SMALL, Scanner

from .samples import PROPERTY, bits_of, from_bits, specials, torch_dtype

each_source = pytest.mark.parametrize("src", [FP32, FP16, BF16], ids=str)


def together(tensors: Sequence[torch.Tensor], src: DType) -> list[Measure | None]:
    data = memoryview(bytearray(b"".join(bits_of(x).tobytes() for x in tensors)))
    before = bytes(data)
    with one_thread():
        found = measure_crowd(data, src, [x.numel() for x in tensors])
    assert data == before, "what is read is left as it is"
    return found


def alone(x: torch.Tensor, src: DType) -> Measure:
    with one_thread():
        return Scanner().measure(memoryview(bytearray(bits_of(x).tobytes())), src)


def check(tensors: Sequence[torch.Tensor], src: DType) -> int:
    """Compare every measure, sums included, and count those that were made together."""
    found = together(tensors, src)
    for x, measure in zip(tensors, found, strict=True):
        assert measure is None or measure == alone(x, src), x
    return sum(measure is not None for measure in found)


@each_source
def test_ordinary_tensors_of_any_size_are_measured_together_as_each_alone(src: DType) -> None:
    g = torch.Generator().manual_seed(4)
    sizes = [1, 2, 3, 7, 64, 255, 256, 511, 512, 513, 1000, SMALL - 1, SMALL]
    tensors = [(torch.randn(n, generator=g) * 10.0**-i).to(torch_dtype(src)) for n in sizes for i in range(4)]
    for x in tensors[::5]:
        x[::3] = -0.0
    made = check(tensors, src)
    assert made == len(tensors)


@each_source
def test_every_awkward_value_is_measured_as_alone_or_left_to_it(src: DType) -> None:
    patterns = from_bits(np.array(specials(src), dtype=f"uint{src.bits}"), src)
    assert check([x.reshape(1) for x in patterns], src) > len(patterns) // 4
    mixed = [torch.cat([x.reshape(1), torch.full((5,), 0.3, dtype=x.dtype)]) for x in patterns]
    assert check(mixed, src) > len(mixed) // 4


@pytest.mark.parametrize("src", [FP16, BF16], ids=str)
def test_all_patterns_of_a_16_bit_type_are_measured_together(src: DType) -> None:
    check([from_bits(row, src) for row in np.arange(1 << 16).reshape(-1, 64)], src)


def test_an_upcast_is_exact_until_a_bit_is_set_that_the_narrow_type_has_not() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    for narrow in (FP16, BF16):
        upcast = x.to(torch_dtype(narrow)).float()
        odd = upcast.clone()
        odd.view(torch.int32)[1999] |= 1
        first, second = together([upcast, odd], FP32)
        assert first is not None
        assert first.loss(narrow).is_exact
        assert second is not None
        assert not second.loss(narrow).is_exact


def test_what_is_not_for_it_spoils_no_neighbour() -> None:
    odd = [[float("nan")], [float("inf"), 1.0], [65520.0], [1e38, -1e38], [2.0**-140], [-(2.0**-127), 0.0]]
    usual = [torch.tensor([0.5, -0.0, 3e-6]), torch.zeros(3), torch.tensor([65519.0, 2.0**-126])]
    tensors = [x for values in odd for x in (torch.tensor(values), *usual)]
    assert [m is None for m in together(tensors, FP32)] == [i % 4 == 0 for i in range(len(tensors))]
    assert check(tensors, FP32) == len(odd) * len(usual)
    assert together([torch.tensor(values) for values in odd], FP32) == [None] * len(odd)
    assert together([torch.ones(3, dtype=torch.float64)] * 2, FP64) == [None, None]


@PROPERTY
@given(st.data())
def test_neighbours_and_their_order_do_not_matter(data: st.DataObject) -> None:
    src = data.draw(st.sampled_from([d for d in CASTABLE if d is not FP64]))
    values = data.draw(st.lists(st.floats(width=16), min_size=1, max_size=120))
    x = torch.tensor(values).to(torch_dtype(src))
    cuts = sorted({0, len(values), *data.draw(st.lists(st.integers(0, len(values)), max_size=9))})
    tensors = [x[a:b] for a, b in pairwise(cuts)]
    check(tensors, src)
    assert together(tensors[::-1], src)[::-1] == together(tensors, src)
