"""A batch of models on the Hub that is published there: what becomes of each, and what the next run still does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from precconv import UsageError
from precconv.engines import ENGINES

from .command import run
from .hub import faults
from .hub.faults import Effect
from .hub.fixture import turned_to
from .hub.server import HubServer
from .hub_models import HEADER, batch_of, is_half_of, keyed, llama, model, object_of, published, weights
from .hub_work import LEDGER, PUSH, Place, command_lines, outcomes, patient, quick
from .processes import HANG, ROOT

#: Of the batch: error, exit code, what the Hub said, and the hint's beginning.
FAILS = {
    "acme/large": ("NumericError", 3, None, "keep it (--keep 'layer.bias')"),
    "acme/cut-always": ("HubError", 5, "connection", "check the network"),
    "closed/gated": ("HubError", 5, "gated", "ask for access at http://"),
    "closed/private": ("HubError", 5, "not found", "check the name, and whose token it is"),
    "acme/missing": ("HubError", 5, "not found", "check the name, and whose token it is"),
}  # fmt: skip
NOW = {"acme/new-name": "acme/newest-name"}  #: what the Hub calls it


def target(source: str) -> str:
    return f"tester/{source.partition('/')[2]}-fp16"


# One of everything, from the command line


class Whole:
    """The batch that has one of everything, and its first run; jobs run here, where nothing is waited for."""

    def __init__(self, hub: HubServer, root: Path) -> None:
        self.hub, self.place = hub, Place(hub, root)
        self.sources = batch_of(hub)
        self.good = [source for source in self.sources if source not in FAILS]
        self.list = self.place.path / "list.txt"
        self.list.write_text("\n".join(["# nightly", *self.sources]))
        cut = faults.cut(HEADER + 1000)  # headers are read, downloads are not
        hub.fail(cut, method="GET", path=object_of(hub, "acme/cut-once"), times=2)
        self.always = hub.fail(cut, method="GET", path=object_of(hub, "acme/cut-always"), times=1000)
        self.first = self.run("--log", self.place.path / "log.txt", "--json")

    def run(self, *args: object) -> Result:
        return run("batch", self.list, "--to", "fp16", "--push", PUSH, "--output-dir", self.place.path, *args)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    root = tmp_path_factory.mktemp("whole")
    with (
        HubServer(root / "hub", xet=False) as hub,
        pytest.MonkeyPatch.context() as patch,
        turned_to(hub, root / "hf-home", patch),
    ):
        quick(patch)
        patch.setenv("HF_TOKEN", hub.tokens.write)
        patch.setitem(ENGINES, "local", "inline")
        yield Whole(hub, root)


def test_every_repo_of_a_batch_is_published_once_or_its_failure_is_told(whole: Whole) -> None:
    assert whole.first.exit_code == 1
    assert whole.place.left() == ["list.txt", "log.txt", LEDGER], "nothing is kept here but what was said"
    for source in whole.good:
        made = published(whole.hub, target(source))
        assert is_half_of(made, published(whole.hub, NOW.get(source, source))), source
        title = f"Convert {NOW.get(source, source)} to fp16"
        assert [found.rpartition(" (")[0] for found in keyed(whole.hub, target(source))] == [title]
    assert [r for r in whole.hub.repos() if r.startswith("tester/") and keyed(whole.hub, r)] == sorted(
        target(source) for source in whole.good
    )
    config = json.loads(whole.hub.read("tester/sharded-fp16", "config.json"))
    assert config["torch_dtype"] == "float16"
    assert "base_model: acme/sharded" in whole.hub.read("tester/sharded-fp16", "README.md").decode()


def test_the_ledger_has_what_became_of_each_with_kind_and_hint(whole: Whole) -> None:
    ends = {r["source"]: r for r in whole.place.records()[: 2 * len(whole.sources)] if r["event"] != "started"}
    assert list(ends) != []
    assert {s for s, r in ends.items() if r["event"] == "done"} == set(whole.good)
    for source in whole.good:
        assert ends[source]["published"]["repo"] == target(source)
        assert ends[source]["published"]["commit"] == whole.hub.commits(target(source))[0].oid
    for source, (kind, code, about, hint) in FAILS.items():
        error = ends[source]["error"]
        assert (error["kind"], error["exit_code"], error.get("hub")) == (kind, code, about), source
        assert error["hint"].startswith(hint)
        assert error["message"].startswith(source)


def test_the_summary_the_log_and_stderr_say_the_same(whole: Whole) -> None:
    said = json.loads(whole.first.stdout)
    assert said["counts"]["done"] == len(whole.good)
    assert said["counts"]["failed"] == len(FAILS)
    log = (whole.place.path / "log.txt").read_text().splitlines()
    first = log[: 2 * len(whole.sources)]
    assert {line.split()[2] for line in first if " failed " in line} == set(FAILS)
    (done,) = [line for line in first if " acme/sharded done " in line]
    assert f"published={whole.hub.endpoint}/tester/sharded-fp16 " in done
    for source in FAILS:
        assert f"error: {source}: " in whole.first.stderr
    assert "Traceback" not in whole.first.stderr


def test_no_token_is_in_what_a_batch_says_or_keeps(whole: Whole) -> None:
    assert whole.place.tokens_in(whole.first.stdout, whole.first.stderr) == []


def test_a_second_run_tries_what_failed_again_and_does_nothing_else(whole: Whole) -> None:
    whole.hub.repo("closed/gated").allowed.add("tester")
    before = len(whole.hub.requests)
    second = whole.run("--json")
    seen = whole.hub.requests[before:]
    assert second.exit_code == 1
    assert json.loads(second.stdout)["counts"] == {
        "done": 1, "skipped": len(whole.good), "failed": len(FAILS) - 1, "interrupted": 0, "not run": 0,
    }  # fmt: skip
    assert is_half_of(published(whole.hub, "tester/gated-fp16"), published(whole.hub, "closed/gated"))
    assert [e.path.split("/")[4] for e in seen if "/commit/" in e.path] == ["gated-fp16"]
    assert len([e for e in seen if e.method == "PUT"]) == 1
    fetched = {e.path for e in seen if e.method == "GET" and e.path.startswith("/objects/") and e.sent > HEADER}
    allowed = [object_of(whole.hub, repo) for repo in ("closed/gated", "acme/cut-always")]
    assert fetched == {path.removeprefix("^") for path in allowed}, "what was fetched is in the cache"
    assert whole.place.tokens_in(second.stdout, second.stderr) == []

    whole.always.left = 0
    third = whole.run("--json", "--retry-failed")
    outcomes = {job["source"]: job["outcome"] for job in json.loads(third.stdout)["jobs"]}
    assert outcomes["acme/cut-always"] == "done"
    assert {s for s, o in outcomes.items() if o == "failed"} == set(FAILS) - {"acme/cut-always", "closed/gated"}


_LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
print(model.dtype, model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all().item())
"""


