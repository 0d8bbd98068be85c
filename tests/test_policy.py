"""Which dtype each tensor gets, through the command line: reasons, notes, presets, warnings, odd configs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import precconv

from .command import run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Lines of a terminal that nobody has made larger.
SCREEN = 24


def checkpoint(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file(dict(tensors), path)
    return path


def matrix(dtype: torch.dtype = FP32, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (8, 8), generator=torch.Generator().manual_seed(1)).to(dtype)


#: Mostly BF16; what is FP32 has no other reason to be than that the publisher left it so.
MIXED = {
    "a.weight": matrix(BF16, 64, 64),
    "b.weight": matrix(BF16, 64, 64),
    "odd_table": matrix(FP32, 8, 8),
    "other_table": matrix(FP32, 4, 4),
}

#: A name, its tensor, and what becomes of it in BF16 and why.
REASONS: dict[str, tuple[torch.Tensor, str, str]] = {
    "layers.0.up_proj.weight": (matrix(), "bf16", "target"),
    "layers.0.half.weight": (matrix(BF16), "bf16", "already bf16"),
    "layers.0.ids": (torch.arange(4), "int64", "int64 is not cast"),
    "layers.0.mask": (torch.ones(4, dtype=torch.bool), "bool", "bool is not cast"),
    "layers.0.attn.masked_bias": (torch.tensor(-1e9), "fp32", "scalar"),
    "layers.0.input_layernorm.weight": (matrix(FP32, 8), "fp32", "norm"),
    "layers.0.mlp.gate.e_score_correction_bias": (matrix(FP32, 8), "fp32", "preset universal: MoE selection bias"),
    "layers.0.q_proj.qweight": (torch.ones(8, 8, dtype=torch.int32), "int32", "quantized: gptq"),
    "layers.0.q_proj.scales": (matrix(FP16, 1, 8), "fp16", "quantized: gptq"),
    "layers.0.mine": (matrix(), "fp16", "rule *.mine"),
    "layers.0.kept.bias": (matrix(FP32, 8), "fp32", "rule *.kept.*"),
}
RULES = ("--rule", "*.mine=fp16", "--keep", "*.kept.*")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "mixed.safetensors", MIXED)


@pytest.fixture
def reasons(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model.safetensors", {name: row[0] for name, row in REASONS.items()})


# Reasons


def test_every_tensor_gets_the_dtype_and_the_reason_of_the_first_rule_that_applies(reasons: Path) -> None:
    plan = json.loads(run(reasons, "--to", "bf16", "--dry-run", "--json", *RULES).stdout)
    assert {t["name"]: (t["to"], t["why"]) for t in plan["tensors"]} == {n: row[1:] for n, row in REASONS.items()}


def test_a_conversion_does_what_the_plan_says_and_its_report_repeats_why(reasons: Path) -> None:
    report = json.loads(run(reasons, "--to", "bf16", "--json", *RULES).stdout)
    assert {t["name"]: (t["to"], t["why"]) for t in report["tensors"]} == {n: row[1:] for n, row in REASONS.items()}
    written = {t.name: t.dtype.name for t in precconv.inspect(report["output"])}
    assert written == {name: to for name, (_, to, _) in REASONS.items()}


def test_the_plan_has_a_line_for_each_reason_and_pair_of_dtypes(reasons: Path) -> None:
    first, *lines = run(reasons, "--to", "bf16", "--dry-run", *RULES).stdout.splitlines()
    assert first.startswith("plan: 11 tensors, ")
    assert sorted(line.split("  ")[-1].strip() for line in lines) == sorted(why for _, _, why in REASONS.values())
    assert any(line.split() == ["1", "fp32", "->", "bf16", "128", "B", "target"] for line in lines)
    assert any(line.split() == ["1", "fp32", "32", "B", "norm"] for line in lines)


def test_a_wider_target_keeps_nothing_narrow_but_what_is_quantized(reasons: Path) -> None:
    plan = precconv.plan(reasons, to="fp32")
    floats = {i.src.name: (i.to.name, i.why) for i in plan.items if i.src.dtype.is_castable}
    assert floats.pop("layers.0.q_proj.scales") == ("fp16", "quantized: gptq")
    assert floats.pop("layers.0.half.weight") == ("fp32", "target")
    assert set(floats.values()) == {("fp32", "already fp32")}


def test_norms_and_what_presets_want_become_fp32_from_the_other_16_bit_type(tmp_path: Path) -> None:
    names = {"norm.weight": "norm", "mlp.gate.e_score_correction_bias": "preset universal: MoE selection bias"}
    path = checkpoint(tmp_path / "m.safetensors", {"w": matrix(FP16), **{n: matrix(FP16, 8) for n in names}})
    plan = precconv.plan(path, to="bf16")
    assert {i.src.name: i.why for i in plan.items if i.to == "fp32"} == names


# --mixed


def test_a_mostly_16_bit_source_keeps_its_fp32_tensors_and_says_so_in_one_line(mixed: Path) -> None:
    note = "note: the source is mostly 16-bit, so its 2 FP32 tensors without another reason stay FP32 (--mixed cast)"
    for command in (("inspect", mixed, "--to", "fp16"), (mixed, "--to", "fp16", "--dry-run"), (mixed, "--to", "fp16")):
        lines = run(*command).stdout.splitlines()
        assert lines.count(note) == 1
        assert any(line.split() == ["2", "fp32", "320", "B", "mixed", "source"] for line in lines)
    source, output = load_file(mixed), load_file(mixed.with_name("mixed.fp16.safetensors"))
    assert {n: t.dtype for n, t in output.items()} == {n: FP32 if "table" in n else FP16 for n in MIXED}
    assert torch.equal(output["odd_table"], source["odd_table"])


def test_mixed_cast_casts_them_and_has_nothing_to_explain(mixed: Path) -> None:
    result = run(mixed, "--to", "bf16", "--mixed", "cast")
    assert "note" not in result.stdout
    assert {t.dtype for t in load_file(mixed.with_name("mixed.bf16.safetensors")).values()} == {BF16}


def test_half_of_the_bytes_is_not_most_of_them(tmp_path: Path) -> None:
    even = {"a": matrix(BF16, 8, 8), "b": matrix(FP32, 8, 4)}  # 128 bytes each
    for more, to in ((0, "bf16"), (1, "fp32")):
        path = checkpoint(tmp_path / f"{more}.safetensors", {**even, "c": matrix(BF16, more, 2)})
        assert {i.src.name: i.to.name for i in precconv.plan(path, to="bf16").items}["b"] == to


def test_what_is_quantized_does_not_make_a_source_16_bit(tmp_path: Path) -> None:
    packed = {
        "q.weight": matrix(BF16, 4096, 1),
        "q.weight.absmax": matrix(FP32, 64),
        "q.weight.quant_map": matrix(FP32, 16),
    }
    path = checkpoint(tmp_path / "m.safetensors", {**packed, "plain.weight": matrix(FP32, 8, 8)})
    assert {i.src.name: i.why for i in precconv.plan(path, to="bf16").items}["plain.weight"] == "target"


# A plan fits a screen


def thousand() -> dict[str, torch.Tensor]:
    """A mixture of experts with something of everything: 1,000 tensors."""
    tensors = {"model.embed_tokens.weight": matrix(), "lm_head.weight": matrix(), "logit_scale": torch.tensor(2.0)}
    for layer in range(100):
        at = f"model.layers.{layer}."
        tensors |= {at + f"{n}.weight": matrix(FP32, 8) for n in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {at + f"self_attn.{n}_proj.weight": matrix() for n in "qkv"}
        tensors |= {at + "mlp.gate.weight": matrix(), at + "mlp.gate.e_score_correction_bias": matrix(FP32, 8)}
        tensors |= {at + "rotary_emb.inv_freq": matrix(FP32, 4), at + "mixer.A_log": matrix(FP32, 4)}
        tensors |= {at + "self_attn.mask": torch.ones(4, dtype=torch.bool)}
    return dict(list(tensors.items())[:1000])


def test_a_plan_of_1000_tensors_reads_in_one_screen_and_verbose_lists_every_one(tmp_path: Path) -> None:
    tensors = thousand()
    path = checkpoint(tmp_path / "m.safetensors", tensors)
    for command in (("inspect", path, "--to", "bf16"), (path, "--to", "bf16", "--dry-run")):
        lines = run(*command).stdout.splitlines()
        assert lines[0].startswith("plan: 1,000 tensors, ")
        assert 6 <= len(lines) <= SCREEN
        assert all(len(line) <= 120 for line in lines)
        listed = run(*command, "-v").stdout.splitlines()
        assert listed[: len(lines)] == lines
        assert {line.split()[0] for line in listed[len(lines) + 2 :]} == tensors.keys()


# inspect --to

ASKED = [
    (),
    ("--norms", "cast"),
    ("--preset", "none"),
    ("--preset", "t5"),
    ("--mixed", "cast"),
    RULES,
    ("--rule", "layers.0.m*=drop", "--norms", "cast", "--preset", "none"),
]


@pytest.mark.parametrize("options", ASKED, ids=" ".join)
def test_what_inspect_shows_is_what_convert_does(options: tuple[str, ...], reasons: Path) -> None:
    shown = run("inspect", reasons, "--to", "fp16", *options)
    assert shown.stdout == run(reasons, "--to", "fp16", "--dry-run", *options).stdout
    told = json.loads(run("inspect", reasons, "--to", "fp16", "--json", *options).stdout)
    done = json.loads(run(reasons, "--to", "fp16", "--json", *options).stdout)
    for key in ("to", "groups", "dropped", "notes", "warnings", "metadata"):
        assert told[key] == done[key]
    assert [(t["name"], t["to"]) for t in told["tensors"]] == [(t["name"], t["to"]) for t in done["tensors"]]


def test_each_option_changes_what_inspect_shows(reasons: Path) -> None:
    shown = [run("inspect", reasons, "--to", "fp16", *options).stdout for options in ASKED]
    assert len(set(shown)) >= len(ASKED) - 2  # neither t5 nor --mixed has anything to say of this model


def test_inspect_takes_rules_in_the_order_they_were_given(reasons: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\nmatch = "*.mine"\nto = "fp32"\n')
    for options, why in (
        (("--keep", "*mine", "--rules", file), "rule *mine"),
        (("--rules", file, "--keep", "*mine"), "rule *.mine"),
    ):
        told = json.loads(run("inspect", reasons, "--to", "bf16", "--json", *options).stdout)
        assert {t["name"]: t["why"] for t in told["tensors"]}["layers.0.mine"] == why


@pytest.mark.parametrize("option", ["--preset=none", "--norms=fp32", "--mixed=cast", "--keep=*", "--rule=*=fp32"])
def test_an_option_of_a_conversion_without_to_is_a_mistake(option: str, reasons: Path) -> None:
    result = run("inspect", reasons, option)
    assert result.exit_code == 2
    assert f"{option.partition('=')[0]} is about a conversion: say --to which dtype" in result.stderr
    assert result.stdout == ""


def test_a_rule_that_matches_nothing_is_the_same_error_in_inspect(reasons: Path) -> None:
    for command in (("inspect", reasons), (reasons,)):
        result = run(*command, "--to", "bf16", "--keep", "layers.0.up_prj.weight")
        assert result.exit_code == 2
        assert "matches no tensor" in result.stderr
        assert "did you mean 'layers.*.up_proj.weight'" in result.stderr


# Presets


def test_presets_lists_every_table_by_name_with_what_it_is_about() -> None:
    result = run("presets")
    assert result.exit_code == 0
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["preset", "patterns", "about"]
    names = [line.split()[0] for line in lines]
    assert names == sorted(names)
    assert {"universal", "t5", "wan", "deepseek_v3", "ldm", "careful"} < set(names)
    assert all(len(line.split(None, 2)) == 3 for line in lines)


def test_presets_name_shows_patterns_reasons_and_sources() -> None:
    lines = run("presets", "umt5").stdout.splitlines()
    assert lines[0].startswith("t5: T5, mT5, UMT5")
    assert "model types: t5, mt5, umt5, pop2piano" in lines[1]
    at = lines.index("wo.weight$")
    assert lines[at + 1].startswith("  T5 feed-forward output (fp16 only): the output reaches 66246")
    assert lines[at + 2].startswith("  source: transformers ")


def test_presets_json_has_every_row() -> None:
    tables = json.loads(run("presets", "--json").stdout)
    assert [t["table"] for t in tables] == [line.split()[0] for line in run("presets").stdout.splitlines()[1:]]
    (t5,) = json.loads(run("presets", "t5", "--json").stdout)
    assert [row["match"] for row in t5["keep"]] == [["wo.weight$"]]
    assert t5 in tables


@pytest.mark.parametrize("command", ["presets", "convert", "inspect"])
def test_an_unknown_preset_is_a_usage_error_with_the_nearest_names(command: str, reasons: Path) -> None:
    args = ("presets", "deepsek_v3") if command == "presets" else (command, reasons, "--to=bf16", "--preset=deepsek_v3")
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == "error: unknown preset 'deepsek_v3'"
    assert result.stderr.splitlines()[1].startswith("hint: did you mean 'deepseek_v3'")
    assert [path.name for path in reasons.parent.iterdir()] == [reasons.name]


def test_a_named_preset_is_used_whatever_the_names_say_and_brings_the_universal_one(tmp_path: Path) -> None:
    names = ("layers.0.wo.weight", "layers.0.mlp.gate.e_score_correction_bias")
    path = checkpoint(tmp_path / "m.safetensors", {name: matrix() for name in names})
    for preset, whys in (
        ("auto", ["target", "preset universal: MoE selection bias"]),
        ("t5", ["preset t5: T5 feed-forward output", "preset universal: MoE selection bias"]),
        ("none", ["target", "target"]),
    ):
        told = json.loads(run("inspect", path, "--to", "fp16", "--preset", preset, "--json").stdout)
        assert {t["name"]: t["why"] for t in told["tensors"]} == dict(zip(names, whys, strict=True))


# Warnings

T5 = {"encoder.block.0.layer.1.DenseReluDense.wo.weight": matrix()}
SAYS = "a T5 feed-forward layer can reach 66246"


@pytest.mark.parametrize("command", [(), ("--dry-run",), ("inspect",)], ids=["convert", "dry-run", "inspect"])
def test_warnings_go_to_stderr_and_stdout_stays_clean(command: tuple[str, ...], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "t5.safetensors", T5)
    args = ("inspect", path, "--to", "fp16") if command == ("inspect",) else (path, "--to", "fp16", "--force", *command)
    result = run(*args)
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if line.startswith(f"warning: {path}: {SAYS}")]
    assert SAYS not in result.stdout
    told = json.loads(run(*args, "--json").stdout)
    assert [text for text in told["warnings"] if text.startswith(SAYS)]


def test_quiet_conversions_and_plans_say_nothing(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "t5.safetensors", T5)
    for options in (("--dry-run",), ()):
        result = run(path, "--to", "fp16", "-q", *options)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_a_name_that_says_another_precision_is_warned_about(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model.fp16.safetensors", {"a.weight": matrix(FP32, 64, 64)})
    assert "the name says fp16, the content is 100 % fp32" in run("inspect", path, "--to", "bf16").stderr


# config.json beside the file


def test_the_config_beside_a_file_selects_its_preset(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model.safetensors", {"model.layers.0.mlp.gate.weight": matrix(), "w": matrix()})
    assert {i.to.name for i in precconv.plan(path, to="bf16").items} == {"bf16"}
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert {i.why for i in precconv.plan(path, to="bf16").items} == {"preset deepseek_v3: MoE router", "target"}
    assert {i.to.name for i in precconv.plan(path, to="bf16", preset="none").items} == {"bf16"}


def _deep(path: Path) -> None:
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def _nested(path: Path) -> None:
    path.write_text('{"text_config":' * 500 + "{}" + "}" * 500)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100_000_000)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


_SURROGATES = r'{"model_type": "\ud800", "quantization_config": {"quant_method": "\ud800"}}'

ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "not JSON": (lambda path: path.write_text("model_type: llama"), "not valid JSON"),
    "empty": (lambda path: path.write_text(""), "not valid JSON"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "not valid JSON"),
    "a huge number": (lambda path: path.write_text('{"a": ' + "9" * 10_000 + "}"), "not valid JSON"),
    "a list": (lambda path: path.write_text('[{"model_type": "t5"}]'), "not an object"),
    "a string": (lambda path: path.write_text('"t5"'), "not an object"),
    "100 MB": (_large, "too large"),
    "nested too deeply": (_deep, "nests too deeply"),
    "nested deeply": (_nested, ""),
    "a symlink loop": (_loop, ""),
    "a dangling symlink": (_dangling, ""),
    "a directory": (lambda path: path.mkdir(), ""),
    "odd values": (lambda path: path.write_text('{"model_type": {}, "architectures": [1], "_class_name": 3}'), ""),
    "lone surrogates": (lambda path: path.write_text(_SURROGATES), ""),
}


def _converts_as_if_alone(path: Path, note: str) -> None:
    """The odd config changes nothing but a note."""
    result = run(path, "--to", "bf16")
    assert result.exit_code == 0, result.stderr
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert [note in line and "config.json" in line for line in notes] == ([True] if note else [])
    output = load_file(path.with_name("model.bf16.safetensors"))
    assert {name: tensor.dtype for name, tensor in output.items()} == {"w": BF16, "norm.weight": FP32}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model.safetensors", {"w": matrix(), "norm.weight": matrix(FP32, 8)})


@pytest.mark.parametrize("case", ODD)
def test_no_config_however_odd_breaks_the_conversion_of_the_file_beside_it(case: str, plain: Path) -> None:
    make, note = ODD[case]
    make(plain.with_name("config.json"))
    _converts_as_if_alone(plain, note)


def test_a_config_that_may_not_be_read_breaks_nothing(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.with_name("config.json").write_text("{}")
    original = Path.open

    def refuse(self: Path, *args: str, **options: str) -> object:
        if self.name == "config.json":
            raise PermissionError(13, "Permission denied")
        return original(self, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    _converts_as_if_alone(plain, "cannot be read (permission denied)")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_config_that_is_a_pipe_is_not_waited_for(plain: Path) -> None:
    os.mkfifo(plain.with_name("config.json"))
    _converts_as_if_alone(plain, "")
