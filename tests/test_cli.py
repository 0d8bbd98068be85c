"""The command: what it prints where, its exit codes, and what it never lets through to a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from precconv import cli
from precconv._version import __version__
from precconv.api import convert as run_convert
from precconv.cli.options import PUSH_NAMES, REPO_NAMES
from precconv.fileio import PartFile
from precconv.provenance import KEY

from .samples import write_checkpoint

EVIL = "\x1b[31mred\x1b[2J\u202eback\u009b1A\r\n\x07\x00"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``model.safetensors`` and ``big.safetensors``, which does not fit FP16."""
    monkeypatch.chdir(tmp_path)
    ordinary = {"a.weight": torch.ones(4, 8), "norm.weight": torch.ones(8), "ids": torch.arange(3)}
    write_checkpoint(tmp_path / "model.safetensors", ordinary, {"made by": "hand"})
    write_checkpoint(tmp_path / "big.safetensors", {"h.0.w": torch.full((3,), 7e4), "h.1.w": torch.full((2,), 8e4)})
    return tmp_path


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The command installs handlers, which are the test run's own otherwise."""
    import signal

    names = [getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]
    before = {n: signal.getsignal(n) for n in names}
    yield
    for n, handler in before.items():
        signal.signal(n, handler)


def run(*args: str) -> Result:
    result = CliRunner().invoke(cli.cli, args, prog_name="precconv")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def outcome(*args: str) -> tuple[int, str, str]:
    result = run(*args)
    return result.exit_code, result.stdout, result.stderr


def spawn(
    *args: str, env: Mapping[str, str] | None = None, python: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """A real process, as a user starts it."""
    root = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, **(env or {})}
    return subprocess.run(
        [sys.executable, *python, "-m", "precconv", *args], check=False, capture_output=True, env=environment, **options
    )


def raw_control(data: str | bytes) -> list[str]:
    text = data.decode(errors="surrogateescape") if isinstance(data, bytes) else data
    return [c for c in text if not c.isprintable() and c != "\n"]


# --- converting -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_a_checkpoint_alone_is_a_conversion() -> None:
    code, out, err = outcome("model.safetensors", "--to", "bf16")
    assert (code, err) == (0, "")
    first, *groups = out.splitlines()
    assert first.startswith("model.bf16.safetensors: 3 tensors, ")
    assert first.endswith(", verified 120 B")
    assert [line.split() for line in groups] == [
        ["1", "fp32", "->", "bf16", "64", "B", "target"],
        ["1", "fp32", "32", "B", "norm"],
        ["1", "int64", "24", "B", "int64", "is", "not", "cast"],
    ]
    assert load_file("model.bf16.safetensors")["a.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "args",
    [
        ("convert", "model.safetensors", "--to", "bf16"),
        ("--to", "bf16", "model.safetensors"),
        ("-v", "--to=bf16", "--", "model.safetensors"),
        ("./model.safetensors", "--to", "BFloat16"),
    ],
)
def test_the_command_may_be_named_and_options_come_anywhere(here: Path, args: tuple[str, ...]) -> None:
    assert run(*args).exit_code == 0
    assert (here / "model.bf16.safetensors").exists()


def test_a_file_named_as_a_command_is_converted_by_its_path_or_by_the_command(here: Path) -> None:
    (here / "model.safetensors").rename("inspect")
    assert outcome("inspect", "inspect")[1].startswith("inspect: safetensors, 3 tensors")
    assert run("./inspect", "--to", "bf16").exit_code == 0
    assert (here / "inspect.bf16.safetensors").exists()


