"""The library as a library: its names, its types, its errors, and that it keeps quiet."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import precconv
from precconv import (
    CorruptCheckpointError,
    DType,
    HubError,
    InputError,
    Norms,
    NumericError,
    OutputError,
    PrecconvError,
    Report,
    Rule,
    RuleError,
    SourceChangedError,
    Stats,
    TensorInfo,
    UnknownFormatError,
    UsageError,
    VerificationError,
    WorkerError,
)

from .samples import write_checkpoint

ERRORS = {
    PrecconvError: (Exception, 1),
    InputError: (PrecconvError, 1),
    UnknownFormatError: (InputError, 1),
    CorruptCheckpointError: (InputError, 1),
    SourceChangedError: (InputError, 1),
    OutputError: (PrecconvError, 1),
    UsageError: (PrecconvError, 2),
    RuleError: (UsageError, 2),
    NumericError: (PrecconvError, 3),
    VerificationError: (PrecconvError, 4),
    WorkerError: (PrecconvError, 1),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {"w": torch.tensor([[1.0, 2.0], [3.0, 7e4]]), "norm.weight": torch.ones(2), "ids": torch.arange(3)}
    return write_checkpoint(tmp_path / "model.safetensors", tensors, {"a": "b"})


@pytest.fixture(autouse=True)
def _nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", "")


# --- the calls of the manual ------------------------------------------------------------------------------


def test_convert_gives_a_report(source: Path) -> None:
    report = precconv.convert(str(source), to="bf16")
    assert isinstance(report, Report)
    assert report.ok
    assert report.output == str(source.with_name("model.bf16.safetensors"))
    assert report.source == str(source)
    assert report.source_bytes == source.stat().st_size
    assert [t.name for t in report.tensors] == ["w", "norm.weight", "ids"]
    assert report.stats == Stats(n=9, zero=report.stats.zero)
    assert report.warnings == ()
    assert report.seconds > 0
    assert report.verified_bytes == 8 + 8 + 24


def test_paths_dtypes_and_rules_may_be_objects(source: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[[rule]]\nmatch = 'ids'\nto = 'drop'\n")
    report = precconv.convert(
        source,
        to=precconv.dtype(torch.bfloat16),
        output=tmp_path / "out.safetensors",
        rule=[Rule("w", "keep"), "norm.*=fp16"],
        keep=["norm.*"],
        rules=tmp_path / "r.toml",
        report=tmp_path / "r.json",
    )
    assert {i.src.name: (str(i.to), i.why) for i in report.plan.items} == {
        "w": ("fp32", "rule w"),
        "norm.weight": ("fp16", "rule norm.*"),
    }
    assert [i.src.name for i in report.plan.dropped] == ["ids"]


def test_plan_says_what_convert_will_do(source: Path) -> None:
    before = sorted(source.parent.iterdir())
    plan = precconv.plan(str(source), to="fp16", rule=["ids=drop"], provenance=False)
    assert sorted(source.parent.iterdir()) == before
    assert [(i.src.name, str(i.src.dtype), str(i.to), i.why) for i in plan.items] == [
        ("w", "fp32", "fp16", "target"),
        ("norm.weight", "fp32", "fp32", "norm"),
    ]
    assert plan.target == "fp16"
    assert plan.metadata == {"a": "b", "format": "pt"}
    report = precconv.convert(source, to="fp16", rule=["ids=drop"], on_overflow="ieee", provenance=False)
    assert report.plan == plan


def test_inspect_gives_the_tensors_in_the_order_of_the_file(source: Path) -> None:
    found = precconv.inspect(str(source))
    assert [(info.name, str(info.dtype), info.shape) for info in found] == [
        ("w", "fp32", (2, 2)),
        ("norm.weight", "fp32", (2,)),
        ("ids", "int64", (3,)),
    ]
    assert len(found) == 3
    assert found.metadata == {"a": "b"}
    assert (found.format, found.path, found.file_bytes) == ("safetensors", str(source), source.stat().st_size)
    assert [(str(t.dtype), t.tensors, t.elements, t.nbytes) for t in found.totals()] == [
        ("fp32", 2, 6, 24),
        ("int64", 1, 3, 24),
    ]
    assert isinstance(found.tensors[0], TensorInfo)
    json.dumps(found.to_dict())


def test_open_checkpoint_gives_a_reader_to_close(source: Path) -> None:
    reader = precconv.open_checkpoint(source)
    with reader:
        info = reader.infos[0]
        assert reader.file.read(info.offset, info.nbytes) == b"".join(
            float_.numpy().tobytes() for float_ in (torch.tensor([1.0, 2.0, 3.0, 7e4]),)
        )
        assert reader.format.name == "safetensors"
    with pytest.raises(InputError):
        reader.file.read(0, 1)


def test_neither_the_source_nor_the_arguments_are_changed(source: Path, tmp_path: Path) -> None:
    before, stat = source.read_bytes(), source.stat()
    keep = ["norm.*"]
    rule: list[str | Rule] = ["w=fp32", Rule("ids", "drop")]
    kept = copy.copy((list(keep), list(rule)))
    precconv.convert(source, to="bf16", keep=keep, rule=rule, verify="full", report=tmp_path / "r.json")
    precconv.plan(source, to="bf16", keep=keep, rule=rule)
    precconv.inspect(source)
    assert (keep, rule) == kept
    assert source.read_bytes() == before
    assert source.stat().st_mtime_ns == stat.st_mtime_ns


def test_a_source_that_may_not_be_written_is_no_obstacle(source: Path) -> None:
    source.chmod(0o400)
    assert precconv.convert(source, to="bf16").ok


# --- signatures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [precconv.convert, precconv.plan])
def test_everything_but_the_source_is_named(function: Any, source: Path) -> None:
    first, *rest = inspect.signature(function).parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert rest
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest)
    with pytest.raises(TypeError):
        function(source, "bf16")
    with pytest.raises(TypeError):
        function(source)


def test_plan_takes_the_options_of_convert_that_decide_dtypes() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (precconv.plan, precconv.convert))
    assert set(ours) <= set(theirs)
    assert all(theirs[n].default == p.default for n, p in ours.items())


def test_every_public_function_is_typed_and_documented() -> None:
    for name in (n for n in dir(precconv) if not n.startswith("_")):
        value = getattr(precconv, name)
        if inspect.ismodule(value) or (isinstance(value, type) and issubclass(value, Exception)):
            continue  # errors are documented as a tree
        assert value.__doc__, name
        if inspect.isfunction(value):
            hints = get_type_hints(value)
            assert set(inspect.signature(value).parameters) | {"return"} == set(hints), name


def test_every_option_of_convert_is_documented() -> None:
    for name in inspect.signature(precconv.convert).parameters:
        assert f"``{name}``" in str(precconv.convert.__doc__), name


def test_a_users_code_type_checks(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path
            import precconv

            report = precconv.convert(Path("m.safetensors"), to="bf16", on_overflow="fp32", keep=("a", "b"))
            reveal_type(report)
            reveal_type(report.stats.overflow)
            for item in precconv.plan("m.safetensors", to=precconv.dtype("fp16")).items:
                reveal_type(item.src.name)
                reveal_type(item.to)
                reveal_type(item.why)
            for info in precconv.inspect("m.safetensors"):
                reveal_type(info.shape)
                assert info.dtype == "bf16" or info.dtype != precconv.dtype("bf16")
            reader = precconv.open_checkpoint("m.safetensors")
            reveal_type(reader.infos[0].name)
            try:
                precconv.convert("m", to="bf16", progress=lambda done, total: None)
            except precconv.NumericError as e:
                reveal_type(e.report)
                reveal_type(e.hint)
            precconv.convert("m", to="bf16", on_overflow="klamp")
            precconv.convert("m", "bf16")
            """
        )
    )
    root = str(Path(precconv.__file__).parents[1])
    code = "import sys; from mypy import api; out, err, code = api.run(sys.argv[1:]); print(out, err)"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"),
         "--follow-imports", "silent", "--config-file", "", str(tmp_path / "uses.py")],
        capture_output=True, text=True, check=True, env={"MYPYPATH": root, "PYTHONPATH": root},
    )  # fmt: skip
    notes = [line.partition("note: Revealed type is ")[2].strip('"') for line in ran.stdout.splitlines()]
    revealed = [n.replace("builtins.", "") for n in notes if n]
    assert revealed == [
        "precconv.report.Report",
        "int",
        "str",
        "precconv.dtypes.DType",
        "str",
        "tuple[int, ...]",
        "str",
        "precconv.report.Report | None",
        "str | None",
    ], ran.stdout
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, ran.stdout
    assert '"on_overflow"' in errors[0]
    assert "Too many positional arguments" in errors[1]


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(precconv.__file__).with_name("py.typed").exists()


