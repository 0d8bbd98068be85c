"""What counts as trouble, and the sentences that say so."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from precconv.api import convert
from precconv.checks import Finding, Limits, OnNonfinite, OnOverflow, fallback, hint, run_checks
from precconv.dtypes import BF16, FP16, FP32, FP64, DType
from precconv.errors import NumericError, UsageError
from precconv.plan import Item
from precconv.stats import Stats
from precconv.tensors import TensorInfo

NAME = "h.3.attn.bias"
POLICIES = get_args(OnOverflow)
OVERFLOWED = Stats(4096, overflow=12, overflow_max=1.2e5)


def item(src: DType = FP32, to: DType = FP16, name: str = NAME) -> Item:
    return Item(TensorInfo(name, src, (4096,), 0, 4096 * src.itemsize), to, "target")


def findings(stats: Stats, of: Item | None = None, **limits: Any) -> list[tuple[str, str, str, str]]:
    return [(f.check, f.level, f.tensor, f.text) for f in run_checks(of or item(), stats, Limits(**limits))]


def test_a_clean_tensor_is_not_mentioned() -> None:
    assert findings(Stats(4096)) == []
    assert findings(Stats(4096, zero=4096, subnormal=5)) == []
    assert findings(Stats(), max_underflow=0.0) == []


# --- overflow ---------------------------------------------------------------------------------------------

TEXT = "12 of 4096 finite values do not fit fp16 (largest |x| 1.2e+05, limit 65520)"


@pytest.mark.parametrize("policy", ["error", "keep", "fp32", "bf16"])
def test_overflow_is_an_error_where_nothing_was_done_about_it(policy: str) -> None:
    assert findings(OVERFLOWED, on_overflow=policy) == [("overflow", "error", NAME, TEXT)]


def test_overflow_is_a_warning_that_says_what_was_done() -> None:
    assert findings(OVERFLOWED, on_overflow="clamp") == [("overflow", "warning", NAME, f"{TEXT}; clamped to 65504")]
    assert findings(OVERFLOWED, on_overflow="ieee") == [("overflow", "warning", NAME, f"{TEXT}; now Inf")]


@pytest.mark.parametrize(
    ("stats", "of", "text"),
    [
        (
            Stats(10, nan=2, inf=3, overflow=1, overflow_max=65520.0),
            item(),
            "1 of 5 finite values do not fit fp16 (largest |x| 6.552e+04, limit 65520)",
        ),
        (
            Stats(1, overflow=1, overflow_max=3.4e38),
            item(to=BF16),
            "1 of 1 finite values do not fit bf16 (largest |x| 3.4e+38, limit 3.39618e+38)",
        ),
        (
            Stats(1, overflow=1, overflow_max=1e300),
            item(src=FP64, to=FP32),
            "1 of 1 finite values do not fit fp32 (largest |x| 1e+300, limit 3.40282e+38)",
        ),
    ],
)
def test_overflow_is_told_among_the_finite_values_with_both_numbers(stats: Stats, of: Item, text: str) -> None:
    assert [t for _, _, _, t in findings(stats, of) if "do not fit" in t] == [text]


@pytest.mark.parametrize(
    ("policy", "src", "to", "want"),
    [
        ("error", FP32, FP16, None),
        ("clamp", FP32, FP16, None),
        ("ieee", FP32, FP16, None),
        ("keep", FP32, FP16, FP32),
        ("keep", FP64, FP16, FP64),
        ("keep", BF16, FP16, BF16),
        ("fp32", FP64, FP16, FP32),
        ("fp32", FP64, FP32, None),  # it has FP32 already, and does not fit
        ("bf16", FP32, FP16, BF16),
        ("bf16", FP32, BF16, None),
    ],
)
def test_what_overflowed_gets_the_dtype_that_the_policy_names(
    policy: Any, src: DType, to: DType, want: DType | None
) -> None:
    assert fallback(item(src, to), OVERFLOWED, Limits(policy)) is want
    assert fallback(item(src, to), Stats(4096, nan=1, underflow=4095), Limits(policy)) is None


# --- NaN and Inf ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "level"), [("warn", "warning"), ("error", "error")])
@pytest.mark.parametrize(
    ("stats", "counts"),
    [
        (Stats(4096, nan=1), "1 NaN and 0 Inf"),
        (Stats(4096, inf=2), "0 NaN and 2 Inf"),
        (Stats(4096, nan=3, inf=4), "3 NaN and 4 Inf"),
    ],
)
def test_nan_and_inf_of_the_source_are_told(policy: str, level: str, stats: Stats, counts: str) -> None:
    text = f"the source holds {counts} among 4096 values"
    assert findings(stats, on_nonfinite=policy) == [("nonfinite", level, NAME, text)]


# --- underflow --------------------------------------------------------------------------------------------


def test_underflow_is_a_warning_from_one_percent_on() -> None:
    assert findings(Stats(1000, underflow=10)) == []
    assert findings(Stats(1000, underflow=11)) == [
        ("underflow", "warning", NAME, "11 nonzero values (1.10%) become 0 in fp16")
    ]


def test_underflow_is_a_share_of_what_was_not_zero_before() -> None:
    assert findings(Stats(1000, zero=900, nan=50, inf=30, underflow=10, subnormal=1))[1] == (
        "underflow",
        "warning",
        NAME,
        "10 nonzero values (50.00%) become 0 in fp16",
    )


def test_more_underflow_than_allowed_is_an_error() -> None:
    stats = Stats(1000, underflow=50)
    assert findings(stats, max_underflow=0.05)[0][1] == "warning"
    assert findings(stats, max_underflow=1.0)[0][1] == "warning"
    assert findings(stats, max_underflow=0.049) == [
        ("underflow", "error", NAME, "50 nonzero values (5.00%) become 0 in fp16, more than 4.90%")
    ]
    assert findings(Stats(1000, underflow=1), max_underflow=0.0)[0][1] == "error"


def test_one_tensor_may_have_several_troubles() -> None:
    stats = Stats(1000, nan=1, overflow=1, overflow_max=1e9, underflow=500)
    assert [f[0] for f in findings(stats)] == ["overflow", "nonfinite", "underflow"]


# --- limits that make no sense ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"on_overflow": "klamp"}, "on_overflow 'klamp' is not one of error, keep, fp32, bf16, clamp, ieee"),
        ({"on_overflow": "fp16"}, "on_overflow 'fp16' is not one of error, keep, fp32, bf16, clamp, ieee"),
        ({"on_nonfinite": "keep"}, "on_nonfinite 'keep' is not one of warn, error"),
        ({"max_underflow": 1.01}, "max_underflow 1.01 is not a share from 0 to 1"),
        ({"max_underflow": -0.1}, "max_underflow -0.1 is not a share from 0 to 1"),
        ({"max_underflow": float("nan")}, "max_underflow nan is not a share from 0 to 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as e:
        Limits(**limits)
    assert str(e.value) == message


def test_every_policy_is_known() -> None:
    for policy in POLICIES:
        assert Limits(policy).on_overflow == policy
    assert POLICIES == ("error", "keep", "fp32", "bf16", "clamp", "ieee")
    assert get_args(OnNonfinite) == ("warn", "error")


# --- the ways out -----------------------------------------------------------------------------------------


def finding(check: str, tensor: str = NAME) -> Finding:
    return Finding(check, "error", tensor, "")


def test_the_hint_names_the_ways_out_with_a_pattern_for_the_tensors() -> None:
    assert hint([finding("overflow")], FP16) == (
        "keep it (--keep 'h.*.attn.bias'), keep whatever overflows (--on-overflow keep), "
        "clamp it (--on-overflow clamp), or use --to bf16"
    )


@pytest.mark.parametrize("target", [BF16, FP32], ids=str)
def test_bf16_is_no_way_out_of_a_target_that_holds_as_much(target: DType) -> None:
    assert hint([finding("overflow")], target) == (
        "keep it (--keep 'h.*.attn.bias'), keep whatever overflows (--on-overflow keep), "
        "or clamp it (--on-overflow clamp)"
    )


def test_tensors_at_the_same_place_of_every_layer_share_a_pattern() -> None:
    text = hint([finding("overflow", f"h.{i}.attn.bias") for i in range(40)], FP16)
    assert text.startswith("keep them (--keep 'h.*.attn.bias'), ")


def test_the_hint_has_at_most_three_patterns() -> None:
    three = hint([finding("overflow", n) for n in "abc"], FP16)
    assert three.startswith("keep them (--keep 'a' --keep 'b' --keep 'c'), ")
    more = hint([finding("overflow", n) for n in "abcd"], FP16)
    assert more.startswith("keep them (--keep 'a' --keep 'b' --keep 'c' …), ")


def test_each_trouble_has_its_own_way_out() -> None:
    assert hint([finding("nonfinite")], FP16) == "accept NaN and Inf of the source (--on-nonfinite warn)"
    assert hint([finding("underflow")], FP16) == "keep it (--keep 'h.*.attn.bias'), or raise --max-underflow"
    assert hint([finding("nonfinite"), finding("underflow", "a")], FP16) == (
        "keep it (--keep 'a'), raise --max-underflow, or accept NaN and Inf of the source (--on-nonfinite warn)"
    )


# --- as users see it --------------------------------------------------------------------------------------


def test_a_refusal_says_where_what_and_what_to_do(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    x = torch.zeros(4096)
    x[:12] = -1.2e5
    save_file({NAME: x, "h.4.attn.bias": x * 2, "ok": torch.ones(3)}, "model.safetensors")
    with pytest.raises(NumericError) as e:
        convert("model.safetensors", to="fp16")
    assert str(e.value) == (
        f"model.safetensors: tensor 'h.3.attn.bias': {TEXT}\n"
        "model.safetensors: tensor 'h.4.attn.bias': 12 of 4096 finite values do not fit fp16 "
        "(largest |x| 2.4e+05, limit 65520)"
    )
    assert e.value.hint is not None
    assert e.value.hint.startswith("keep them (--keep 'h.*.attn.bias'), ")
    assert e.value.exit_code == 3