@pytest.mark.usefixtures("here")
def test_every_option_reaches_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(source: str, **options: Any) -> Any:
        seen.update(source=source, **options)
        about_files = {name: value for name, value in options.items() if name not in (*REPO_NAMES, *PUSH_NAMES)}
        return run_convert(source, **about_files)

    monkeypatch.setattr(sys.modules["precconv.cli.convert"], "run_convert", spy)
    args = "model.safetensors --to half -o out.pt --format pt --weights all --strip-wrappers --shared drop"
    policy = "--preset t5 --norms cast --mixed cast"
    checks = "--on-overflow clamp --on-nonfinite error --max-underflow 0.5 --rounding stochastic --seed 3 --verify full"
    more = "--lossless-only --workers 1 --report r.json --html p.html --durable --force --keep ids"
    repo = "--component unet=fp16,vae=keep --component x=fp32 --shard-size 5GB --variant a --from-variant b --copy-all"
    more += " --no-provenance"
    push = "--push me/x --private --branch b --pr --low-disk --engine ray --address auto"
    assert run(*f"{args} {policy} {checks} {more} {repo} {push}".split()).exit_code == 0
    rules = seen.pop("rule")
    assert [(r.match, r.to) for r in rules] == [("ids", "keep")]
    assert seen == {
        "source": "model.safetensors",
        "to": "half",
        "lossless_only": True,
        "output": "out.pt",
        "format": "pt",
        "weights": "all",
        "select": None,
        "strip_wrappers": True,
        "shared": "drop",
        "preset": "t5",
        "norms": "cast",
        "mixed": "cast",
        "on_overflow": "clamp",
        "on_nonfinite": "error",
        "max_underflow": 0.5,
        "rounding": "stochastic",
        "seed": 3,
        "verify": "full",
        "component": ("unet=fp16,vae=keep", "x=fp32"),
        "shard_size": "5GB",
        "variant": "a",
        "from_variant": "b",
        "copy_all": True,
        "provenance": False,
        "push": "me/x",
        "private": True,
        "branch": "b",
        "pr": True,
        "low_disk": True,
        "engine": "ray",
        "address": "auto",
        "workers": 1,
        "report": "r.json",
        "html": "p.html",
        "durable": True,
        "force": True,
        "progress": None,
    }


@pytest.mark.usefixtures("here")
def test_defaults_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    seen: dict[str, Any] = {}

    def spy(source: str, **options: Any) -> Any:
        seen.update(options)
        return run_convert(source, **options)

    monkeypatch.setattr(sys.modules["precconv.cli.convert"], "run_convert", spy)
    assert run("model.safetensors", "--to", "bf16").exit_code == 0
    defaults = {n: p.default for n, p in inspect.signature(run_convert).parameters.items()}
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in seen.items() if n != "to"}
    assert given == {n: v for n, v in defaults.items() if n in given}


@pytest.mark.parametrize(
    ("args", "dtypes"),
    [
        (["--rule", "*.weight=fp32", "--keep", "*.weight", "--rules", "r.toml"], ("fp32", "fp32")),
        (["--rules", "r.toml", "--rule", "*.weight=fp32"], ("fp16", "fp32")),
        (["--keep", "b*", "--rules", "r.toml", "--rule", "b*=fp16"], ("fp16", "fp64")),
        (["--rule", "b*=fp16", "--rules", "r.toml", "--keep", "b*"], ("fp16", "fp16")),
        (["--rule=b*=fp16", "--rule", "*=fp32", "--keep=a*", "--rules=r.toml"], ("fp32", "fp16")),
    ],
)
def test_rules_count_in_the_order_in_which_they_stand(here: Path, args: list[str], dtypes: tuple[str, str]) -> None:
    (here / "r.toml").write_text("[[rule]]\nmatch = 'a*'\nto = 'fp16'\n")
    write_checkpoint(here / "in.safetensors", {n: torch.ones(2, dtype=torch.float64) for n in ("a.weight", "b.weight")})
    code, out, _ = outcome("in.safetensors", "--to", "bf16", "--dry-run", "--json", *args)
    assert code == 0
    assert tuple(t["to"] for t in json.loads(out)["tensors"]) == dtypes


@pytest.mark.usefixtures("here")
def test_warnings_go_to_stderr_and_the_exit_code_is_0() -> None:
    code, out, err = outcome("big.safetensors", "--to", "fp16", "--on-overflow", "clamp")
    assert code == 0
    assert "warning" not in out
    assert err.splitlines() == [
        f"warning: big.safetensors: tensor 'h.{i}.w': {n} of {n} finite values do not fit fp16 "
        f"(largest |x| {i + 7}e+04, limit 65520); clamped to 65504"
        for i, n in ((0, 3), (1, 2))
    ]


