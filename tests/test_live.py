"""State dicts in memory: as a file of the same tensors converts, and what only a live model has."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import precconv
from precconv import cast_state_dict
from precconv.dtypes import BF16, CASTABLE, FP16, FP32, TARGETS, DType
from precconv.errors import UsageError
from precconv.live import _blocks
from precconv.runs import CHUNK_BYTES

from .samples import PROPERTY, STORABLE, bits_of, from_bits, random_tensor, specials, torch_dtype

PLAIN: dict[str, Any] = {"preset": "none", "norms": "cast", "mixed": "cast"}


def model() -> dict[str, torch.Tensor]:
    """Every dtype, awkward values, norms, a scalar, an empty tensor, one of several chunks."""
    found = {f"any.{d}": random_tensor(d, (5, 4), 3) for d in STORABLE}
    found |= {f"odd.{d}": from_bits(specials(d), d) for d in CASTABLE}
    found |= {
        "layers.0.norm.weight": torch.ones(8),
        "layers.0.norm.bias": torch.zeros(8),
        "layers.0.fc.weight": random_tensor(FP32, (CHUNK_BYTES // 4 // 100 + 7, 201), 1) * 1e-3,
        "logit_scale": torch.tensor(4.6052),
        "none": torch.empty(0, 7),
    }
    return found


def rows(report: precconv.Report) -> dict[str, Any]:
    data = report.to_dict()
    found: dict[str, Any] = {key: sorted(map(str, data[key])) for key in ("tensors", "findings", "dropped", "groups")}
    return found | {key: data[key] for key in ("totals", "notes", "warnings")}


def tried(work: Callable[[], precconv.Report]) -> precconv.Report:
    """The report, also of a refusal."""
    try:
        return work()
    except precconv.NumericError as e:
        if e.report is None:
            raise
        return e.report


def assert_same(got: dict[str, Any], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert np.array_equal(bits_of(got[name]), bits_of(x)), name


OPTIONS: list[dict[str, Any]] = [
    {},
    PLAIN,
    {"rule": ["any.*=drop", "odd.fp64=fp32"], "keep": ["layers.*"]},
    {"rounding": "stochastic", "seed": 4, "norms": "cast"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "plain", "rules", "stochastic"])
@pytest.mark.parametrize("policy", ["keep", "fp32", "bf16", "clamp", "ieee"])
@pytest.mark.parametrize("to", TARGETS, ids=str)
def test_the_bits_and_the_report_are_those_of_a_converted_file(
    tmp_path: Path, to: DType, policy: Any, options: dict[str, Any]
) -> None:
    state = model()
    save_file(state, tmp_path / "in.safetensors")
    file = tried(
        lambda: precconv.convert(
            tmp_path / "in.safetensors", to=to, output=tmp_path / "out.safetensors", on_overflow=policy, **options
        )
    )
    got: dict[str, Any] = {}

    def live() -> precconv.Report:
        state_of_it, report = cast_state_dict(state, to=to, on_overflow=policy, **options)
        got.update(state_of_it)
        return report

    report = tried(live)
    assert rows(report) == rows(file)
    assert report.ok == file.ok
    if not file.ok:
        return
    assert_same(got, load_file(tmp_path / "out.safetensors"))
    ours, theirs = dict(report.options), dict(file.options)
    assert (ours.pop("verify"), theirs.pop("verify")) == ("none", "sample")
    assert ours == theirs
    assert report.output_bytes == sum(x.nbytes for x in got.values())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_number_of_workers_does_not_matter(rounding: Any) -> None:
    state = {**model(), "late": torch.tensor([1e6, 1.0])}
    options: dict[str, Any] = {"to": "fp16", "on_overflow": "bf16", "rounding": rounding, "keep": ["odd.*"], **PLAIN}
    want, report = cast_state_dict(state, workers=1, **options)
    got, again = cast_state_dict(state, workers=4, **options)
    assert_same(got, want)
    assert rows(again) == rows(report)


# Strides ---------------------------------------------------------------------------------------------------

SHAPED = {
    "a transposed matrix": lambda x: x.view(60, 40).t(),
    "channels last": lambda x: x.view(4, 6, 10, 10).to(memory_format=torch.channels_last),
    "every second element": lambda x: x[::2],
    "a block": lambda x: x.view(60, 40)[5:20, 7:9],
    "one row for all": lambda x: x[:40].expand(7, 40),
    "a scalar": lambda x: x[5],
    "nothing": lambda x: x[:0].view(0, 3),
    "a size of one": lambda x: x.view(1, 2400, 1),
}


@pytest.mark.parametrize("shape", SHAPED)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_strides_are_those_of_to_and_elements_are_counted_in_rows(shape: str, rounding: Any) -> None:
    x = SHAPED[shape](random_tensor(FP32, (2400,), 2))
    options: dict[str, Any] = {"to": "bf16", "rounding": rounding, "rule": ["w=bf16"]}
    got, _ = cast_state_dict({"w": x}, **options)
    want = x.to(torch.bfloat16)
    assert (got["w"].stride(), got["w"].shape) == (want.stride(), want.shape)
    plain, _ = cast_state_dict({"w": x.contiguous()}, **options)
    assert torch.equal(got["w"], plain["w"])
    assert torch.equal(got["w"], want) or rounding == "stochastic"


def test_a_strided_tensor_of_many_chunks_is_cast_whole() -> None:
    x = random_tensor(FP32, (1001, CHUNK_BYTES // 4 // 300), 4).t()
    got, _ = cast_state_dict({"w": x}, to="bf16", **PLAIN)
    assert torch.equal(got["w"], x.bfloat16())
    assert got["w"].stride() == x.stride()


@PROPERTY
@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40))
def test_blocks_are_all_elements_in_order(shape: list[int], most: int) -> None:
    x = torch.arange(int(np.prod(shape))).view(shape)
    blocks = [x[index] for index in _blocks(tuple(shape), most)]
    assert all(0 < block.numel() <= most for block in blocks)
    assert torch.equal(torch.cat([x.new_empty(0), *(block.reshape(-1) for block in blocks)]), x.view(-1))


# What comes out --------------------------------------------------------------------------------------------


def test_the_input_is_not_touched_and_what_need_not_change_is_passed_on() -> None:
    state = model() | {"param": torch.nn.Parameter(torch.randn(4, 4)), "held": torch.nn.Parameter(torch.randn(4, 4))}
    before = {name: (id(x), bits_of(x.detach()).copy()) for name, x in state.items()}
    got, report = cast_state_dict(state, to="bf16", keep=["held"], on_overflow="ieee")
    assert {name: id(x) for name, x in state.items()} == {name: ident for name, (ident, _) in before.items()}
    assert all(np.array_equal(bits_of(x.detach()), before[name][1]) for name, x in state.items())
    for item in report.plan.items:
        name = item.src.name
        assert (got[name] is state[name]) == (item.to is item.src.dtype), name
    assert isinstance(got["held"], torch.nn.Parameter)
    assert type(got["param"]) is torch.Tensor
    assert not got["param"].requires_grad
    assert got["param"].grad_fn is None
    assert state["param"].requires_grad


def test_order_kind_metadata_and_what_is_no_tensor_stay() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    state: OrderedDict[str, Any] = OrderedDict(module.state_dict())
    versions = state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    extra = {"steps": 7}
    state["extra"] = extra
    state.move_to_end("extra", last=False)
    got, report = cast_state_dict(state, to="fp16", rule=["0.bias=drop"])
    assert isinstance(got, OrderedDict)
    assert list(got) == [name for name in state if name != "0.bias"]
    assert got["extra"] is extra
    assert got._metadata == versions  # type: ignore[attr-defined]
    assert got._metadata is not versions  # type: ignore[attr-defined]
    assert report.plan.notes[0] == "no tensors, kept as they are: extra"
    assert [i.src.name for i in report.plan.dropped] == ["0.bias"]
    kept = {name for name, x in got.items() if isinstance(x, torch.Tensor) and x.dtype == torch.float32}
    assert kept == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert type(cast_state_dict(dict(state), to="fp16")[0]) is dict


def test_a_module_loads_the_result() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    state, _ = cast_state_dict(module.state_dict(), to="bf16", norms="cast")
    assert state._metadata["0"] == {"version": 2}  # type: ignore[attr-defined]
    module.bfloat16().load_state_dict(state)
    assert torch.equal(module.state_dict()["1.weight"], state["1.weight"])


def test_tied_tensors_stay_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.other = torch.nn.Linear(4, 9, bias=False)

    state = Tied().state_dict()
    assert state["embed.weight"] is not state["head.weight"], "state_dict() makes views of one memory"
    for options in ({}, {"rounding": "stochastic"}):
        got, report = cast_state_dict(state, to="bf16", **options)  # type: ignore[arg-type]
        assert got["embed.weight"] is got["head.weight"]
        assert got["other.weight"] is not got["head.weight"]
        assert [t.stats.n for t in report.tensors] == [36, 36, 36]
    got, _ = cast_state_dict(state, to="bf16", rule=["head.*=fp16"])
    assert (got["embed.weight"].dtype, got["head.weight"].dtype) == (torch.bfloat16, torch.float16)
    got, _ = cast_state_dict(state, to="bf16", keep=["head.*"])
    assert got["head.weight"] is state["head.weight"]


def test_tied_tensors_that_overflow_stay_tied() -> None:
    x = torch.tensor([1.0, 1e6])
    got, report = cast_state_dict({"a": x, "b": x.view(2), "c": x.flip(0)}, to="fp16", on_overflow="bf16")
    assert got["a"] is got["b"]
    assert got["a"].dtype == torch.bfloat16
    assert [f.tensor for f in report.findings] == ["a", "b", "c"]


def test_the_config_says_what_the_architecture_needs() -> None:
    names = ["encoder.block.0.layer.1.DenseReluDense.wo.weight", "encoder.block.0.layer.1.DenseReluDense.wi.weight"]
    state = {name: torch.randn(4, 4) for name in names}
    got, report = cast_state_dict(state, to="fp16", config={"model_type": "t5"})
    assert [got[name].dtype for name in names] == [torch.float32, torch.float16]
    assert report.plan.items[0].why.startswith("preset t5")


# Trouble ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_overflow_is_refused_with_every_tensor_and_a_report(workers: int) -> None:
    state = {"a": torch.tensor([7e4]), "b": torch.randn(5), "c": torch.tensor([1.0, -1e9])}
    with pytest.raises(precconv.NumericError) as caught:
        cast_state_dict(state, to="fp16", workers=workers)
    assert str(caught.value).startswith("state dict: tensor 'a': 1 of 1 finite values do not fit fp16")
    assert "state dict: tensor 'c'" in str(caught.value)
    assert caught.value.report is not None
    assert not caught.value.report.ok
    assert [f.tensor for f in caught.value.report.findings] == ["a", "c"]


def test_what_overflows_and_is_kept_is_the_same_object() -> None:
    state = {"a": torch.tensor([7e4]), "b": torch.randn(5)}
    got, report = cast_state_dict(state, to="fp16", on_overflow="keep")
    assert got["a"] is state["a"]
    assert got["b"].dtype == torch.float16
    assert [(f.tensor, f.level) for f in report.findings] == [("a", "warning")]


@contextmanager
def quiet() -> Iterator[None]:
    """For kinds of tensors that torch says will change or go, once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Special(torch.Tensor):
    """A subclass, of which nobody knows what its values mean."""


