"""Converted models on their way to the Hub: all of it, in one commit, once, and nothing where something was refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precconv
from precconv import __version__
from precconv.fileio import PartFile

from .hub import faults, refusals
from .hub.faults import Effect
from .hub.server import HubServer
from .hub_runs import Waits, Work, model_files
from .processes import HANG, ROOT, posix
from .repos import files, layers, shard, sharded, stages, weight

SOURCE, OUT = "acme/m", "acme/out"
TITLE = f"Convert acme/m to bf16 (precconv {__version__})"
CARD = b"---\nlicense: mit\n---\n# A model\n"
CONVERT = (SOURCE, "--to", "bf16")
PUSH = (*CONVERT, "--push", OUT)


@pytest.fixture
def source(here: Work, tmp_path: Path) -> Path:
    """A model in three shards, and the same in a repo."""
    root = sharded(tmp_path / "source", layers(3))
    (root / "README.md").write_bytes(CARD)
    (root / "tokenizer.json").write_bytes(b"{}")
    here.hub.create(SOURCE, model_files(root))
    return root


@pytest.fixture
def push(here: Work) -> Callable[..., dict[str, Any]]:
    def run(*args: object, push: tuple[str, ...] = PUSH) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(here.ok(*push, *args, "--json", token=here.hub.tokens.write))
        return report

    return run


Push = Callable[..., dict[str, Any]]


def expected(source: Path, **options: Any) -> dict[str, bytes]:
    """What a conversion of the local directory gives, but for the card, which says where it came from."""
    out = source.with_name("expected")
    precconv.convert(source, to="bf16", output=out, **options)
    found = files(out)
    shutil.rmtree(out)
    del found["README.md"]
    return found


def published(hub: HubServer, revision: str = "main", repo: str = OUT) -> dict[str, bytes]:
    """The same of a repo."""
    found = {name: hub.read(repo, name, revision) for name in hub.files(repo, revision)}
    for name in (".gitattributes", "README.md"):
        found.pop(name, None)
    return found


def titles(hub: HubServer, revision: str = "main", repo: str = OUT) -> list[str]:
    return [c.title for c in hub.commits(repo, revision)]


# What is published


def test_a_model_is_published_whole_in_one_commit_and_nothing_is_left_here(
    here: Work, source: Path, push: Push
) -> None:
    report, hub = push(), here.hub
    assert published(hub) == expected(source)
    last, first = hub.commits(OUT)
    assert (last.title, first.title) == (TITLE, "initial commit")
    assert "6 tensors bf16: target" in last.description
    card = hub.read(OUT, "README.md").decode()
    assert f"base_model: {SOURCE}" in card
    assert hub.commits(SOURCE)[0].oid in card
    assert here.left() == []
    url = f"{hub.endpoint}/{OUT}"
    there = {"repo": OUT, "commit": last.oid, "url": url, "pr_url": None, "already": False}
    assert (report["published"], report["output"], report["ok"]) == (there, url, True)
    assert {f["path"] for f in report["files"] if f["action"] != "left out"} == set(hub.files(OUT))


@pytest.mark.usefixtures("source")
def test_what_is_published_is_said(here: Work) -> None:
    said = here.ok(*PUSH, token=here.hub.tokens.write)
    commit = here.hub.commits(OUT)[0].oid[:12]
    assert f"  published: {here.hub.endpoint}/{OUT}, commit {commit}\n" in said
    again = here.ok(*PUSH, token=here.hub.tokens.write)
    assert again == f"{here.hub.endpoint}/{OUT}: published already, commit {commit}; nothing to do\n"


@pytest.mark.usefixtures("source")
def test_a_second_run_does_nothing(here: Work, push: Push) -> None:
    first = push("--report", "a.json")
    here.hub.requests.clear()
    second = push("--report", "b.json")
    assert second["published"] == {**first["published"], "already": True}
    assert [e for e in here.hub.seen("GET", "/(resolve|objects)/") if not e.range] == []
    assert here.hub.seen("PUT") == here.hub.seen("POST", "/commit/") == []
    for name, report in (("a.json", first), ("b.json", second)):
        assert json.loads((here.path / name).read_bytes())["published"] == report["published"]
    assert here.left() == ["a.json", "b.json"]


def test_another_commit_of_the_source_is_published_again(here: Work, source: Path, push: Push) -> None:
    push()
    sharded(source, [{f"layer.{n}.a": weight(7 + n)} for n in range(2)])
    gone = [shard(n, 3) for n in (1, 2, 3)]
    for name in gone:
        (source / name).unlink()
    here.hub.commit(SOURCE, model_files(source), deleted=gone)
    assert not push()["published"]["already"]
    assert published(here.hub) == expected(source)
    assert titles(here.hub) == [TITLE, TITLE, "initial commit"]
    assert push()["published"]["already"]


def test_other_options_are_another_publication(here: Work, source: Path, push: Push) -> None:
    push()
    assert not push("--keep", "layer.0.a")["published"]["already"]
    assert published(here.hub) == expected(source, keep=["layer.0.a"])
    assert len(titles(here.hub)) == 3


@pytest.mark.usefixtures("source")
def test_an_output_is_kept_here_where_one_is_named(here: Work, push: Push) -> None:
    report = push("-o", "kept")
    assert (report["output"], report["published"]["repo"]) == ("kept", OUT)
    there = {name: here.hub.read(OUT, name) for name in here.hub.files(OUT)}
    assert files(here.path / "kept") == there
    assert stages(here.path) == []
    assert push("-o", "kept")["published"]["already"]
    report = push("-o", "another")
    assert (report["output"], report["published"]["already"]) == ("another", True)
    assert files(here.path / "another") == there
    assert len(titles(here.hub)) == 2


def test_a_published_model_can_be_loaded(here: Work, tmp_path: Path, push: Push) -> None:
    from .tiny_models import llama, train

    model = llama()
    train(model)
    model.save_pretrained(tmp_path / "llama", max_shard_size="30KB")
    here.hub.create(SOURCE, model_files(tmp_path / "llama"))
    push("--norms", "cast")
    done = subprocess.run(
        [sys.executable, "-c", LOADS, OUT],
        env=here.hub.environment(here.home, xet=False) | {"PYTHONPATH": str(ROOT)},
        cwd=here.path, capture_output=True, encoding="utf-8", timeout=HANG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = {name: [str(torch.bfloat16), float(x.bfloat16().double().sum())] for name, x in model.state_dict().items()}
    assert json.loads(done.stdout.splitlines()[-1]) == wanted


LOADS = """
import json, sys
from transformers import AutoModelForCausalLM
model, told = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(told.values()), told
print(json.dumps({name: [str(x.dtype), float(x.double().sum())] for name, x in model.state_dict().items()}))
"""


# Where


def test_to_a_branch(here: Work, source: Path, push: Push) -> None:
    report, hub = push("--branch", "bf16"), here.hub
    assert published(hub, "bf16") == expected(source)
    assert titles(hub) == ["initial commit"]
    assert report["output"] == f"{hub.endpoint}/{OUT}/tree/bf16"
    assert push("--branch", "bf16")["published"]["already"]


def test_to_a_branch_of_the_source_itself(here: Work, source: Path, push: Push) -> None:
    to = (*CONVERT, "--push", SOURCE, "--branch", "bf16")
    push(push=to)
    assert published(here.hub, "bf16", SOURCE) == expected(source)
    assert published(here.hub, "main", SOURCE).keys() == files(source).keys() - {"README.md"}
    assert push(push=to)["published"]["already"]


def test_as_a_variant_of_the_source_itself_whose_files_stay_as_they_are(here: Work, source: Path, push: Push) -> None:
    to = (*CONVERT, "--push", SOURCE, "--variant", "bf16")
    before = {name: here.hub.read(SOURCE, name) for name in here.hub.files(SOURCE)}
    assert not push(push=to)["published"]["already"]
    after = {name: here.hub.read(SOURCE, name) for name in here.hub.files(SOURCE)}
    made = {name: data for name, data in expected(source, variant="bf16").items() if "bf16" in name}
    assert after == before | made
    assert len(made) == 4
    assert push(push=to)["published"]["already"]
    assert titles(here.hub, repo=SOURCE) == [TITLE, "change 1", "initial commit"]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("options", [(), ("--branch", "main")])
def test_not_in_place_of_the_source(options: tuple[str, ...], here: Work) -> None:
    said = here.refused(2, *CONVERT, "--push", SOURCE, *options, token=here.hub.tokens.write)
    assert f"{SOURCE}: is the source, whose weights would be replaced" in said
    assert titles(here.hub, repo=SOURCE) == ["change 1", "initial commit"]
    here.ok(*CONVERT, "--push", SOURCE, "--pr", token=here.hub.tokens.write)


def test_as_a_pull_request_which_is_found_again(here: Work, source: Path, push: Push) -> None:
    here.hub.create(OUT)
    report, again = push("--pr"), push("--pr")
    (pull,) = here.hub.pull_requests(OUT)
    assert (pull.title, pull.status) == (TITLE, "open")
    assert report["output"] == again["output"] == f"{here.hub.endpoint}/{OUT}/discussions/{pull.num}"
    assert (report["published"]["already"], again["published"]["already"]) == (False, True)
    assert published(here.hub, pull.ref) == expected(source)
    assert titles(here.hub) == ["initial commit"]


@pytest.mark.usefixtures("source")
def test_privately(here: Work, push: Push) -> None:
    push("--private")
    assert here.hub.repo(OUT).private
    assert push("--private")["published"]["already"]
    here.hub.repo(OUT).private = False
    assert "is public already" in here.refused(2, *PUSH, "--private", token=here.hub.tokens.write)


def test_from_a_directory(here: Work, source: Path, push: Push) -> None:
    to = (str(source), "--to", "bf16", "--push", OUT)
    push(push=to)
    assert published(here.hub) == expected(source)
    assert here.hub.commits(OUT)[0].title == f"Convert to bf16 (precconv {__version__})"
    assert str(source) not in here.hub.read(OUT, "README.md").decode() + here.hub.commits(OUT)[0].description
    assert push(push=to)["published"]["already"]
    assert sorted(p.name for p in source.parent.iterdir() if p.name.startswith((".", "source"))) == ["source"]
    (source / "tokenizer.json").write_bytes(b"[]")
    assert not push(push=to)["published"]["already"]
    assert here.hub.read(OUT, "tokenizer.json") == b"[]"
    assert here.left() == []


def test_a_model_on_the_hub_may_be_private_and_its_conversion_too(here: Work, source: Path, push: Push) -> None:
    here.hub.repo(SOURCE).private = True
    push("--private")
    assert published(here.hub) == expected(source)


# What is not published


WRONG = [
    (["--private"], "--private is about publishing"), (["--branch", "x"], "--branch is about publishing"),
    (["--pr"], "--pr is about publishing"), (["--low-disk"], "--low-disk is about publishing"),
    (["--push", OUT, "--pr", "--branch", "x"], "a pull request goes to main"),
    (["--push", OUT, "-o", "x.safetensors"], "-o names a file"),
    (["--push", OUT, "--low-disk", "-o", "x"], "--low-disk keeps nothing here"),
    (["--push", OUT, "--low-disk", "--shard-size", "1GB"], "--low-disk writes the source's shards"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), WRONG)
@pytest.mark.usefixtures("source")
def test_what_contradicts_itself_is_a_matter_of_usage(options: list[str], said: str, here: Work) -> None:
    assert said in here.refused(2, *CONVERT, *options, token=here.hub.tokens.write)
    assert here.hub.requests == []


def test_what_is_only_for_models_or_for_the_hub(here: Work, source: Path) -> None:
    token = here.hub.tokens.write
    said = here.refused(2, source / shard(1, 3), "--to", "bf16", "--push", OUT, token=token)
    assert "--push publishes models, this is a file" in said
    said = here.refused(2, source, "--to", "bf16", "--push", OUT, "--low-disk", token=token)
    assert "--low-disk is for models on the Hub" in said
    assert here.hub.requests == []


@pytest.mark.parametrize("low_disk", [False, True])
def test_nothing_is_published_that_a_check_refuses(low_disk: bool, here: Work, source: Path) -> None:
    sharded(source, [{"layer.0.a": weight(0)}, {"layer.1.a": weight(1) + 1e5}])
    here.hub.commit(SOURCE, model_files(source), deleted=[shard(n, 3) for n in (1, 2, 3)])
    options = ["--low-disk"] if low_disk else []
    command = (SOURCE, "--to", "fp16", "--push", OUT, "--report", "r.json", *options)
    done = here(*command, token=here.hub.tokens.write)
    assert done.exit_code == 3
    assert "layer.1.a" in done.stderr
    assert here.left() == ["r.json"]
    report = json.loads((here.path / "r.json").read_bytes())
    assert (report["ok"], report["published"]) == (False, None)
    assert titles(here.hub) == ["initial commit"]
    here.ok(*command, "--on-overflow", "keep", token=here.hub.tokens.write)
    assert len(titles(here.hub)) == 2


@pytest.mark.parametrize("low_disk", [False, True])
@pytest.mark.usefixtures("source")
def test_nothing_is_published_that_is_not_what_was_planned(
    low_disk: bool, here: Work, monkeypatch: pytest.MonkeyPatch, push: Push
) -> None:
    write = PartFile.write

    def flipped(self: PartFile, buffer: memoryview, offset: int) -> None:
        data = bytearray(buffer)
        if "00002-of-" in self.path.name and offset:
            data[-1] ^= 1
        write(self, memoryview(data), offset)

    with monkeypatch.context() as patch:
        patch.setattr(PartFile, "write", flipped)
        options = ["--low-disk"] if low_disk else []
        said = here.refused(4, *PUSH, *options, "--verify", "full", token=here.hub.tokens.write)
    assert "is not the cast" in said
    assert titles(here.hub) == ["initial commit"]
    push("--verify", "full")
    assert len(titles(here.hub)) == 2


@pytest.mark.usefixtures("source")
def test_who_may_not_write_hears_it_before_anything_is_fetched(here: Work) -> None:
    for token in (here.hub.tokens.read, here.hub.tokens.stranger):
        assert "the token does not allow it" in here.refused(5, *PUSH, token=token)
    assert "needs a token" in here.refused(5, *PUSH)
    assert [e for e in here.hub.seen("GET", "/(resolve|objects)/") if not e.range] == []
    assert here.hub.repos() == [SOURCE]


@pytest.mark.usefixtures("source")
def test_the_first_upload_that_fails_ends_it(here: Work, push: Push) -> None:
    here.hub.fail(faults.refuse(refusals.storage_quota()), path="/out.git/info/lfs", times=99)
    done = here(*PUSH, "--workers", "1", token=here.hub.tokens.write)
    assert done.exit_code == 5
    assert "the Hub has no room for it" in done.stderr
    assert titles(here.hub) == ["initial commit"]
    here.hub._rules.rules.clear()
    push()
    assert here.left() == []


# What passes


BURSTS: dict[str, tuple[Effect, int]] = {
    "rate limit": (faults.rate_limited(seconds=20), 3),
    "failures": (faults.status(503), 3),
    "cut": (faults.lost(), 3),
    "outage": (faults.outage(0.05), 1),
}


@pytest.mark.parametrize(("effect", "times"), BURSTS.values(), ids=BURSTS)
@pytest.mark.parametrize("where", ["GET /api/models/", "POST /preupload/", "PUT /objects/", "POST /commit/"])
def test_what_passes_is_waited_for(
    where: str, effect: Effect, times: int, here: Work, source: Path, waits: Waits, push: Push
) -> None:
    method, path = where.split()
    rule = here.hub.fail(effect, method=method, path=path, times=times)
    push()
    assert rule.left < times  # a commit that has landed is not sent again
    assert waits
    assert published(here.hub) == expected(source)
    assert titles(here.hub) == [TITLE, "initial commit"]


# Runs that are killed


KILLS = {
    "fetching": ("HEAD", "/resolve/.*00002-of", False),
    "at the first upload": ("PUT", "^/objects/", False),
    "after an upload": ("POST", "/verify", True),
    "before the commit": ("POST", "/commit/", False),
    "after the commit": ("POST", "/commit/", True),
}


@posix
@pytest.mark.parametrize(
    ("options", "when"),
    [*(((), when) for when in KILLS),
     *((("--low-disk",), when) for when in ("fetching", "after an upload", "before the commit")),
     *((("--pr",), when) for when in ("before the commit", "after the commit"))],
)  # fmt: skip
def test_a_run_that_is_killed_is_made_good_by_the_next(
    options: tuple[str, ...], when: str, here: Work, source: Path, push: Push
) -> None:
    method, path, applied = KILLS[when]
    hub, running = here.hub, list[subprocess.Popen[str]]()
    hub.create(OUT)

    def kill() -> None:
        running[0].kill()
        running[0].wait()

    effect = faults.after(kill) if applied else Effect(first=kill, applied=False, silent=True)
    rule = hub.fail(effect, method=method, path=path)
    running.append(here.start(*PUSH, *options, token=hub.tokens.write, HF_HUB_DISABLE_XET="1"))
    with running[0] as process:
        process.communicate(timeout=HANG)
    assert (process.returncode, rule.left) == (-signal.SIGKILL, 0)
    landed = applied and path == "/commit/"
    report = push(*options)
    assert report["published"]["already"] is landed
    ref = hub.pull_requests(OUT)[0].ref if "--pr" in options else "main"
    assert titles(hub, ref) == [TITLE, "initial commit"]
    assert len(hub.pull_requests(OUT)) == ("--pr" in options)
    assert published(hub, ref) == expected(source)
    assert here.left() == []


@posix
def test_an_interruption_ends_a_run_at_once(here: Work, source: Path, push: Push) -> None:
    hub, running = here.hub, list[subprocess.Popen[str]]()
    wait = Effect(first=lambda: running[0].send_signal(signal.SIGINT), answer=refusals.rate_limited(seconds=100))
    hub.fail(wait, method="POST", path="/out/preupload/.*main", times=1)
    hub.create(OUT)
    running.append(here.start(*PUSH, token=hub.tokens.write, HF_HUB_DISABLE_XET="1"))
    with running[0] as process:
        _, said = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert "interrupted" in said
    assert titles(hub) == ["initial commit"]
    push()
    assert published(hub) == expected(source)
    assert here.left() == []


def test_xet_is_used_where_it_is_on(here: Work, source: Path) -> None:
    code, out, said = here.apart(*PUSH, "--json", token=here.hub.tokens.write)
    assert code == 0, said
    assert here.hub.seen("POST", "^/v1/shards")
    assert here.hub.seen("GET", "^/xorbs/")
    assert here.hub.seen("PUT") == []
    assert published(here.hub) == expected(source)
    assert json.loads(out)["published"]["commit"] == here.hub.commits(OUT)[0].oid
    assert here.left() == []