@pytest.mark.usefixtures("here")
def test_quiet_prints_nothing_but_errors() -> None:
    assert outcome("big.safetensors", "--to", "fp16", "--on-overflow", "clamp", "-q") == (0, "", "")
    assert outcome("model.safetensors", "--to", "fp16", "--dry-run", "--quiet") == (0, "", "")
    code, out, err = outcome("big.safetensors", "--to", "fp16", "-q", "--force")
    assert (code, out) == (3, "")
    assert err.startswith("error: big.safetensors: tensor 'h.0.w'")


@pytest.mark.usefixtures("here")
def test_verbose_lists_every_tensor() -> None:
    for args in (["--dry-run"], []):
        out = outcome("model.safetensors", "--to", "bf16", "-v", *args)[1]
        assert [line.split() for line in out.splitlines()[-4:]] == [
            ["tensor", "from", "to", "shape", "why"],
            ["a.weight", "fp32", "bf16", "[4,", "8]", "target"],
            ["norm.weight", "fp32", "fp32", "[8]", "norm"],
            ["ids", "int64", "int64", "[3]", "int64", "is", "not", "cast"],
        ]


@pytest.mark.usefixtures("here")
def test_json_is_the_whole_of_stdout() -> None:
    code, out, err = outcome("big.safetensors", "--to", "fp16", "--on-overflow", "keep", "--json")
    assert code == 0
    data = json.loads(out)
    assert (data["schema"], data["ok"], data["output"]) == (1, True, "big.fp16.safetensors")
    assert err.count("warning: ") == 2
    assert outcome("big.safetensors", "--to", "fp16", "--on-overflow", "keep", "--json", "-q", "--force")[2] == ""


def test_a_dry_run_prints_the_plan_and_writes_nothing(here: Path) -> None:
    before = sorted(here.iterdir())
    code, out, err = outcome("model.safetensors", "--to", "fp16", "--dry-run", "--rule", "ids=drop")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "plan: 2 tensors, 160 B -> 96 B"
    assert out.splitlines()[-1] == "  1 tensor dropped: ids"
    data = json.loads(outcome("model.safetensors", "--to", "fp16", "--dry-run", "--json", "-q")[1])
    assert [t["to"] for t in data["tensors"]] == ["fp16", "fp32", "int64"]
    assert json.loads(data["metadata"].pop(KEY))["options"] == {"to": "fp16"}
    assert data["metadata"] == {"made by": "hand", "format": "pt"}
    assert sorted(here.iterdir()) == before


@pytest.mark.usefixtures("here")
def test_a_dry_run_reads_no_values() -> None:
    assert outcome("big.safetensors", "--to", "fp16", "--dry-run")[0] == 0


def test_a_report_is_written_also_when_a_check_refuses(here: Path) -> None:
    code, out, _ = outcome("big.safetensors", "--to", "fp16", "--report", "r.json", "--json")
    assert code == 3
    data = json.loads((here / "r.json").read_text())
    assert data == json.loads(out)
    assert (data["ok"], len(data["findings"])) == (False, 2)


# --- exit codes -------------------------------------------------------------------------------------------


def test_bad_input_is_1_without_a_traceback(here: Path) -> None:
    (here / "page.safetensors").write_text("<!doctype html>")
    (here / "empty.safetensors").write_bytes(b"")
    for name, message in [
        ("none.safetensors", "no such file or directory"),
        ("page.safetensors", "this is an HTML page, not a checkpoint"),
        ("empty.safetensors", "is empty"),
    ]:
        for args in ((name, "--to", "bf16"), ("inspect", name)):
            code, out, err = outcome(*args)
            assert (code, out) == (1, "")
            assert err.splitlines()[0] == f"error: {name}: {message}"