def special() -> dict[str, tuple[torch.Tensor, str]]:
    with quiet():
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return {
        "meta": (torch.empty(3, device="meta"), "on the meta device, without values"),
        "sparse": (torch.eye(3).to_sparse(), "a sparse_coo tensor"),
        "subclass": (torch.ones(3).as_subclass(Special), "a Special"),
        "nested": (nested, "a nested tensor"),
    }


@pytest.mark.parametrize("name", ["meta", "sparse", "subclass", "nested"])
def test_what_cannot_be_cast_is_refused_unless_it_is_kept_or_dropped(name: str) -> None:
    x, kind = special()[name]
    state = {"good": torch.ones(2), name: x}
    with pytest.raises(precconv.UsageError) as caught:
        cast_state_dict(state, to="bf16")
    assert str(caught.value) == f"state dict: tensor {name!r}: is {kind}, which cannot be cast to bf16"
    assert caught.value.hint is not None
    assert f"keep=['{name}']" in caught.value.hint
    assert cast_state_dict(state, to="bf16", keep=[name])[0][name] is x
    assert name not in cast_state_dict(state, to="bf16", rule=[f"{name}=drop"])[0]


def test_what_would_not_be_cast_anyway_is_passed_on() -> None:
    with quiet():
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    state = {"q": quantized, "i": torch.arange(3, device="meta"), "w": torch.randn(3)}
    got, _ = cast_state_dict(state, to="bf16")
    assert got["q"] is quantized
    assert got["i"] is state["i"]


