"""Planning very many tensors: the benchmark measures what it says, and the bar is one."""

from __future__ import annotations

import re
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

import precconv
from benchmarks import planning
from precconv.dtypes import BF16, FP32
from precconv.plan import MAX_NAME, make_plan
from precconv.rules import Policy
from precconv.tensors import TensorInfo


@pytest.mark.parametrize("case", planning.CASES)
def test_the_names_of_a_case_never_repeat(case: str) -> None:
    names = [name for name, _ in islice(planning.CASES[case](), 5000)]
    assert len(set(names)) == 5000


@pytest.mark.parametrize(("case", "kept"), [("mixture of experts", 2), ("flat names", 0), ("numbered modules", 900)])
def test_a_case_has_the_norms_that_its_names_say(case: str, kept: int, tmp_path: Path) -> None:
    path = planning.write(dict(islice(planning.CASES[case](), 900)), tmp_path / "m.safetensors")
    plan = precconv.plan(path, to="bf16")
    assert len(plan.items) == 900
    assert abs(sum(i.why == "norm" for i in plan.items) - kept) <= 2  # the second layer may have begun


def test_each_kind_of_names_gets_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.main(["--tensors", "40", "--rounds", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "planning 40 tensors, median of 1; at most 2 s"
    assert [re.split(r"  +", row)[0] for row in rows[1:]] == list(planning.CASES)


def test_a_case_over_the_limit_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LIMIT", 0.0)
    assert planning.main(["--tensors", "4", "--rounds", "1"]) == 1


@pytest.mark.parametrize(
    "names",
    [
        ["ab." * 300_000 + "weight"],
        [f"x{i}." + "a." * 490 + "weight" for i in range(300)],
        ["modules_to_save." * 60_000 + "weight"],
        ["module." * 140 + f"layers.{i}.norm.weight" for i in range(300)],
        [f"norm{'1' * 990}{i}.weight" for i in range(300)],
    ],
    ids=["one deep name", "many deep names", "adapters", "wrappers", "digits"],
)
def test_names_with_very_many_components_cost_no_more_than_their_length(names: list[str]) -> None:
    infos = [TensorInfo(name, FP32, (16,), 0, 64) for name in names]
    make_plan(infos[:1], {}, Policy(BF16))  # reads the tables
    tracemalloc.start()
    try:
        make_plan(infos, {}, Policy(BF16))
        assert tracemalloc.get_traced_memory()[1] < 10 * sum(map(len, names))
    finally:
        tracemalloc.stop()


def test_a_name_that_is_too_long_to_be_recognised_is_cast_like_any_other() -> None:
    def why(name: str) -> str:
        (item,) = make_plan([TensorInfo(name, FP32, (16,), 0, 64)], {}, Policy(BF16)).items
        return item.why

    suffix = ".norm.weight"
    assert why("x" * (MAX_NAME - len(suffix)) + suffix) == "norm"
    assert why("x" * (MAX_NAME + 1 - len(suffix)) + suffix) == "target"