@pytest.mark.usefixtures("here")
def test_an_output_that_exists_is_1_with_a_hint() -> None:
    assert run("model.safetensors", "--to", "bf16").exit_code == 0
    code, _, err = outcome("model.safetensors", "--to", "bf16")
    assert code == 1
    assert err == (
        "error: model.bf16.safetensors: exists\nhint: replace it with --force, or give another name with -o\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["model.safetensors"], "Missing option '--to'"),
        (["model.safetensors", "--to", "bf17"], "error: cannot convert to 'bf17'\nhint: targets: fp32, fp16, bf16"),
        (["model.safetensors", "--to", "fp64"], "error: cannot convert to 'fp64'"),
        (["model.safetensors", "--to", "bf16", "--workers", "0"], "error: 0 workers: at least 1 is needed"),
        (["model.safetensors", "--to", "bf16", "--workers", "two"], "'two' is not a valid integer"),
        (["model.safetensors", "--to", "bf16", "--max-underflow", "5"], "error: max_underflow 5.0 is not a share"),
        (["model.safetensors", "--to", "bf16", "--on-overflow", "klamp"], "'klamp' is not one of 'error', 'keep'"),
        (["model.safetensors", "--to", "bf16", "--keep", "idz"], "hint: did you mean 'ids'?"),
        (["model.safetensors", "--to", "bf16", "--rule", "ids"], "error: --rule 'ids' has no '='"),
        (["model.safetensors", "--to", "bf16", "--rules", "no.toml"], "error: no.toml: cannot be read: no such file"),
        (["model.safetensors", "--to", "bf16", "-o", "x.gguf"], "error: x.gguf: the name 'x.gguf' does not say a"),
        (["model.safetensors", "big.safetensors", "--to", "bf16"], "Got unexpected extra argument (big.safetensors)"),
        (["model.safetensors", "--too", "bf16"], "--to'"),
        (["model.safetensors", "--to", "bf16", "--on-overflw", "keep"], "No such option '--on-overflw'"),
        (["model.safetensors", "--to", "bf16", "--on-overflw", "keep"], "'--on-overflow'"),
        (["inspct", "model.safetensors"], "there is no command or file 'inspct'; did you mean 'inspect'?"),
        (["convrt", "model.safetensors", "--to", "bf16"], "did you mean 'convert'?"),
        ([], "Usage: precconv [OPTIONS] COMMAND [ARGS]..."),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_request_that_makes_no_sense_is_2_and_says_what_would(here: Path, args: list[str], message: str) -> None:
    before = sorted(here.iterdir())
    code, out, err = outcome(*args)
    assert code == 2
    assert message in err
    assert out == ""
    assert sorted(here.iterdir()) == before


def test_a_file_whose_name_is_nearly_a_command_is_no_typo(here: Path) -> None:
    (here / "model.safetensors").rename("inspct")
    assert run("inspct", "--to", "bf16").exit_code == 0


def test_a_numeric_refusal_is_3_and_tells_every_tensor_and_the_ways_out(here: Path) -> None:
    before = sorted(here.iterdir())
    code, out, err = outcome("big.safetensors", "--to", "fp16")
    assert (code, out) == (3, "")
    assert err == (
        "error: big.safetensors: tensor 'h.0.w': 3 of 3 finite values do not fit fp16 "
        "(largest |x| 7e+04, limit 65520)\n"
        "big.safetensors: tensor 'h.1.w': 2 of 2 finite values do not fit fp16 (largest |x| 8e+04, limit 65520)\n"
        "hint: keep them (--keep 'h.*.w'), keep whatever overflows (--on-overflow keep), "
        "clamp it (--on-overflow clamp), or use --to bf16\n"
    )
    assert sorted(here.iterdir()) == before


def test_a_failed_verification_is_4_and_publishes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = PartFile.write

    def faulty(self: PartFile, data: memoryview, offset: int) -> None:
        write(self, memoryview(bytes(len(data))) if len(data) == 64 else data, offset)

    monkeypatch.setattr(PartFile, "write", faulty)
    before = sorted(here.iterdir())
    code, out, err = outcome("model.safetensors", "--to", "bf16", "--json")
    assert code == 4
    assert err.startswith("error: model.bf16.safetensors: tensor 'a.weight': element 0 on disk is not the cast")
    assert json.loads(out)["ok"] is False
    assert sorted(here.iterdir()) == before


def test_an_interruption_is_130(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PartFile, "write", interrupt)
    before = sorted(here.iterdir())
    assert outcome("model.safetensors", "--to", "bf16") == (130, "", "interrupted; nothing was written\n")
    assert sorted(here.iterdir()) == before


# --- help -------------------------------------------------------------------------------------------------


def test_help_mentions_every_command_and_option() -> None:
    text = run("--help").stdout
    assert text == run("-h").stdout
    for name, command in cli.cli.commands.items():
        assert f"\n  {name} " in text
        own = run(name, "--help").stdout
        for option in command.params:
            if isinstance(option, click.Option):
                assert all(flag in own for flag in option.opts), option
                assert option.help
                assert option.help.endswith(".")
        assert command.help


def test_help_of_a_conversion_names_every_policy() -> None:
    text = " ".join(run("convert", "--help").stdout.split())
    assert "[error|keep|fp32|bf16|clamp|ieee]" in text
    assert "[default: error]" in text
    assert "[sample|full|none]" in text


def test_every_option_of_the_library_is_an_option_of_the_command() -> None:
    import inspect

    own = {p.name for p in cli.cli.commands["convert"].params}
    assert set(inspect.signature(run_convert).parameters) - {"source", "progress"} <= own


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"precconv, version {__version__}\n"


# --- inspect ----------------------------------------------------------------------------------------------


def test_inspect_shows_totals_metadata_and_tensors(here: Path) -> None:
    code, out, err = outcome("inspect", "model.safetensors")
    assert (code, err) == (0, "")
    size = (here / "model.safetensors").stat().st_size
    assert out == (
        f"model.safetensors: safetensors, 3 tensors, 43 elements, {size} B\n"
        "  dtype  tensors  elements   size\n"
        "  fp32         2        40  160 B\n"
        "  int64        1         3   24 B\n"
        "metadata made by: 'hand'\n"
        "\n"
        "tensor       dtype  shape    size\n"
        "a.weight     fp32   [4, 8]  128 B\n"
        "norm.weight  fp32   [8]      32 B\n"
        "ids          int64  [3]      24 B\n"
    )
    assert outcome("inspect", "model.safetensors", "-q")[1] == out.split("\n\n")[0] + "\n"


def test_inspect_gives_json(here: Path) -> None:
    data = json.loads(outcome("inspect", "model.safetensors", "--json")[1])
    base = (here / "model.safetensors").stat().st_size - 184
    assert data == {
        "path": "model.safetensors",
        "format": "safetensors",
        "file_bytes": base + 184,
        "metadata": {"made by": "hand"},
        "structure": [],
        "notes": [],
        "totals": {
            "fp32": {"tensors": 2, "elements": 40, "bytes": 160},
            "int64": {"tensors": 1, "elements": 3, "bytes": 24},
        },
        "tensors": [
            {"name": "a.weight", "dtype": "fp32", "shape": [4, 8], "bytes": 128, "offset": base},
            {"name": "norm.weight", "dtype": "fp32", "shape": [8], "bytes": 32, "offset": base + 128},
            {"name": "ids", "dtype": "int64", "shape": [3], "bytes": 24, "offset": base + 160},
        ],
    }


def test_long_metadata_is_cut_in_text_and_whole_in_json(here: Path) -> None:
    write_checkpoint(here / "m.safetensors", {"x": torch.ones(1)}, {"long": "y" * 5000})
    out = outcome("inspect", "m.safetensors")[1]
    assert f"metadata long: '{'y' * 97}'… (5,000 characters)" in out
    assert json.loads(outcome("inspect", "m.safetensors", "--json")[1])["metadata"]["long"] == "y" * 5000


# --- what a file says must not steer a terminal -----------------------------------------------------------


@pytest.fixture
def evil(here: Path) -> Path:
    """Names, metadata keys and values, and keys of the header's entries, full of control characters."""
    import struct

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], f"key{EVIL}": 1}
    header = {"__metadata__": {f"m{EVIL}": f"v{EVIL}"}, f"w{EVIL}": entry}
    raw = json.dumps(header).encode()
    path = here / "evil.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + struct.pack("<2f", 7e4, 1))
    return path


