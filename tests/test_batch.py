"""Many conversions: what became of each, what the next run does, and what the command says about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import precconv
from fixtures import make
from precconv import BatchReport, OutputError, UsageError, cli, convert_many
from precconv.batch import run as run_module
from precconv.batch.jobs import Job, memory_of, run_job
from precconv.batch.log import LogEvent, line
from precconv.batch.run import Standing
from precconv.engines import ENGINES, Engine
from precconv.repo.stage import home_of

from .processes import posix
from .samples import write_checkpoint

LEDGER = "precconv-batch.jsonl"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def good(name: str, value: float = 1.0) -> str:
    write_checkpoint(Path(name), {"a.weight": torch.full((4, 8), value), "norm.weight": torch.ones(8)})
    return name


def model(name: str) -> str:
    """A model directory of two shards."""
    Path(name).mkdir()
    weight_map = {}
    for n in (1, 2):
        file = f"model-0000{n}-of-00002.safetensors"
        write_checkpoint(Path(name) / file, {f"l{n}.weight": torch.ones(4, 8)})
        weight_map[f"l{n}.weight"] = file
    index = {"metadata": {"total_size": 256}, "weight_map": weight_map}
    (Path(name) / "model.safetensors.index.json").write_text(json.dumps(index))
    (Path(name) / "config.json").write_text('{"torch_dtype": "float32"}')
    return name


def many(*sources: Any, **options: Any) -> BatchReport:
    return convert_many(sources, **{"to": "bf16", "output_dir": "out", **options})


def outcomes(report: BatchReport) -> list[str]:
    return [r.outcome for r in report.results]


def records(path: str = f"out/{LEDGER}") -> list[dict[str, Any]]:
    return [json.loads(text) for text in Path(path).read_text().splitlines()]


def said(path: str = f"out/{LEDGER}") -> list[tuple[str, str]]:
    return [(r["event"], r["source"]) for r in records(path)]


# What becomes of jobs


def test_files_and_directories_are_converted_as_convert_does(here: Path) -> None:
    report = many(good("a.safetensors"), model("dir"), good("b.safetensors"))
    assert report.ok
    assert outcomes(report) == ["done"] * 3
    for result in report.results:
        single = here / "single" / Path(result.planned.place).name
        single.parent.mkdir(exist_ok=True)
        precconv.convert(result.planned.source, to="bf16", output=single)
        files = [p for p in ([single] if single.is_file() else sorted(single.rglob("*"))) if p.is_file()]
        assert files
        for path in files:
            assert (here / "out" / path.relative_to(single.parent)).read_bytes() == path.read_bytes()
    assert sorted(p.name for p in Path("out").iterdir()) == [
        "a.bf16.safetensors", "b.bf16.safetensors", "dir-bf16", LEDGER,
    ]  # fmt: skip


def test_the_ledger_has_a_start_and_an_end_of_every_job_with_sizes_and_warnings() -> None:
    write_checkpoint(Path("a.safetensors"), {"w": torch.tensor([float("nan"), 1.0])})
    many("a.safetensors", model("dir"))
    assert said() == [("started", "a.safetensors"), ("done", "a.safetensors"), ("started", "dir"), ("done", "dir")]
    _, first, _, second = records()
    assert first["output"] == str(Path.cwd() / "out" / "a.bf16.safetensors")
    assert first["source_bytes"] == Path("a.safetensors").stat().st_size
    assert first["output_bytes"] == Path("out/a.bf16.safetensors").stat().st_size
    assert first["warnings"] == 1
    assert first["seconds"] >= 0
    assert first["version"] == precconv.__version__
    assert second["verified_bytes"] > 0
    assert second["warnings"] == 0


def bad_sources() -> dict[str, tuple[str, int, bool]]:
    """Each with the kind of its error, its exit code, and whether there is a hint."""
    write_checkpoint(Path("big.safetensors"), {"w": torch.full((3,), 7e4)})
    Path("empty.safetensors").write_bytes(b"")
    Path("hole.safetensors").write_bytes((make.ROOT / "hostile/data-hole.safetensors").read_bytes())
    Path("nothing").mkdir()
    return {
        "big.safetensors": ("NumericError", 3, True),
        "empty.safetensors": ("UnknownFormatError", 1, True),
        "hole.safetensors": ("CorruptCheckpointError", 1, False),
        "missing.safetensors": ("InputError", 1, False),
        "nothing": ("InputError", 1, False),
    }


def test_a_bad_job_does_not_stop_the_others_and_its_error_is_in_the_ledger() -> None:
    bad = bad_sources()
    report = many(good("a.safetensors"), *bad, good("z.safetensors"), to="fp16")
    assert not report.ok
    assert outcomes(report) == ["done", *["failed"] * len(bad), "done"]
    assert [r.planned.source for r in report.failed] == list(bad)
    errors = {r["source"]: r["error"] for r in records() if r["event"] == "failed"}
    assert set(errors) == set(bad)
    for source, (kind, code, hint) in bad.items():
        assert (errors[source]["kind"], errors[source]["exit_code"]) == (kind, code)
        assert (errors[source]["hint"] is not None) == hint, errors[source]
        assert source in errors[source]["message"]


def test_a_rule_that_does_not_match_one_source_fails_that_one() -> None:
    write_checkpoint(Path("b.safetensors"), {"other": torch.ones(2)})
    report = many(good("a.safetensors"), "b.safetensors", keep=["norm.*"])
    assert outcomes(report) == ["done", "failed"]
    assert report.failed[0].data["error"]["kind"] == "RuleError"
    assert report.failed[0].data["error"]["exit_code"] == 2


def test_options_of_a_source_are_its_own() -> None:
    report = many(good("a.safetensors"), {"source": good("b.safetensors"), "to": "fp16", "output": "x/{stem}"})
    assert report.ok
    assert Path("out/x/b.safetensors").exists()
    assert {t.dtype for t in precconv.inspect("out/x/b.safetensors")} == {"fp16", "fp32"}


# The next run


def test_a_second_run_does_nothing() -> None:
    many(good("a.safetensors"), model("dir"))
    before = {p: p.stat().st_mtime_ns for p in Path("out").rglob("*")}
    report = many("a.safetensors", "dir")
    assert outcomes(report) == ["skipped", "skipped"]
    assert report.ok
    assert {p: p.stat().st_mtime_ns for p in Path("out").rglob("*")} == before


def test_what_failed_is_tried_again_and_what_is_new_is_done() -> None:
    Path("b.safetensors").write_bytes(b"")
    assert outcomes(many(good("a.safetensors"), "b.safetensors")) == ["done", "failed"]
    assert outcomes(many("a.safetensors", "b.safetensors", good("c.safetensors"))) == ["skipped", "failed", "done"]
    good("b.safetensors")
    assert outcomes(many("a.safetensors", "b.safetensors", "c.safetensors")) == ["skipped", "done", "skipped"]


def test_retry_failed_does_only_what_failed() -> None:
    many(good("a.safetensors"), "b.safetensors")
    report = many("a.safetensors", "b.safetensors", good("c.safetensors"), retry_failed=True)
    assert outcomes(report) == ["skipped", "failed", "not run"]
    assert not Path("out/c.bf16.safetensors").exists()


def test_an_output_that_is_gone_is_made_again() -> None:
    many(good("a.safetensors"))
    Path("out/a.bf16.safetensors").unlink()
    assert outcomes(many("a.safetensors")) == ["done"]
    assert Path("out/a.bf16.safetensors").exists()


@pytest.mark.parametrize("what", ["source", "options", "version"])
def test_what_is_done_of_another_source_or_with_other_options_is_not_taken_for_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(good("a.safetensors"))
    options = {}
    if what == "source":
        good("a.safetensors", 2.0)
    elif what == "options":
        options = {"norms": "cast"}
    else:
        monkeypatch.setattr("precconv.batch.prepare.__version__", "9")
    report = many("a.safetensors", **options)
    assert outcomes(report) == ["failed"]
    error = report.failed[0].data["error"]
    assert "exists, of other options, another version or what the source was before" in error["message"]
    assert "--force" in error["hint"]
    report = many("a.safetensors", force=True, **options)
    assert outcomes(report) == ["done"]
    assert outcomes(many("a.safetensors", force=True, **options)) == ["skipped"]


def test_somebody_elses_file_is_not_replaced_and_never_taken_for_ours() -> None:
    Path("out").mkdir()
    good("out/a.bf16.safetensors", 3.0)
    before = Path("out/a.bf16.safetensors").read_bytes()
    for _ in range(2):
        report = many(good("a.safetensors"))
        assert outcomes(report) == ["failed"]
        assert "a.bf16.safetensors: exists" in report.failed[0].data["error"]["message"]
    assert Path("out/a.bf16.safetensors").read_bytes() == before
    assert [event for event, _ in said()] == ["failed", "failed"]


def test_an_empty_directory_is_filled() -> None:
    Path("out/dir-bf16").mkdir(parents=True)
    assert outcomes(many(model("dir"))) == ["done"]


@pytest.mark.parametrize("make_source", [good, model])
def test_what_a_killed_run_finished_without_a_word_is_recognised(make_source: Callable[[str], str]) -> None:
    source = make_source("a.safetensors" if make_source is good else "dir")
    many(source)
    path = Path("out") / LEDGER
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 20])
    before = {p: p.stat().st_mtime_ns for p in Path("out").rglob("*") if p.is_file() and p != path}
    report = many(source)
    assert outcomes(report) == ["done"]
    assert {p: p.stat().st_mtime_ns for p in Path("out").rglob("*") if p.is_file() and p != path} == before
    last = records_of_torn(path)[-1]
    assert last["found"] is True
    assert last["output_bytes"] > 0
    assert outcomes(many(source)) == ["skipped"]


@pytest.mark.parametrize("left", ["lock", "nothing"])
def test_what_a_killed_run_left_beside_a_finished_output_is_removed(left: str) -> None:
    many(model("dir"))
    path = Path("out") / LEDGER
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    stage = home_of(Path("out/dir-bf16"))
    (stage / "done").mkdir(parents=True)
    (stage / "done" / "x.json").write_text("{}")
    if left == "lock":
        (stage / "lock").touch()
    assert outcomes(many("dir")) == ["done"]
    assert not stage.exists()


def records_of_torn(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    return [json.loads(text) for n, text in enumerate(lines) if n != 1]


def test_what_is_there_after_a_killed_run_but_is_something_else_is_not_ours() -> None:
    many(good("a.safetensors"))
    path = Path("out") / LEDGER
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    for data in (b"something", make.tiny_llama()):
        Path("out/a.bf16.safetensors").write_bytes(data)
        report = many("a.safetensors")
        assert outcomes(report) == ["failed"]
        assert "exists, " in report.failed[0].data["error"]["message"]
        assert Path("out/a.bf16.safetensors").read_bytes() == data


# Stopping


def test_after_enough_failures_nothing_more_is_begun() -> None:
    report = many("x1", good("a.safetensors"), "x2", "x3", good("b.safetensors"), stop_after=2)
    assert outcomes(report) == ["failed", "done", "failed", "not run", "not run"]
    assert not report.ok
    assert not Path("out/b.bf16.safetensors").exists()


def test_an_interruption_stops_the_job_and_the_ledger_says_which() -> None:
    good("a.safetensors")
    good("b.safetensors")

    def interrupt(happened: LogEvent) -> None:
        if (happened.event, happened.source) == ("started", "b.safetensors"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupted:
        many("a.safetensors", "b.safetensors", good("c.safetensors"), event=interrupt)
    assert str(interrupted.value).startswith("interrupted; 1 of 3 are done, 1 were under way, and the same command")
    assert said()[:3] == [("started", "a.safetensors"), ("done", "a.safetensors"), ("started", "b.safetensors")]
    assert said()[3:] == [("interrupted", "b.safetensors")]
    assert outcomes(many("a.safetensors", "b.safetensors", "c.safetensors")) == ["skipped", "done", "done"]


def test_a_ledger_that_cannot_be_written_stops_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    good("a.safetensors")

    def full(*_: object, **__: object) -> None:
        raise OutputError("cannot be written: no space left on device", path="ledger")

    monkeypatch.setattr("precconv.batch.ledger.Ledger.add", full)
    with pytest.raises(OutputError, match="no space"):
        many("a.safetensors", "b")
    assert not Path("out/a.bf16.safetensors").exists()


class Broken(Engine):
    """An engine whose jobs end with whatever error it is given."""

    threads = 1

    def __init__(self, error: BaseException, *, remote: bool = False, workers: int = 1) -> None:
        self.error, self.remote, self.memory, self.workers = error, remote, 0, workers

    def start(self, function: object, job: object, *, memory: int) -> Future[Any]:  # noqa: ARG002
        self.memory = memory
        future: Future[Any] = Future()
        future.set_exception(self.error)
        return future

    def interrupt(self) -> None:
        """Nothing runs."""


def test_failures_at_the_same_moment_count_as_many() -> None:
    report = many("a", "b", "c", "d", engine=Broken(ValueError("x"), workers=2), stop_after=1)
    assert outcomes(report) == ["failed", "failed", "not run", "not run"]


def test_an_error_that_nobody_expected_is_one_jobs_failure_too() -> None:
    engine = Broken(ZeroDivisionError("first line\nsecond"), remote=True)
    report = many(good("a.safetensors"), "b", engine=engine)
    assert outcomes(report) == ["failed", "failed"]
    error = {"kind": "ZeroDivisionError", "message": "first line", "hint": None, "exit_code": 1}
    assert report.failed[0].data["error"] == error
    assert engine.memory >= 500 << 20


def test_memory_grows_with_the_number_of_tensors() -> None:
    write_checkpoint(Path("many.safetensors"), {f"t{n}": torch.ones(1) for n in range(1000)})
    few, more = (memory_of(Job(s, {"to": "bf16"})) for s in (good("a.safetensors"), "many.safetensors"))
    assert 0 < few < more < few + (100 << 20)
    assert memory_of(Job("missing", {"to": "bf16"})) <= few


def test_run_job_gives_plain_data_and_reports_bytes() -> None:
    seen: list[tuple[int, int]] = []
    job = Job(good("a.safetensors"), {"to": "bf16", "output": "x.safetensors"})
    data = run_job(job, lambda done, total: seen.append((done, total)))
    assert json.loads(json.dumps(data)) == data
    assert seen
    assert seen[-1][0] == seen[-1][1] > 0
    assert run_job(job)["error"]["kind"] == "OutputError"
    assert run_job(job._replace(begun=True))["found"] is True


def test_progress_counts_jobs_that_have_ended() -> None:
    seen: list[Standing] = []
    many(good("a.safetensors"), good("b.safetensors"), "x", progress=seen.append)
    assert seen[-1] == Standing(ended=3, jobs=3, running=0, done_bytes=0, total_bytes=0)
    assert [s.ended for s in seen] == sorted(s.ended for s in seen)


def test_workers_in_processes_do_the_same() -> None:
    sources = [good(f"{n}.safetensors", n) for n in range(4)]
    report = many(*sources, "missing", workers=2)
    assert outcomes(report) == ["done"] * 4 + ["failed"]
    for result in report.results[:4]:
        alone = precconv.convert(result.planned.source, to="bf16", output=f"{result.planned.source}.alone.safetensors")
        assert alone.output is not None
        assert Path(alone.output).read_bytes() == Path(result.planned.place).read_bytes()
    assert outcomes(many(*sources)) == ["skipped"] * 4


def test_more_workers_than_one_are_never_busy_with_more_jobs_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[int] = []
    show = run_module._Run.show
    monkeypatch.setattr(run_module._Run, "show", lambda run: busy.append(len(run.running)) or show(run))  # type: ignore[func-returns-value]
    many(*(good(f"{n}.safetensors") for n in range(3)))
    assert max(busy) <= 1


# Lines and tables


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's jobs run in this process; in others they do in the tests above and in test_batch_killed."""
    monkeypatch.setitem(ENGINES, "local", "inline")