def test_what_a_batch_published_can_be_loaded_from_there(whole: Whole, tmp_path: Path) -> None:
    env = whole.hub.environment(tmp_path, xet=False)
    done = subprocess.run(
        [sys.executable, "-c", _LOADS, "tester/sharded-fp16"],
        env=env, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=HANG, check=False,
    )  # fmt: skip
    assert done.stdout == "torch.float16 True\n", done.stderr


# In this process


@pytest.fixture
def place(in_process: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(in_process, tmp_path)
    monkeypatch.setenv("HF_TOKEN", in_process.tokens.write)
    monkeypatch.chdir(made.path)
    return made


def few(hub: HubServer, count: int = 3) -> list[str]:
    names = [f"acme/m{n}" for n in range(count)]
    for n, name in enumerate(names):
        hub.create(name, model(n))
    return names


def test_a_dry_run_plans_everything_and_fetches_no_weights(hub: HubServer, place: Place) -> None:
    names = [*few(hub), "acme/missing"]
    hub.create("acme/s", llama(4))
    done = run("batch", *names, "acme/s", "--to", "fp16", "--push", PUSH, "--dry-run", "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [job.get("error", {}).get("hub") for job in said["jobs"]] == [None, None, None, "not found", None]
    for job, repo in zip(said["jobs"], [*names, "acme/s"], strict=True):
        if "error" not in job:
            assert job["plan"]["items"] if "items" in job["plan"] else job["source_bytes"] > job["output_bytes"] > 0
            assert job["source_bytes"] == sum(x.nbytes for x in weights(published(hub, repo)).values())
    assert all(e.sent <= HEADER for e in hub.seen("GET", "^/objects/"))
    assert hub.seen("POST") == hub.seen("PUT") == []
    assert place.left() == []
    assert "acme/s" in run("batch", *names, "acme/s", "--to", "fp16", "--push", PUSH, "--dry-run").stdout


def test_a_new_commit_in_one_source_publishes_exactly_that_one_again(hub: HubServer, place: Place) -> None:
    names = few(hub)
    assert outcomes(place.batch(*names)) == ["done"] * 3
    hub.commit("acme/m1", model(7))
    before = len(hub.requests)
    report = place.batch(*names)
    assert outcomes(report) == ["skipped", "done", "skipped"]
    assert [e.path.split("/")[4] for e in hub.requests[before:] if "/commit/" in e.path] == ["m1-fp16"]
    assert is_half_of(published(hub, "tester/m1-fp16"), published(hub, "acme/m1"))
    assert [len(keyed(hub, target(name))) for name in names] == [1, 2, 1]
    assert outcomes(place.batch(*names)) == ["skipped"] * 3


def test_what_was_not_there_and_failed_is_retried_when_it_is(hub: HubServer, place: Place) -> None:
    names = few(hub, 2)
    assert outcomes(place.batch(*names, "acme/late")) == ["done", "done", "failed"]
    hub.create("acme/late", model(5))
    hub.commit("acme/m0", model(6))
    report = place.batch(*names, "acme/late", retry_failed=True)
    assert outcomes(report) == ["not run", "skipped", "done"]
    assert is_half_of(published(hub, "tester/late-fp16"), published(hub, "acme/late"))


def test_a_batch_whose_ledger_is_lost_finds_what_is_published(hub: HubServer, place: Place) -> None:
    names = few(hub)
    place.batch(*names)
    (place.path / LEDGER).unlink()
    before, fetched = len(hub.requests), hub.bytes_of_weights()
    report = place.batch(*names)
    assert outcomes(report) == ["done"] * 3
    assert all(r.data["published"]["already"] for r in report.results)
    assert [e for e in hub.requests[before:] if "/commit/" in e.path or e.method == "PUT"] == []
    assert hub.bytes_of_weights() - fetched <= 3 * 2 * HEADER
    assert [len(keyed(hub, target(name))) for name in names] == [1, 1, 1]


@pytest.mark.parametrize("twice", ["acme/m0", "other/m0"])
def test_two_entries_with_one_target_are_refused_before_any_work(twice: str, hub: HubServer, place: Place) -> None:
    options = {"source": twice, "norms": "cast"}
    with pytest.raises(UsageError, match=r"acme/m0 and .*/m0 have the same output hf://tester/m0-fp16") as refused:
        place.batch("acme/m0", options)
    assert "{org}" in str(refused.value.hint)
    assert (hub.requests, place.left()) == ([], [])


def test_names_that_differ_only_in_case_are_one_repo(hub: HubServer, place: Place) -> None:
    with pytest.raises(UsageError, match="have the same output"):
        place.batch("acme/m0", {"source": "other/M0"})
    assert hub.requests == []


@pytest.mark.parametrize("name", ["", "acme/", "a/b/{name}", "acme/{name} {to}", "../{name}"])
def test_a_template_that_names_no_repo_is_refused_before_any_work(name: str, hub: HubServer, place: Place) -> None:
    with pytest.raises(UsageError, match="is not the name of a repo") as refused:
        place.batch("acme/m0", push=name)
    assert refused.value.hint == "write it as org/name, as in me/{stem}-{to}"
    assert hub.requests == []


LIST = """
[defaults]
to = "bf16"
push = "acme/{name}-{to}"

[[repo]]
source = "acme/m0"

[[repo]]
source = "acme/m1@v1"
to = "fp16"
push = "tester/{name}-{revision}"
private = true

[[repo]]
source = "acme/m2"
branch = "half"
norms = "cast"

[[repo]]
source = "acme/m2"
pr = true
push = "acme/m2"
"""


def test_a_list_in_toml_says_for_each_where_it_goes_and_how(hub: HubServer, place: Place) -> None:
    few(hub)
    hub.commit("acme/m1", model(9), revision="v1")
    (place.path / "list.toml").write_text(LIST)
    lines: list[str] = []
    hub.fail(faults.before(command_lines(lines)), method="PUT")
    first = place.run("batch", "list.toml", "--json", "--workers", "2", "--log", "log.txt")
    assert first.code == 0, first.stderr
    assert any("list.toml" in line for line in lines) or sys.platform != "linux"
    assert place.tokens_in(first.stdout, first.stderr, *lines) == []
    jobs = json.loads(first.stdout)["jobs"]
    assert [job["output"] for job in jobs] == [
        "hf://acme/m0-bf16", "hf://tester/m1-v1", "hf://acme/m2-bf16@half", "hf://acme/m2#pr",
    ]  # fmt: skip
    assert "config.json" in published(hub, "acme/m0-bf16")
    assert is_half_of(published(hub, "tester/m1-v1"), published(hub, "acme/m1", "v1"))
    assert hub.repo("tester/m1-v1").private
    norms = {x.dtype for name, x in weights(published(hub, "acme/m2-bf16", "half")).items() if "norm" in name}
    assert [str(d) for d in norms] == ["torch.bfloat16"]
    (pull,) = hub.pull_requests("acme/m2")
    assert jobs[3]["published"]["pr_url"].endswith(f"/{pull.num}")
    before = len(hub.requests)
    again = place.run("batch", "list.toml", "--json")
    assert json.loads(again.stdout)["counts"]["skipped"] == 4
    assert [e for e in hub.requests[before:] if e.method != "GET"] == []


def test_a_revision_with_slashes_makes_a_name_without(hub: HubServer, place: Place) -> None:
    few(hub, 1)
    hub.commit("acme/m0", model(3), revision="refs/pr/1")
    report = place.batch("acme/m0@refs/pr/1", push="tester/{name}-{revision}")
    assert outcomes(report) == ["done"]
    assert is_half_of(published(hub, "tester/m0-refs_pr_1"), published(hub, "acme/m0", "refs/pr/1"))


# What passes


Burst = list[tuple[Effect, str, str, int]]
BURSTS: dict[str, Burst] = {
    "rate limits": [(faults.rate_limited(), "", "", 6)],
    "failures": [(faults.status(503), "POST", "", 4), (faults.status(502), "GET", "/(resolve|objects|commits)/", 4)],
    "lost answers": [(faults.lost(), "POST", "", 3)],
    "a commit that landed": [(faults.lost(500), "POST", "/commit/", 2)],
    "nothing for two seconds": [(faults.outage(2), "PUT", "", 1)],
    "nothing for two seconds, at a commit": [(faults.outage(2), "POST", "/commit/", 1)],
    "nothing for two seconds, at a download": [(faults.outage(2), "GET", "/resolve/", 1)],
}


@pytest.mark.parametrize("burst", [*BURSTS])
def test_a_burst_of_failures_is_survived(
    burst: str, hub: HubServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = few(hub)
    (patient if burst.startswith("nothing") else quick)(monkeypatch)
    rules = [hub.fail(effect, method=method, path=path, times=n) for effect, method, path, n in BURSTS[burst]]
    report = place.batch(*names)
    assert outcomes(report) == ["done"] * 3, [r.data for r in report.failed]
    assert [rule.left for rule in rules] == [0] * len(rules)
    assert [len(keyed(hub, target(name))) for name in names] == [1, 1, 1]
    assert all(is_half_of(published(hub, target(name)), published(hub, name)) for name in names)