@pytest.mark.usefixtures("evil")
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["inspect", "evil.safetensors"], 0),
        (["inspect", "evil.safetensors", "--json"], 0),
        (["inspect", "evil.safetensors", "--to", "bf16", "-v"], 0),
        (["inspect", "evil.safetensors", "--to", "bf16", "--json"], 0),
        (["evil.safetensors", "--to", "bf16", "-v"], 0),
        (["evil.safetensors", "--to", "bf16", "--json"], 0),
        (["evil.safetensors", "--to", "bf16", "--dry-run", "-v"], 0),
        (["evil.safetensors", "--to", "bf16", "--dry-run", "--json"], 0),
        (["evil.safetensors", "--to", "fp16", "--on-overflow", "clamp"], 0),
        (["evil.safetensors", "--to", "fp16", "--on-overflow", "keep", "-v"], 0),
        (["evil.safetensors", "--to", "fp16"], 3),
        (["evil.safetensors", "--to", "fp16", "--json"], 3),
        (["evil.safetensors", "--to", "fp16", "--keep", "v*"], 2),
        ([f"none{EVIL[:-1]}", "--to", "fp16"], 1),
        (["model.safetensors", "--to", "fp16", "--rule", f"ids{EVIL}=drop"], 2),
    ],
    ids=lambda v: " ".join(v).encode("unicode_escape").decode() if isinstance(v, list) else str(v),
)
def test_control_characters_of_a_file_never_reach_the_terminal(args: list[str], code: int) -> None:
    result = run(*args)
    assert result.exit_code == code
    assert raw_control(result.stdout) == []
    assert raw_control(result.stderr) == []
    assert result.stdout + result.stderr