def test_a_parameter_that_is_not_initialised_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'weight': is not initialised"):
        cast_state_dict(torch.nn.LazyLinear(3).state_dict(), to="bf16")


def test_what_is_no_tensor_may_have_a_key_that_is_no_name() -> None:
    state, report = cast_state_dict({7: "x", "a": torch.ones(2, 2)}, to="bf16")  # type: ignore[dict-item]
    assert list(state) == [7, "a"]
    assert report.plan.notes[0] == "no tensors, kept as they are: 7"


def test_what_is_no_state_dict_is_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        ([torch.ones(2)], "a list is not a state dict"),
        ({"model": {"w": torch.ones(2)}}, "state dict: holds no tensors"),
        ({3: torch.ones(2)}, "the key 3 is not a name"),
    ]
    for state, message in wrong:
        with pytest.raises(precconv.UsageError, match=message):
            cast_state_dict(state, to="bf16")
    assert cast_state_dict({}, to="bf16")[0] == {}
    with pytest.raises(precconv.RuleError, match="matches no tensor"):
        cast_state_dict({"w": torch.ones(2)}, to="bf16", keep=["v"])
    with pytest.raises(precconv.UsageError, match="seed 1"):
        cast_state_dict({"w": torch.ones(2)}, to="bf16", seed=1)


