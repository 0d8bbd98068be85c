"""Which dtype a tensor gets: how rules are read, which one wins, and what can never happen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv.dtypes import BF16, CASTABLE, DTYPES, FP16, FP32, FP64, TARGETS, DType, dtype
from precconv.errors import RuleError
from precconv.plan import Item, Plan, make_plan
from precconv.rules import Facts, Policy, Rule, decide, generalise, read_rules, suggest
from precconv.tensors import TensorInfo

from .samples import PROPERTY

NOT_CASTABLE = [d for d in DTYPES if d not in CASTABLE]


def info(
    name: str = "model.layers.0.mlp.weight", of: str | DType = FP32, shape: tuple[int, ...] = (4, 8)
) -> TensorInfo:
    d = dtype(of)
    n = 1
    for size in shape:
        n *= size
    return TensorInfo(name, d, shape, 0, n * d.bits // 8)


def decided(t: TensorInfo, to: DType, *rules: Rule, norms: Any = "fp32", facts: Facts = Facts()) -> tuple[str, str]:  # noqa: B008
    got, why = decide(t, Policy(to, rules, norms=norms), facts)
    return str(got), why


def fates(names: list[str], *rules: str | Rule, to: DType = BF16) -> dict[str, tuple[str, str]]:
    """Name to (dtype, reason) for FP32 matrices; what is dropped has the dtype ``dropped``."""
    policy = Policy(to, tuple(r if isinstance(r, Rule) else Rule.parse(r) for r in rules))
    plan = make_plan([info(n) for n in names], {}, policy)
    kept = {i.src.name: (str(i.to), i.why) for i in plan.items}
    return kept | {i.src.name: ("dropped", i.why) for i in plan.dropped}


# --- reading a rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match", "to"),
    [
        ("*.bias=fp32", "*.bias", "fp32"),
        ("*.bias=keep", "*.bias", "keep"),
        ("*.bias=drop", "*.bias", "drop"),
        ("*=half", "*", "fp16"),
        ("*=BFloat16", "*", "bf16"),
        ("*=torch.float64", "*", "fp64"),
        ("a=b=c=keep", "a=b=c", "keep"),
        ("re:^a=(b|c)$=fp16", "re:^a=(b|c)$", "fp16"),
    ],
)
def test_a_rule_is_a_pattern_and_an_action(text: str, match: str, to: str) -> None:
    rule = Rule.parse(text)
    assert (rule.match, str(rule.to)) == (match, to)
    assert rule.why == f"rule {match}"
    assert str(rule) == f"--rule {match!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*.bias", "--rule '*.bias' has no '='"),
        ("", "--rule '' has no '='"),
        ("=fp16", "--rule: '' is not a pattern of tensor names"),
        ("*.bias=", "--rule '*.bias': unknown action ''"),
        ("*.bias=fp17", "--rule '*.bias': unknown action 'fp17'"),
        ("*.bias=int8", "--rule '*.bias': unknown action 'int8'"),
        ("*.bias=fp8_e4m3", "--rule '*.bias': unknown action 'fp8_e4m3'"),
        ("*.bias=Keep", "--rule '*.bias': unknown action 'Keep'"),
        ("re:(=keep", "--rule 're:(': not a regular expression (missing ), unterminated subpattern at position 0)"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError) as e:
        Rule.parse(text)
    assert str(e.value) == message


def test_a_rule_without_an_action_is_told_how_to_write_it() -> None:
    with pytest.raises(RuleError) as e:
        Rule.parse("*.bias")
    assert e.value.hint == "write it as 'GLOB=ACTION', e.g. '*.bias=fp32'"


def test_an_unknown_action_is_told_the_known_ones() -> None:
    with pytest.raises(RuleError) as e:
        Rule.parse("*=fp17")
    assert e.value.hint == "actions: fp32, fp16, bf16, fp64, keep, drop"


def test_keep_reads_its_whole_text_as_a_pattern() -> None:
    rule = Rule.keep("a=fp16")
    assert (rule.match, rule.to, str(rule)) == ("a=fp16", "keep", "--keep 'a=fp16'")
    with pytest.raises(RuleError, match="--keep: '' is not a pattern of tensor names"):
        Rule.keep("")
    with pytest.raises(RuleError, match="--keep 're:\\*': not a regular expression"):
        Rule.keep("re:*")


def test_rules_are_equal_by_what_they_do_and_not_by_where_they_stood() -> None:
    assert Rule.parse("a=keep") == Rule.keep("a")
    assert Rule.parse("a=keep") != Rule.parse("a=drop")


@pytest.mark.parametrize("to", ["bf16", "half", "keep", "drop"])
def test_a_rule_can_be_made_in_python_with_the_names_that_the_command_takes(to: Any) -> None:
    assert Rule("*.bias", to) == Rule.parse(f"*.bias={to}")


@pytest.mark.parametrize(("match", "to"), [("", "keep"), ("a", "int8"), ("a", None), ("re:(", "keep"), (7, "keep")])
def test_a_bad_rule_made_in_python_is_refused_at_once(match: Any, to: Any) -> None:
    with pytest.raises(RuleError):
        Rule(match, to)


# --- matching ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "name", "found"),
    [
        ("*.bias", "h.0.bias", True),
        ("*.bias", "bias", False),
        ("*.bias", "h.0.bias.x", False),
        ("bias", "h.0.bias", False),
        ("h.*.bias", "h.0.attn.bias", True),  # a star crosses dots
        ("h.?.bias", "h.10.bias", False),
        ("h.[01].bias", "h.1.bias", True),
        ("h.[!01].bias", "h.1.bias", False),
        ("H.0.BIAS", "h.0.bias", False),  # names differ by case, on Windows too
        ("*", "", True),
        ("*", "two\nlines", True),
        ("a.b", "axb", False),  # a dot is a dot
        ("re:bias", "h.0.bias.x", True),
        ("re:^bias", "h.0.bias", False),
        (r"re:h\.\d+\.bias$", "h.10.bias", True),
        (r"re:h\.\d\.bias$", "h.10.bias", False),
        ("re:(?i)BIAS", "h.0.bias", True),
        ("re:", "anything", True),
    ],
)
def test_globs_match_whole_names_and_expressions_any_part(match: str, name: str, found: bool) -> None:
    assert Rule.keep(match).matches(name) is found


# --- which rule wins --------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_wins() -> None:
    names = ["a.weight", "b.weight", "c.bias"]
    assert fates(names, "a.*=fp16", "*.weight=keep", "*=fp32") == {
        "a.weight": ("fp16", "rule a.*"),
        "b.weight": ("fp32", "rule *.weight"),
        "c.bias": ("fp32", "rule *"),
    }
    assert fates(names, "*=fp32", "a.*=fp16")["a.weight"] == ("fp32", "rule *")


def test_dropped_tensors_leave_the_plan_and_are_listed() -> None:
    policy = Policy(BF16, (Rule.parse("ema.*=drop"),))
    plan = make_plan([info("ema.w"), info("w")], {"a": "b"}, policy)
    assert [i.src.name for i in plan.items] == ["w"]
    assert plan.dropped == (Item(info("ema.w"), FP32, "rule ema.*"),)
    assert plan.source_bytes == 128
    assert plan.output_bytes == 64
    assert plan.metadata == {"a": "b"}


def test_a_rule_comes_before_everything_else_that_decides() -> None:
    norm, scalar = info("norm.weight", shape=(8,)), info("scale", shape=())
    facts = Facts(norms=frozenset({"norm.weight"}))
    rule = Rule.parse("*=fp16")
    assert decided(norm, BF16, rule, facts=facts) == ("fp16", "rule *")
    assert decided(scalar, BF16, rule) == ("fp16", "rule *")
    assert decided(info(of="bf16"), BF16, rule) == ("fp16", "rule *")
    assert decided(info(of="fp16"), FP32, Rule.keep("*")) == ("fp16", "rule *")


@pytest.mark.parametrize("d", NOT_CASTABLE, ids=str)
def test_no_rule_casts_what_is_not_castable(d: DType) -> None:
    t = info(of=d, shape=(4, 8))
    for to in TARGETS:
        assert decided(t, to) == (d.name, f"{d} is not cast")
        assert decided(t, to, Rule.parse("*=fp16")) == (d.name, "rule *")
        assert decided(t, to, Rule.keep("*")) == (d.name, "rule *")
        assert decide(t, Policy(to, (Rule.parse("*=drop"),)), Facts()) == (None, "rule *")


# --- without rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", TARGETS, ids=str)
def test_a_tensor_that_has_the_target_already_is_left_alone(to: DType) -> None:
    assert decided(info(of=to), to) == (to.name, f"already {to}")
    assert decided(info("n.weight", of=to, shape=(8,)), to, facts=Facts(norms=frozenset({"n.weight"}))) == (
        to.name,
        f"already {to}",
    )
    assert decided(info(of=to, shape=()), to) == (to.name, f"already {to}")


@pytest.mark.parametrize(
    ("src", "to", "want"),
    [
        ("fp32", "bf16", "fp32"),
        ("fp32", "fp16", "fp32"),
        ("fp64", "fp32", "fp64"),
        ("fp64", "fp16", "fp64"),
        ("fp16", "bf16", "fp16"),
        ("bf16", "fp16", "bf16"),
        ("fp16", "fp32", "fp32"),  # nothing is lost: the target is wider
        ("bf16", "fp32", "fp32"),
    ],
)
def test_a_scalar_keeps_its_dtype_unless_the_target_holds_all_of_it(src: str, to: str, want: str) -> None:
    got, why = decided(info("logit_scale", of=src, shape=()), dtype(to))
    assert got == want
    assert why == ("scalar" if want == src else "target")


def test_one_element_in_one_dimension_is_no_scalar() -> None:
    assert decided(info(shape=(1,)), FP16) == ("fp16", "target")


@pytest.mark.parametrize(
    ("src", "to", "want", "why"),
    [
        ("fp32", "bf16", "fp32", "norm"),
        ("fp32", "fp16", "fp32", "norm"),
        ("fp64", "bf16", "fp32", "norm"),
        ("fp16", "bf16", "fp32", "norm"),
        ("bf16", "fp16", "fp32", "norm"),
        ("bf16", "bf16", "bf16", "already bf16"),
        ("fp16", "fp32", "fp32", "target"),
        ("fp64", "fp32", "fp32", "target"),
    ],
)
def test_a_norm_becomes_fp32_and_never_narrower(src: str, to: str, want: str, why: str) -> None:
    t = info("ln.weight", of=src, shape=(8,))
    assert decided(t, dtype(to), facts=Facts(norms=frozenset({"ln.weight"}))) == (want, why)


def test_norms_are_cast_when_the_user_says_so() -> None:
    infos = [info("ln_f.weight", shape=(8,)), info("h.0.norm.bias", shape=(8,)), info("h.0.weight")]
    assert [str(i.to) for i in make_plan(infos, {}, Policy(FP16)).items] == ["fp32", "fp32", "fp16"]
    assert [str(i.to) for i in make_plan(infos, {}, Policy(FP16, norms="cast")).items] == ["fp16"] * 3


# --- properties -------------------------------------------------------------------------------------------

infos = st.builds(
    info,
    st.sampled_from(["a.weight", "norm.weight", "norm.bias", "scale", "b.0.bias"]),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (8,), (4, 8), (0, 8)]),
)
rules = st.builds(
    Rule,
    st.sampled_from(["*", "norm.*", "*.weight", "re:bias$", "scale"]),
    st.sampled_from(["keep", "drop", *CASTABLE]),
)
facts = st.sampled_from([Facts(), Facts(norms=frozenset({"norm.weight", "norm.bias"}))])


def holds_all(wide: DType, narrow: DType) -> bool:
    """Whether every finite value of one type is a value of the other, from the table alone."""
    return (
        wide.mantissa >= narrow.mantissa
        and wide.max >= narrow.max
        and wide.smallest_subnormal <= narrow.smallest_subnormal
    )


@PROPERTY
@given(infos, st.sampled_from(TARGETS), facts)
def test_without_rules_a_norm_is_never_narrowed_below_fp32(t: TensorInfo, to: DType, known: Facts) -> None:
    got, _ = decide(t, Policy(to), known)
    assert got is not None
    if t.name in known.norms and t.dtype.is_castable:
        assert holds_all(got, t.dtype) or got is FP32


@PROPERTY
@given(infos, st.sampled_from(TARGETS), st.lists(rules, max_size=3), facts, st.sampled_from(["fp32", "cast"]))
def test_what_is_not_castable_keeps_its_dtype_or_goes(
    t: TensorInfo, to: DType, given_rules: list[Rule], known: Facts, norms: Any
) -> None:
    got, why = decide(t, Policy(to, tuple(given_rules), norms=norms), known)
    assert why
    if not t.dtype.is_castable:
        assert got is t.dtype or got is None
    if got is None:
        first = next(r for r in given_rules if r.matches(t.name))
        assert first.to == "drop"


@PROPERTY
@given(infos, st.sampled_from(TARGETS), facts, st.sampled_from(["fp32", "cast"]))
def test_what_stands_between_a_tensor_and_the_target_only_prevents_loss(
    t: TensorInfo, to: DType, known: Facts, norms: Any
) -> None:
    got, why = decide(t, Policy(to, (), norms), known)
    assert got is not None
    if got is not to and t.dtype.is_castable:
        assert not holds_all(to, t.dtype), f"{why} stopped a widening"
        assert holds_all(got, t.dtype) or (t.dtype is FP64 and got is FP32)


@PROPERTY
@given(st.lists(infos, max_size=5, unique_by=lambda t: t.name), st.sampled_from(TARGETS))
def test_a_plan_is_pure_and_has_every_tensor_in_order(found: list[TensorInfo], to: DType) -> None:
    plan = make_plan(found, {}, Policy(to))
    assert plan == make_plan(tuple(found), {}, Policy(to))
    assert [i.src for i in plan.items] == found
    assert sum(g.tensors for g in plan.groups()) == len(found)
    assert sum(g.elements for g in plan.groups()) == sum(t.numel for t in found)
    assert sum(g.nbytes for g in plan.groups()) == plan.output_bytes


def test_groups_are_by_reason_and_dtypes_the_most_bytes_first() -> None:
    plan = make_plan([info("a"), info("b", shape=(100,)), info("c", of="int8"), info("d", of="fp16")], {}, Policy(BF16))
    assert [(g.why, str(g.source), str(g.to), g.tensors, g.elements, g.nbytes) for g in plan.groups()] == [
        ("target", "fp32", "bf16", 2, 132, 264),
        ("target", "fp16", "bf16", 1, 32, 64),
        ("int8 is not cast", "int8", "int8", 1, 32, 32),
    ]


def test_an_amended_plan_differs_where_it_was_amended_only() -> None:
    plan = make_plan([info("a"), info("b")], {}, Policy(FP16))
    amended = plan.amended({1: (FP32, "overflow in fp16")})
    assert amended == replace(plan, items=(plan.items[0], Item(info("b"), FP32, "overflow in fp16")))
    assert isinstance(amended, Plan)
    assert plan.amended({}) == plan


# --- rules that match nothing -----------------------------------------------------------------------------

LAYERS = [f"model.layers.{i}.{p}" for i in range(12) for p in ("self_attn.q_proj.weight", "mlp.gate.weight")]
NAMES = ["model.embed_tokens.weight", *LAYERS, "lm_head.weight"]


@pytest.mark.parametrize(
    ("rule", "nearest"),
    [
        ("lm_heat.weight=keep", "'lm_head.weight'"),
        ("*.mlp.gates.weight=keep", "'model.layers.*.mlp.gate.weight'"),
        ("model.layers.3.self_attn.qproj.weight=fp32", "'model.layers.*.self_attn.q_proj.weight'"),
        ("re:embed_token\\.weight=fp32", "'model.embed_tokens.weight'"),
        ("LM_HEAD.weight=fp32", "'lm_head.weight'"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_names(rule: str, nearest: str) -> None:
    with pytest.raises(RuleError) as e:
        fates(NAMES, "*=keep", rule)
    match = rule.rpartition("=")[0]
    assert str(e.value) == f"--rule {match!r} matches no tensor"
    assert e.value.hint is not None
    assert e.value.hint.startswith(f"did you mean {nearest}")


def test_a_pattern_like_nothing_is_told_how_the_tensors_are_named() -> None:
    with pytest.raises(RuleError) as e:
        fates(NAMES, Rule.keep("zzz"))
    assert str(e.value) == "--keep 'zzz' matches no tensor"
    assert e.value.hint == (
        "the tensors are named like 'model.embed_tokens.weight', 'model.layers.*.self_attn.q_proj.weight', "
        "'model.layers.*.mlp.gate.weight'"
    )


def test_what_a_suggestion_names_matches_tensors() -> None:
    names = ["blocks[0].weight", "blocks[1].weight", "what?", "a*b"]
    hint = suggest(Rule.keep("blocks[0].weight"), names)
    assert hint == "did you mean 'blocks[[]0].weight' or 'blocks[[]1].weight'?"
    assert Rule.keep("blocks[[]0].weight").matches("blocks[0].weight")


def test_there_is_no_suggestion_without_tensors() -> None:
    with pytest.raises(RuleError, match="matches no tensor"):
        make_plan([], {}, Policy(BF16, (Rule.keep("a"),)))


@pytest.mark.parametrize(
    ("name", "glob"),
    [
        ("h.3.attn.bias", "h.*.attn.bias"),
        ("h.3.mlp.12.bias", "h.*.mlp.*.bias"),
        ("layer4.0.bn1.weight", "layer4.*.bn1.weight"),  # digits within a word are its name
        ("h.3", "h.*"),
        ("0.weight", "0.weight"),  # '*.weight' would be every weight
        ("7", "7"),
        ("a[3].b", "a[[]3].b"),
        ("a*b?c", "a[*]b[?]c"),
        ("a.٣.b", "a.*.b"),
    ],
)
def test_a_name_becomes_a_glob_for_its_place_in_every_layer(name: str, glob: str) -> None:
    assert generalise(name) == glob
    assert Rule.keep(glob).matches(name)


@PROPERTY
@given(st.text(min_size=1) | st.text("re:*?[!]0.", min_size=1))
def test_a_generalised_name_always_matches_itself(name: str) -> None:
    assert Rule.keep(generalise(name)).matches(name)


def test_a_rule_that_changes_nothing_is_noted() -> None:
    found = [info("a.ids", of="int64"), info("a.mask", of="bool"), info("w")]
    plan = make_plan(found, {}, Policy(BF16, (Rule.parse("a.*=fp32"),)))
    assert plan.notes == ("--rule 'a.*' matches only tensors that are never cast (bool, int64)",)
    assert make_plan(found, {}, Policy(BF16, (Rule.parse("a.*=keep"), Rule.parse("*=fp32")))).notes == ()


# --- rules in a file --------------------------------------------------------------------------------------


def read(tmp_path: Path, text: str | bytes) -> list[Rule]:
    path = tmp_path / "rules.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_rules(path)


def test_a_file_gives_the_rules_that_the_options_would(tmp_path: Path) -> None:
    text = """
        [[rule]]
        match = "*.mlp.gate.weight"
        to = "fp32"

        [[rule]]
        match = 're:\\.ema$'
        to = "drop"
    """
    assert read(tmp_path, text) == [Rule.parse("*.mlp.gate.weight=fp32"), Rule.parse(r"re:\.ema$=drop")]
    assert str(read(tmp_path, text)[0]) == "rule '*.mlp.gate.weight'"
    assert read(tmp_path, "") == []
    assert read(tmp_path, "# nothing\n") == []


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[[rules]]\nmatch='a'\nto='keep'", "the file has the unknown key 'rules'", "did you mean 'rule'?"),
        ("title = 1", "the file has the unknown key 'title'", "known: rule"),
        ("[[rule]]\nmatc='a'\nto='keep'", "rule 1 has the unknown key 'matc'", "did you mean 'match'?"),
        ("[[rule]]\nmatch='a'\nto='keep'\nwhy='x'", "rule 1 has the unknown key 'why'", "known: match, to"),
        ("[[rule]]\nmatch='a'\nto='keep'\n[[rule]]\nto='keep'", "rule 2 has no 'match'", None),
        ("[[rule]]\nmatch='a'", "rule 1 has no 'to'", None),
        ("[rule]\nmatch='a'\nto='keep'", "'rule' is not a list of tables", "write each rule under its own [[rule]]"),
        ("rule = ['a=keep']", "'rule' is not a list of tables", "write each rule under its own [[rule]]"),
        ("[[rule]]\nmatch=''\nto='keep'", "rule: '' is not a pattern of tensor names", None),
        ("[[rule]]\nmatch=7\nto='keep'", "rule: 7 is not a pattern of tensor names", None),
        ("[[rule]]\nmatch='a'\nto=16", "rule 'a': unknown action 16", "actions: fp32, fp16, bf16, fp64, keep, drop"),
        (
            "[[rule]]\nmatch='a'\nto='fp8'",
            "rule 'a': unknown action 'fp8'",
            "actions: fp32, fp16, bf16, fp64, keep, drop",
        ),
        ("[[rule]]\nmatch='re:['\nto='keep'", "rule 're:[': not a regular expression", None),
        ("[[rule]\nmatch='a'", "is not valid TOML: Expected ']]'", None),
        ("rule = nope", "is not valid TOML: Invalid value", None),
        (b"# caf\xe9", "is not valid TOML: 'utf-8' codec can't decode byte 0xe9", None),
        ("x = " + "[" * 100_000, "nests too deeply", None),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_path(
    tmp_path: Path, text: str | bytes, message: str, hint: str | None
) -> None:
    with pytest.raises(RuleError) as e:
        read(tmp_path, text)
    assert str(e.value).startswith(f"{tmp_path / 'rules.toml'}: {message}")
    assert e.value.hint == hint
    assert e.value.path == tmp_path / "rules.toml"


def test_the_same_key_is_named_on_every_run(tmp_path: Path) -> None:
    """Of several unknown keys the first in the file, and not whichever a set yields."""
    keys = [f"key{i}" for i in range(30)]
    with pytest.raises(RuleError, match="unknown key 'key0'"):
        read(tmp_path, "\n".join(f"{k} = 1" for k in keys))


def test_a_file_that_is_not_there_is_an_error_of_usage(tmp_path: Path) -> None:
    with pytest.raises(RuleError) as e:
        read_rules(tmp_path / "none.toml")
    assert str(e.value) == f"{tmp_path / 'none.toml'}: cannot be read: no such file or directory"
    assert e.value.exit_code == 2
    with pytest.raises(RuleError, match="cannot be read: is a directory"):
        read_rules(tmp_path)
