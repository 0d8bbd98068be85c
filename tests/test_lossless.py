"""Plans that lose nothing, from what a scan says of each tensor."""

from __future__ import annotations

from pathlib import Path

import torch

import precconv
from precconv.lossless import automatic, lossless_only, undecided
from precconv.measures import Measure
from precconv.plan import Item, Plan

from .samples import write_checkpoint

FP16_ONLY = torch.tensor([[1 + 2**-10, 0.5]])  #: ten bits of mantissa
BF16_ONLY = torch.tensor([[2.0**100, 0.5]])
BOTH = torch.tensor([[1.0, 0.5]])
NEITHER = torch.tensor([[1 + 2**-20, 0.5]])


def plans(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> tuple[Plan, Plan, dict[str, Measure]]:
    path = write_checkpoint(tmp_path / "x.safetensors", tensors)
    bf16, fp16 = (precconv.plan(path, to=to, mixed="cast") for to in ("bf16", "fp16"))
    found = precconv.scan(path, mixed="cast")
    return bf16, fp16, {t.name: t.measure for t in found.tensors if t.measure is not None}


def fates(made: Plan) -> dict[str, tuple[str, str]]:
    return {item.src.name: (item.to.name, item.why) for item in made.items}


def test_the_smallest_type_that_holds_every_value_is_chosen_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = {"a": FP16_ONLY, "b": BF16_ONLY, "c": BOTH, "d": NEITHER, "n": torch.arange(2)}
    made = automatic(*plans(tmp_path, tensors))
    assert fates(made) == {
        "a": ("fp16", "lossless in fp16"),
        "b": ("bf16", "lossless in bf16"),
        "c": ("bf16", "lossless in bf16"),
        "d": ("fp32", "not exactly representable in 16 bits"),
        "n": ("int64", "int64 is not cast"),
    }


def test_16_bit_tensors_stay_what_they_are(tmp_path: Path) -> None:
    made = automatic(*plans(tmp_path, {"a": BOTH.half(), "b": BOTH.bfloat16(), "c": BF16_ONLY}))
    assert fates(made) == {
        "a": ("fp16", "already fp16"),
        "b": ("bf16", "already bf16"),
        "c": ("bf16", "lossless in bf16"),
    }


def test_fp64_becomes_fp32_only_where_that_loses_nothing(tmp_path: Path) -> None:
    tensors = {"a": BOTH.double(), "b": NEITHER.double(), "c": torch.tensor([[1 + 2**-40]], dtype=torch.float64)}
    tensors |= {"norm.weight": torch.tensor([1 + 2**-40], dtype=torch.float64)}
    made = automatic(*plans(tmp_path, tensors))
    assert fates(made) == {
        "a": ("bf16", "lossless in bf16"),
        "b": ("fp32", "lossless in fp32"),
        "c": ("fp64", "not exactly representable in fp32"),
        "norm.weight": ("fp64", "not exactly representable in fp32"),
    }


def test_what_the_rules_keep_stays_kept_however_few_bits_its_values_need(tmp_path: Path) -> None:
    tensors = {"a.weight": BOTH, "norm.weight": torch.ones(2), "scale": torch.tensor(1.0)}
    bf16, fp16, measures = plans(tmp_path, tensors)
    for made in (automatic(bf16, fp16, measures), lossless_only(bf16, measures)):
        assert fates(made)["norm.weight"] == ("fp32", "norm")
        assert fates(made)["scale"] == ("fp32", "scalar")
        assert fates(made)["a.weight"][0] == "bf16"


def test_lossless_only_keeps_what_would_lose(tmp_path: Path) -> None:
    bf16, fp16, measures = plans(tmp_path, {"a": FP16_ONLY, "b": BF16_ONLY, "c": BOTH.double(), "d": BOTH.half()})
    assert fates(lossless_only(bf16, measures)) == {
        "a": ("fp32", "not exactly representable in bf16"),
        "b": ("bf16", "target"),
        "c": ("bf16", "target"),
        "d": ("bf16", "target"),
    }
    assert fates(lossless_only(fp16, measures))["b"] == ("fp32", "not exactly representable in fp16")


def test_only_tensors_that_a_plan_would_cast_are_asked_about(tmp_path: Path) -> None:
    tensors = {"a": BOTH, "b": BOTH.half(), "c": BOTH.bfloat16(), "norm.weight": torch.ones(2), "d": BOTH.double()}
    bf16, fp16, measures = plans(tmp_path, tensors)
    assert undecided(bf16, fp16) == {"a", "d"}
    assert undecided(bf16) == {"a", "b", "d"}
    few = {name: measures[name] for name in undecided(bf16, fp16)}
    assert automatic(bf16, fp16, few) == automatic(bf16, fp16, measures)
    assert lossless_only(fp16, {n: measures[n] for n in undecided(fp16)}) == lossless_only(fp16, measures)


def test_no_plan_that_loses_nothing_changes_a_value(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(1)
    tensors = {}
    for n, kind in enumerate((torch.float64, torch.float32, torch.float16, torch.bfloat16)):
        x = torch.randn(4, 4, generator=g, dtype=torch.float64) * 10.0 ** (5 * n - 8)
        for to in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            tensors[f"{n}.{to}.weight"] = x.to(kind).to(to)
            tensors[f"{n}.{to}.norm.weight"] = x[0].to(to)
    bf16, fp16, measures = plans(tmp_path, tensors)
    for made in (automatic(bf16, fp16, measures), lossless_only(bf16, measures), lossless_only(fp16, measures)):
        for item in made.items:
            assert is_kept(tensors[item.src.name], item), item


def is_kept(x: torch.Tensor, item: Item) -> bool:
    """Whether a cast there and back gives every value of a tensor again."""
    return torch.equal(x.to(getattr(torch, item.to.torch)).to(x.dtype), x)