def test_dropped_names_are_spelled_out_too(evil: Path) -> None:
    write_checkpoint(evil, {f"w{EVIL}": torch.ones(1), "x": torch.ones(1)})
    out = outcome("evil.safetensors", "--to", "bf16", "--rule", "w*=drop")[1]
    assert raw_control(out) == []
    assert "dropped: w\\x1b[31mred" in out


@pytest.mark.usefixtures("evil")
def test_a_report_keeps_names_as_they_are() -> None:
    assert run("evil.safetensors", "--to", "bf16", "--report", "r.json").exit_code == 0
    raw = Path("r.json").read_text()
    assert raw_control(raw) == []
    assert json.loads(raw)["tensors"][0]["name"] == f"w{EVIL}"


# --- real processes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_help_and_inspect_do_without_torch() -> None:
    for args in (("--help",), ("inspect", "model.safetensors"), ("model.safetensors", "--to", "bf16", "--dry-run")):
        ran = spawn(*args, python=("-X", "importtime"))
        assert ran.returncode == 0
        loaded = {line.split(b"|")[-1].strip() for line in ran.stderr.splitlines() if line.startswith(b"import time:")}
        assert b"precconv.cli" in loaded
        assert not loaded & {b"torch", b"numpy", b"tqdm", b"huggingface_hub", b"safetensors"}


@pytest.mark.parametrize(
    "env",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}],
    ids=str,
)
def test_a_terminal_that_is_not_utf_8_gets_names_all_the_same(here: Path, env: dict[str, str]) -> None:
    write_checkpoint(here / "m.safetensors", {"é.重み": torch.ones(2)}, {"名": "前"})
    text = spawn("inspect", "m.safetensors", env=env)
    assert (text.returncode, text.stderr) == (0, b"")
    assert b"fp32   [2]" in text.stdout
    data = spawn("inspect", "m.safetensors", "--json", env=env)
    assert json.loads(data.stdout.decode("ascii"))["tensors"][0]["name"] == "é.重み"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there")