def test_a_log_line_can_be_taken_apart_again() -> None:
    fields = {"output": "/a b", "message": 'x="y"\n', "seconds": 1.5, "hint": None}
    assert line(LogEvent("T", "error", "m/a.safetensors", "failed", fields)) == (
        'T error m/a.safetensors failed output="/a b" message="x=\\"y\\"\\n" seconds=1.5'
    )
    assert line(LogEvent("T", "info", "ä b", "started")) == 'T info "\\u00e4 b" started'


def command(*args: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(cli.cli, ["batch", *args], prog_name="precconv", input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_table_and_ends_with_1_when_something_failed() -> None:
    good("a.safetensors")
    Path("l.txt").write_text("a.safetensors\nmissing.safetensors\na.safetensors\n")
    done = command("l.txt", "--to", "bf16", "--output-dir", "out")
    assert done.exit_code == 1
    head, first, second, total = done.stdout.splitlines()
    assert head.split() == ["source", "output", "size", "time", "outcome"]
    assert first.split()[:2] == ["a.safetensors", "out/a.bf16.safetensors"]
    assert first.endswith(" s  done")
    assert second.endswith("failed (InputError)")
    assert total.startswith("1 done, 1 failed; ")
    assert done.stderr.splitlines() == [
        "note: a.safetensors is listed 2 times, and converted once",
        "error: missing.safetensors: no such file or directory",
    ]
    again = command("a.safetensors", "--to", "bf16", "--output-dir", "out", "-q")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")


@pytest.mark.usefixtures("quick")
def test_json_is_the_whole_of_stdout() -> None:
    good("a.safetensors")
    done = command("-", "--to", "bf16", "--output-dir", "out", "--json", stdin="a.safetensors\nmissing\n")
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert data["counts"] == {"done": 1, "skipped": 0, "failed": 1, "interrupted": 0, "not run": 0}
    assert data["ledger"] == str(Path.cwd() / "out" / LEDGER)
    assert [j["outcome"] for j in data["jobs"]] == ["done", "failed"]
    assert data["jobs"][0]["error"] is None
    assert data["jobs"][1]["error"]["kind"] == "InputError"


@pytest.mark.usefixtures("quick")
def test_a_dry_run_plans_all_sums_up_and_writes_nothing() -> None:
    many(good("old.safetensors"))
    good("a.safetensors")
    model("dir")
    before = sorted(Path().rglob("*"))
    args = ("old.safetensors", "a.safetensors", "dir", "--to", "bf16", "--output-dir", "out", "--dry-run")
    done = command(*args)
    assert done.exit_code == 0
    rows = [text.split() for text in done.stdout.splitlines()]
    assert rows[1] == ["old.safetensors", "out/old.bf16.safetensors", "done"]
    assert rows[2][2:] == ["2", "160", "B", "->", "96", "B", "bf16"]
    assert rows[-1] == ["total", "4", "416", "B", "->", "224", "B"]
    data = json.loads(command(*args, "--json").stdout)
    assert (data["source_bytes"], data["output_bytes"], [j["done"] for j in data["jobs"]]) == (
        416, 224, [True, False, False],
    )  # fmt: skip
    assert sorted(Path().rglob("*")) == before
    failing = command("a.safetensors", "missing", "--to", "bf16", "--dry-run")
    assert failing.exit_code == 1
    assert "fails: " in failing.stdout
    assert command(*args, "--log", "l").exit_code == 2
    assert not Path("l").exists()


@pytest.mark.usefixtures("quick")
def test_the_log_has_a_line_for_everything_and_is_added_to() -> None:
    good("a.safetensors")
    for _ in range(2):
        command("a.safetensors", "missing", "--to", "bf16", "--output-dir", "out", "--log", "b.log")
    words = [text.split()[1:4] for text in Path("b.log").read_text().splitlines()]
    assert words == [
        ["info", "a.safetensors", "started"], ["info", "a.safetensors", "done"], ["info", "missing", "started"],
        ["error", "missing", "failed"], ["info", "a.safetensors", "skipped"], ["info", "missing", "started"],
        ["error", "missing", "failed"],
    ]  # fmt: skip
    refused = command("a.safetensors", "--to", "bf16", "--log", "no/such")
    assert refused.exit_code == 1
    assert refused.stderr == "error: no/such: cannot be written: no such file or directory\n"


@pytest.mark.usefixtures("quick")
def test_verbose_says_everything_on_stderr() -> None:
    done = command(good("a.safetensors"), "--to", "bf16", "-v")
    assert [text.split()[1:4] for text in done.stderr.splitlines()] == [
        ["info", "a.safetensors", "started"], ["info", "a.safetensors", "done"],
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_the_command_has_converts_options_and_rules_count_in_their_order() -> None:
    write_checkpoint(Path("a.safetensors"), {"x.bias": torch.ones(2, 2), "y.bias": torch.ones(2, 2)})
    done = command("a.safetensors", "--to", "bf16", "--keep", "x.*", "--rule", "*.bias=fp16")
    assert done.exit_code == 0, done.stderr
    assert [t.dtype.name for t in precconv.inspect("a.bf16.safetensors")] == ["fp32", "fp16"]
    names = {name: {p.name for p in found.params} for name, found in cli.cli.commands.items()}
    own = {"output", "workers", "dry_run", "as_json", "quiet", "verbose"}
    assert (names["convert"] & names["batch"]) - own == names["convert"] - own - {"src", "report", "durable"}


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        ((), 2, "Missing argument 'LIST...'"),
        (("a",), 2, "error: a: nothing says the target"),
        (("a", "--to", "int3"), 2, "int3"),
        (("a", "b/a", "--to", "bf16"), 2, "error: a and b/a have the same output"),
        (("*.nothing", "--to", "bf16"), 2, "error: '*.nothing' matches no file"),
        (("a", "--to", "bf16", "--output", "{x}"), 2, "no field {x}"),
        (("a", "--to", "bf16", "--engine", "dask"), 2, "dask"),
        (("a", "--to", "bf16", "--address", "auto"), 2, "say --engine ray"),
        (("a", "--to", "bf16", "--workers", "0"), 2, "0"),
        (("a", "--to", "bf16", "--ledger", "taken"), 1, "is not the ledger of a batch"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_any_work(args: tuple[str, ...], code: int, sentence: str) -> None:
    Path("taken").write_text("mine")
    done = command(*args)
    assert done.exit_code == code, done.stderr
    assert sentence in done.stderr
    assert done.stdout == ""
    assert sorted(os.listdir()) == ["taken"]


@posix
def test_on_a_terminal_there_is_one_bar_for_all_and_failures_stand_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty
    import sys

    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream, os.fdopen(leader, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", stream)
        from precconv.cli.batch import _bar

        with _bar(3, quiet=False) as (show, speak):
            show(Standing(1, 3, 2, 5_000_000, 10_000_000))
            speak("error: x")
            show(Standing(3, 3, 0, 0, 0))
        stream.flush()
        seen = ""
        while "3/3" not in seen:
            seen += screen.read(65536).decode()
    assert "1/3" in seen
    assert "5 MB of 10 MB in 2" in seen
    assert "error: x" in seen
    with _bar(3, quiet=True) as (show, _):
        show(Standing(1, 3, 2, 5, 10))


def test_usage_errors_of_convert_many_name_what_was_given() -> None:
    with pytest.raises(UsageError, match="unknown key 'too'"):
        many("a", too="bf16")
    with pytest.raises(UsageError, match="2 workers in one process"):
        many(good("a.safetensors"), workers=2, engine="inline")