def test_importing_it_imports_no_torch_and_prints_nothing() -> None:
    code = "import sys, precconv; heavy = {'torch', 'numpy', 'click', 'tqdm', 'huggingface_hub'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"  # noqa: E501
    root = str(Path(precconv.__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env={"PYTHONPATH": root})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


# --- errors -----------------------------------------------------------------------------------------------


def test_the_tree_of_errors_is_the_one_that_is_documented() -> None:
    for error, (base, code) in ERRORS.items():
        assert error.__bases__ == (base,)
        assert error.exit_code == code
        assert getattr(precconv, error.__name__) is error
        assert f"{error.__name__} " in str(sys.modules["precconv.errors"].__doc__)
    public = {v for v in vars(precconv).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert public == {*ERRORS, HubError}
    assert (HubError.__bases__, HubError.exit_code) == ((PrecconvError,), 5)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_an_error_says_where_and_keeps_it_through_pickle(error: type[PrecconvError], source: Path) -> None:
    report = precconv.convert(source, to="bf16")
    e = error("is wrong", path=source, tensor="a\n", hint="mend it", report=report)
    assert str(e) == f"{source}: tensor 'a\\n': is wrong"
    for twin in (pickle.loads(pickle.dumps(e)), copy.copy(e)):
        assert type(twin) is error
        assert str(twin) == str(e)
        assert (twin.message, twin.path, twin.tensor, twin.hint) == ("is wrong", source, "a\n", "mend it")
        assert twin.report == report
    bare = error("is wrong")
    assert (str(bare), bare.path, bare.tensor, bare.hint, bare.report) == ("is wrong", None, None, None, None)


def test_a_refusal_carries_the_path_the_hint_and_the_report(source: Path) -> None:
    with pytest.raises(NumericError) as e:
        precconv.convert(source, to="fp16")
    assert str(e.value.path) == str(source)
    assert e.value.hint is not None
    assert e.value.report is not None
    assert [f.tensor for f in e.value.report.findings] == ["w"]
    assert e.value.report.to_dict()["ok"] is False


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"to": "int8"}, UsageError),
        ({"to": "bf16", "norms": "bf16"}, UsageError),
        ({"to": "bf16", "verify": "most"}, UsageError),
        ({"to": "bf16", "on_overflow": "klamp"}, UsageError),
        ({"to": "bf16", "workers": 0}, UsageError),
        ({"to": "bf16", "workers": -1}, UsageError),
        ({"to": "bf16", "keep": ["nothing"]}, RuleError),
        ({"to": "bf16", "rules": "none.toml"}, RuleError),
        ({"to": "bf16", "output": "model.gguf"}, UsageError),
        ({"to": "bf16", "output": "none/"}, OutputError),
        ({"to": "bf16", "output": "none/model.safetensors"}, OutputError),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    source: Path, options: dict[str, Any], error: type[PrecconvError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    before = sorted(source.parent.iterdir())
    with pytest.raises(PrecconvError) as e:
        precconv.convert("model.safetensors", **options)
    assert type(e.value) is error
    assert sorted(source.parent.iterdir()) == before


@pytest.mark.parametrize("call", [precconv.inspect, precconv.open_checkpoint])
def test_a_missing_source_is_an_input_error_with_its_path(call: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as e:
        call(tmp_path / "none.safetensors")
    assert str(e.value) == f"{tmp_path / 'none.safetensors'}: no such file or directory"
    assert e.value.path == tmp_path / "none.safetensors"


def test_no_descriptor_is_left_open(source: Path) -> None:
    import os

    if not Path("/proc/self/fd").exists():
        pytest.skip("nothing to count them with")
    precconv.convert(source, to="bf16")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        precconv.convert(source, to="bf16", force=True)
        precconv.plan(source, to="bf16")
        precconv.inspect(source)
        with pytest.raises(NumericError):
            precconv.convert(source, to="fp16")
        with pytest.raises(RuleError):
            precconv.plan(source, to="fp16", keep=["nothing"])
    assert len(os.listdir("/proc/self/fd")) == before


# --- values -----------------------------------------------------------------------------------------------


def test_plans_reports_and_their_parts_are_plain_data(source: Path) -> None:
    plan = precconv.plan(source, to="bf16")
    report = precconv.convert(source, to="bf16")
    values: list[Any] = [
        plan, report, plan.items[0], plan.items[0].src, report.tensors[0], Stats(1), Norms(), Rule("a", "keep"),
    ]  # fmt: skip
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value
        assert repr(value).startswith(type(value).__name__)
        field = next(iter(getattr(value, "_fields", None) or value.__dataclass_fields__))
        with pytest.raises(AttributeError):
            setattr(value, field, "another")


def test_a_dtype_reads_as_its_name() -> None:
    found = precconv.dtype("half")
    assert isinstance(found, DType)
    assert found == "fp16"
    assert f"{found}" == "fp16"