def test_a_reader_that_leaves_is_no_reason_for_noise(here: Path) -> None:
    write_checkpoint(here / "many.safetensors", {f"tensor.{i}": torch.ones(1) for i in range(5000)})
    for args, code, talk in (
        (("inspect", "many.safetensors"), 1, b""),
        (("model.safetensors", "--to", "bf16"), 0, b""),
        (("big.safetensors", "--to", "fp16", "--json"), 3, b"error: big.safetensors: tensor 'h.0.w'"),
    ):
        read, write = os.pipe()
        os.close(read)
        root = str(Path(cli.__file__).parents[2])
        ran = subprocess.run(
            [sys.executable, "-m", "precconv", *args],
            check=False,
            stdout=write,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        os.close(write)
        assert ran.returncode == code
        assert ran.stderr.startswith(talk)
        assert bool(ran.stderr) == bool(talk)
    assert (here / "model.bf16.safetensors").exists()  # and so the exit code is 0


@pytest.mark.usefixtures("here")
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_progress_is_shown_on_a_terminal_and_nowhere_else() -> None:
    import fcntl
    import pty
    import struct
    import termios

    def shown(*options: str) -> bytes:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        root = str(Path(cli.__file__).parents[2])
        ran = subprocess.Popen(
            [sys.executable, "-m", "precconv", "model.safetensors", "--to", "bf16", "--force", *options],
            stdout=subprocess.PIPE,
            stderr=slave,
            env={**os.environ, "PYTHONPATH": root},
        )
        os.close(slave)
        seen = b""
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # Linux's way to say that the other side has closed
                break
            if not data:
                break
            seen += data
        out, _ = ran.communicate()
        os.close(master)
        assert ran.returncode == 0
        assert raw_control(out) == []
        return seen

    assert b"B/s" in shown()
    assert shown("-q") == b""
    assert spawn("model.safetensors", "--to", "bf16", "--force").stderr == b""


# --- shell completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shells_completion_script_is_printed(shell: str) -> None:
    ran = spawn(env={"_PRECCONV_COMPLETE": f"{shell}_source"})
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"_PRECCONV_COMPLETE=%s_complete" % shell.encode() in ran.stdout
    assert b"precconv" in ran.stdout


def complete(*words: str) -> list[tuple[str, str]]:
    from click.shell_completion import ShellComplete

    *args, incomplete = words
    shell = ShellComplete(cli.cli, {}, "precconv", "_PRECCONV_COMPLETE")
    return [(c.type, c.value) for c in shell.get_completions(list(args), incomplete)]


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (("in",), ("plain", "inspect")),
        (("mod",), ("file", "mod")),
        (("convert", "mod"), ("file", "mod")),
        (("inspect", "mod"), ("file", "mod")),
        (("model.safetensors", "--on-o"), ("plain", "--on-overflow")),
        (("model.safetensors", "--on-overflow", "cl"), ("plain", "clamp")),
        (("model.safetensors", "--to", "bf16", "-o", "out"), ("file", "out")),
        (("model.safetensors", "--rules", "r"), ("file", "r")),
        (("inspct", "--js"), ("plain", "--json")),  # a typo is told on return, not on tab
    ],
    ids=lambda v: " ".join(v),
)
def test_commands_options_choices_and_files_are_completed(words: tuple[str, ...], want: tuple[str, str]) -> None:
    assert want in complete(*words)


def test_options_are_not_completed_with_files() -> None:
    assert complete("--vers") == [("plain", "--version")]


@pytest.mark.usefixtures("here")
def test_a_shell_that_asks_gets_an_answer() -> None:
    env = {"_PRECCONV_COMPLETE": "bash_complete", "COMP_WORDS": "precconv model.safetensors --on-o", "COMP_CWORD": "2"}
    ran = spawn(env=env)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, [b"plain,--on-overflow"], b"")