# Cost ------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The memory of every tensor that an operation gives, by its address, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.seen[storage.data_ptr()] = max(self.seen.get(storage.data_ptr(), 0), storage.nbytes())
        return out


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_only_the_results_take_memory(rounding: Any) -> None:
    x = random_tensor(FP32, (4000, 1500), 1)
    state = {"a": x, "b": random_tensor(FP32, (4000, 1500), 2).t(), "c": x.view(-1).view(4000, 1500)}
    with Allocations() as made:
        got, _ = cast_state_dict(state, to="fp16", rounding=rounding, workers=1, **PLAIN)
    ours = {y.untyped_storage().data_ptr() for y in (*state.values(), *got.values())}
    large = {at: n for at, n in made.seen.items() if n > 4 * CHUNK_BYTES}
    assert large.keys() == ours
    assert len(ours) == 4


def test_progress_counts_the_bytes_that_are_read() -> None:
    calls: list[tuple[int, int]] = []
    x = torch.randn(1000)
    state = {"a": x, "tied": x, "large": torch.full((100,), 1e6), "ids": torch.arange(5)}
    cast_state_dict(state, to="fp16", on_overflow="fp32", workers=1, progress=lambda *now: calls.append(now))
    assert calls[-1] == (4800, 4800)
    assert calls == sorted(calls)


@pytest.mark.parametrize("dst", [FP16, BF16], ids=str)
def test_values_are_those_of_to(dst: DType) -> None:
    x = torch.randn(10_000)
    assert torch.equal(cast_state_dict({"w": x}, to=dst)[0]["w"], x.to(torch_dtype(dst)))
