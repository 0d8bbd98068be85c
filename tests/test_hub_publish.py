"""Publishing on the tests' own Hub with the real client: one commit, once, whatever happens on the way.

Waits are written down and not waited for; the one test that kills looks at what the next run does.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi

from precconv import HubError, InputError, UsageError, __version__
from precconv.hub.publish import Published, Target, publication_key, publication_title, publisher, upload
from precconv.hub.retries import TRIES

from .hub import faults, refusals
from .hub.faults import Effect
from .hub.patience import impatient
from .hub.refusals import Refused
from .hub.server import HubServer
from .hub.store import Discussion
from .processes import HANG, ROOT, posix

REPO = "acme/model"
MAIN = Target(REPO)
KEY, OTHER = "1a2b3c4d5e6f7081", "00000000000000ff"
TITLE = f"Convert org/name to bf16 (precconv {__version__})"
CARD = b"---\nlicense: mit\n---\n"
INDEX = "model.safetensors.index.json"


def shards(count: int, seed: int = 0) -> dict[str, bytes]:
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    return {name: bytes([seed, n]) * 5000 for n, name in enumerate(names)}


FILES = {**shards(2), INDEX: b'{"weight_map": {}}', "README.md": CARD}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return impatient(monkeypatch)


@pytest.fixture
def waits() -> list[float]:
    """What publishing asked to wait."""
    return []


@pytest.fixture
def publish(in_process: HubServer, tmp_path: Path, waits: list[float]) -> Publish:
    return Publish(in_process, tmp_path, waits)


class Publish:
    """A whole publication, as a conversion makes it: large files from the disk, small ones from memory."""

    def __init__(self, hub: HubServer, tmp_path: Path, waits: list[float]) -> None:
        self.hub, self.waits, self.place = hub, waits, tmp_path

    def __call__(
        self,
        files: Mapping[str, bytes] = FILES,
        *,
        target: Target = MAIN,
        key: str = KEY,
        token: str = "",
        delete: tuple[str, ...] = (),
        just_before: object = None,
    ) -> Published:
        with publisher(target, key, token=token or self.hub.tokens.write, sleep=self.waits.append) as p:
            if p.already is not None:
                return p.already
            operations = []
            for name, data in files.items():
                if name.endswith(".safetensors"):
                    path = self.place / name
                    path.write_bytes(data)
                    operations.append(p.upload(path, name))
                    path.unlink()
                else:
                    operations.append(p.attach(data, name))
            if callable(just_before):
                just_before()
            return p.commit(operations, title=TITLE, description="From org/name.", delete=delete)


def has(hub: HubServer, files: Mapping[str, bytes], revision: str = "main", repo: str = REPO) -> bool:
    """Whether a revision has exactly these files, but for the one that every repo begins with."""
    found = {name: hub.read(repo, name, revision) for name in hub.files(repo, revision)}
    found.pop(".gitattributes")
    return found == dict(files)


def titles(hub: HubServer, revision: str = "main") -> list[str]:
    return [c.title for c in hub.commits(REPO, revision)]


def pull(hub: HubServer) -> Discussion:
    (found,) = hub.pull_requests(REPO)
    return found


# A publication


@pytest.mark.parametrize("private", [False, True])
def test_a_repo_is_made_and_gets_everything_in_one_commit(private: bool, hub: HubServer, publish: Publish) -> None:
    done = publish(target=Target(REPO, private=private))
    last, first = hub.commits(REPO)
    assert (last.title, last.description) == (TITLE, f"From org/name.\n\nprecconv-key: {KEY}")
    assert first.title == "initial commit"
    assert has(hub, FILES)
    assert hub.repo(REPO).private is private
    assert done == Published(REPO, last.oid, f"{hub.endpoint}/{REPO}")
    assert len(hub.seen("POST", "/commit/")) == 1


def test_a_name_alone_is_a_repo_of_ones_own(hub: HubServer, publish: Publish) -> None:
    assert publish(target=Target("mine")).repo == "tester/mine"
    assert has(hub, FILES, repo="tester/mine")


def test_a_renamed_repo_is_published_to_under_its_new_name(hub: HubServer, publish: Publish) -> None:
    hub.create("acme/old")
    hub.rename("acme/old", REPO)
    assert publish(target=Target("acme/old")).repo == REPO
    assert has(hub, FILES)


def test_private_does_not_change_what_is_public(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    with pytest.raises(UsageError, match="acme/model: is public already, and --private makes only new repos private"):
        publish(target=Target(REPO, private=True))
    assert (titles(hub), hub.repo(REPO).private, hub.seen("PUT")) == (["initial commit"], False, [])
    hub.repo(REPO).private = True
    publish(target=Target(REPO, private=True))
    publish(key=OTHER, files={"a.txt": b"1"})
    assert hub.repo(REPO).private


@pytest.mark.parametrize("repo", [REPO, "acme/new"])
@pytest.mark.parametrize("token", ["read", "guest", "stranger"])
def test_who_may_not_write_hears_it_before_any_work(repo: str, token: str, hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    with pytest.raises(HubError) as caught:
        publish(target=Target(repo), token=getattr(hub.tokens, token))
    assert caught.value.kind == "permission"
    assert hub.seen("PUT") == hub.seen(path="/objects/") == []
    assert hub.repos() == [REPO]


def test_a_large_file_is_sent_at_once_and_a_small_one_with_the_commit(hub: HubServer, publish: Publish) -> None:
    sent: list[int] = []
    publish(just_before=lambda: sent.append(len(hub.seen("PUT", "^/objects/"))))
    assert sent == [2]
    assert len(hub.seen("PUT")) == 2


def test_an_upload_can_be_pickled_and_its_file_is_not_needed_any_more(
    in_process: HubServer, tmp_path: Path, waits: list[float]
) -> None:
    hub, token = in_process, in_process.tokens.write
    files = {**shards(1), "config.json": b"{}", "empty.txt": b""}
    with publisher(MAIN, KEY, token=token, sleep=waits.append) as p:
        packed = []
        for name, data in files.items():
            path = tmp_path / name
            path.write_bytes(data)
            packed.append(pickle.dumps(upload(p.target, path, name, token=token, sleep=waits.append)))
            path.unlink()
        assert max(map(len, packed)) < 2000
        p.commit([pickle.loads(op) for op in packed], title=TITLE)
    assert has(hub, files)


def test_ten_uploads_at_once_are_one_commit(in_process: HubServer, tmp_path: Path, waits: list[float]) -> None:
    hub, files = in_process, shards(10)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with (
        publisher(MAIN, KEY, token=hub.tokens.write, sleep=waits.append) as p,
        ThreadPoolExecutor(10) as pool,
    ):
        operations = list(pool.map(lambda name: p.upload(tmp_path / name, name), files))
        p.commit(operations, title=TITLE)
    assert has(hub, files)
    assert titles(hub) == [TITLE, "initial commit"]
    assert len(hub.seen("PUT")) == 10


def test_a_file_whose_name_begins_with_a_tilde_is_no_home(
    in_process: HubServer, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "model.safetensors").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    with publisher(MAIN, KEY, token=in_process.tokens.write, sleep=waits.append) as p:
        p.commit([p.upload("~/model.safetensors", "model.safetensors")], title=TITLE)
    assert has(in_process, {"model.safetensors": b"1"})


def test_what_gitignore_names_is_said_and_not_left_out(
    in_process: HubServer, tmp_path: Path, waits: list[float]
) -> None:
    hub, path = in_process, tmp_path / "model.safetensors"
    path.write_bytes(b"1")
    hub.create(REPO, {".gitignore": b"*.safetensors\nREADME.md\n"})
    with publisher(MAIN, KEY, token=hub.tokens.write, sleep=waits.append) as p:
        with pytest.raises(HubError, match=r"model.safetensors: the repo's \.gitignore leaves it out"):
            p.upload(path, path.name)
        with pytest.raises(HubError, match=r"README.md: the repo's \.gitignore leaves it out"):
            p.commit([p.attach(CARD, "README.md")], title=TITLE)
    assert titles(hub) == ["change 1", "initial commit"]


@pytest.mark.parametrize("name", ["../a.txt", ".git/config", ".cache/huggingface/x"])
def test_a_name_that_the_hub_does_not_take_is_said_before_anything_is_sent(
    name: str, in_process: HubServer, tmp_path: Path, waits: list[float]
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    with publisher(MAIN, KEY, token=in_process.tokens.write, sleep=waits.append) as p:
        with pytest.raises(HubError, match="the Hub takes no file of this name"):
            p.attach(b"1", name)
        with pytest.raises(HubError, match="the Hub takes no file of this name"):
            p.upload(tmp_path / "a", name)


def test_a_file_that_is_not_there_is_no_matter_of_the_hubs(in_process: HubServer, tmp_path: Path) -> None:
    with (
        publisher(MAIN, KEY, token=in_process.tokens.write) as p,
        pytest.raises(InputError, match=r"none.*cannot be read"),
    ):
        p.upload(tmp_path / "none.safetensors", "model.safetensors")


# Once


def test_what_is_published_is_not_published_again(hub: HubServer, publish: Publish) -> None:
    done = publish()
    count = len(hub.seen("POST", "/commit/"))
    again = publish()
    assert again == Published(REPO, done.commit, done.url, already=True)
    assert (count, len(hub.seen("POST", "/commit/")), len(hub.seen("PUT"))) == (1, 1, 2)


def test_a_commit_of_somebodys_on_top_does_not_unpublish(hub: HubServer, publish: Publish) -> None:
    done = publish()
    hub.commit(REPO, {"README.md": b"better", "model.fp16.safetensors": b"1"})
    assert publish() == Published(REPO, done.commit, done.url, already=True)


def test_what_was_published_over_is_published_again(hub: HubServer, publish: Publish) -> None:
    publish()
    publish({**FILES, **shards(2, seed=1)}, key=OTHER)
    done = publish()
    assert not done.already
    assert has(hub, FILES)
    assert titles(hub) == [TITLE, TITLE, TITLE, "initial commit"]


def test_the_same_files_under_another_key_are_no_commit(hub: HubServer, publish: Publish) -> None:
    done = publish()
    again = publish(key=OTHER)
    assert again == Published(REPO, done.commit, done.url, already=True)
    assert titles(hub) == [TITLE, "initial commit"]


def test_only_what_changed_is_in_the_commit(hub: HubServer, publish: Publish) -> None:
    publish()
    publish({**FILES, "README.md": CARD + b"more"}, key=OTHER)
    assert has(hub, {**FILES, "README.md": CARD + b"more"})
    assert len(hub.seen("PUT")) == 2


def test_a_publication_that_came_in_between_is_found_at_the_commit(hub: HubServer, publish: Publish) -> None:
    done = publish(just_before=publish)
    assert done.already
    assert titles(hub) == [TITLE, "initial commit"]


# What it replaces


def test_older_shards_and_indexes_of_the_same_model_go_and_all_else_stays(hub: HubServer, publish: Publish) -> None:
    kept = {
        "model.fp16.safetensors": b"1", "vocab.bin": b"2", "pytorch_model.bin": b"3", "notes.txt": b"4",
        "model.bin": b"7",
        "unet/model.safetensors": b"5", "adapter_model.safetensors": b"6",
    }  # fmt: skip
    hub.create(REPO, kept)
    publish()
    three = {**FILES, **shards(3)}
    for name in shards(2):
        del three[name]
    publish(three, key=OTHER)
    assert has(hub, {**kept, **three})
    single = {"model.safetensors": b"1" * 100}
    publish(single, key="f" * 16)
    assert has(hub, {**kept, **single, "README.md": CARD})


def test_what_is_to_be_deleted_goes_if_it_is_there(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO, {"pytorch_model.bin": b"3", "README.md": b"old"})
    publish(delete=("pytorch_model.bin", "none.bin", "README.md"))
    assert has(hub, FILES)


# What goes wrong


BURSTS: dict[str, tuple[Effect, int, list[float]]] = {
    "rate limit": (faults.rate_limited(seconds=55), 3, [56, 56, 56]),
    "rate limit, the old way": (faults.rate_limited(seconds=3, header="Retry-After"), 1, [4]),
    "failures": (faults.status(503), 4, [1, 2, 4, 8]),
    "cut before": (Effect(applied=False, silent=True, answer=Refused(500)), 2, [1, 2]),
    "landed, then failed": (faults.lost(500), 1, [1]),
    "landed, then cut": (faults.lost(), 1, [1]),
}


@pytest.mark.parametrize(("effect", "times", "expected"), [*BURSTS.values()], ids=[*BURSTS])
@pytest.mark.parametrize("pr", [False, True], ids=["commit", "pull request"])
def test_a_commit_gets_over_it_and_lands_once(
    effect: Effect, times: int, expected: list[float], pr: bool, hub: HubServer, publish: Publish
) -> None:
    hub.create(REPO)
    rule = hub.fail(effect, method="POST", path="/commit/", times=times)
    done = publish(target=Target(REPO, pr=pr))
    revision = pull(hub).ref if pr else "main"
    assert (rule.left, publish.waits) == (0, expected)
    assert titles(hub, revision) == [TITLE, "initial commit"]
    assert has(hub, FILES, revision)
    assert done.commit == hub.commits(REPO, revision)[0].oid
    assert not done.already


@pytest.mark.parametrize(
    "path", ["/api/models/acme/model$", "/commits/", "/tree/", "/refs", "/repos/create", "/branch/"]
)
@pytest.mark.parametrize("effect", [faults.status(502), faults.rate_limited(seconds=9), faults.lost()])
def test_every_other_request_gets_over_it_too(
    path: str, effect: Effect, hub: HubServer, publish: Publish, patient: list[float]
) -> None:
    rule = hub.fail(effect, path=path)
    publish(target=Target(REPO, branch="bf16"))
    assert rule.left == 0
    assert len(publish.waits) + len(patient) == 1
    assert has(hub, FILES, "bf16")


@pytest.mark.parametrize(("method", "path"), [("POST", "/preupload/"), ("PUT", ""), ("POST", "/objects/batch")])
def test_an_upload_gets_over_more_than_the_client_does(
    method: str, path: str, hub: HubServer, publish: Publish
) -> None:
    rule = hub.fail(faults.status(503), method=method, path=path, times=8)
    publish(shards(1))
    assert rule.left == 0
    assert publish.waits
    assert has(hub, shards(1))


def test_a_server_that_stops_for_a_while_is_waited_for(in_process: HubServer, publish: Publish) -> None:
    hub = in_process
    hub.create(REPO)
    hub.fail(faults.outage(0.1), method="POST", path="/commit/")

    class UntilBack(list[float]):
        def append(self, seconds: float) -> None:
            super().append(seconds)
            for outage in hub._outages:
                outage.join()

    publish.waits = UntilBack()
    publish()
    assert publish.waits[0] == 1
    assert titles(hub) == [TITLE, "initial commit"]


def test_what_does_not_pass_is_given_up_at_once_and_what_does_at_last(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    hub.fail(faults.refuse(refusals.storage_quota()), path="/commit/")
    with pytest.raises(HubError, match="no room"):
        publish()
    assert publish.waits == []
    hub.fail(faults.status(500), path="/commit/", times=99)
    with pytest.raises(HubError, match="the Hub failed"):
        publish()
    assert len(publish.waits) == TRIES - 1
    assert titles(hub) == ["initial commit"]


def test_a_commit_goes_on_top_of_somebody_elses(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    hub.fail(faults.before(lambda: hub.commit(REPO, {"theirs.txt": b"1"})), method="POST", path="/commit/")
    publish()
    assert titles(hub) == [TITLE, "change 1", "initial commit"]
    assert has(hub, {**FILES, "theirs.txt": b"1"})


def test_a_file_that_was_equal_when_it_was_sent_is_committed_if_it_no_longer_is(
    hub: HubServer, publish: Publish
) -> None:
    first, second = shards(2)
    hub.create(REPO, FILES)
    publish({**FILES, second: b"new"}, just_before=lambda: hub.commit(REPO, {first: b"theirs"}))
    assert has(hub, {**FILES, second: b"new"})


def test_shards_that_somebody_deleted_in_between_are_not_deleted_again(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO, shards(3))
    (first, *_) = shards(3)
    hub.fail(faults.before(lambda: hub.commit(REPO, deleted=[first])), method="POST", path="/commit/")
    publish()
    assert has(hub, FILES)


def test_one_who_always_comes_first_wins_in_the_end(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    hub.fail(faults.before(lambda: hub.commit(REPO, {"a": b"1"})), method="POST", path="/commit/", times=99)
    with pytest.raises(HubError, match="somebody else's commit came first"):
        publish()
    assert len(publish.waits) == TRIES - 1


def test_a_wait_in_another_thread_ends_when_publishing_is_given_up(in_process: HubServer, tmp_path: Path) -> None:
    hub, path = in_process, tmp_path / "model.safetensors"
    path.write_bytes(b"1" * 100)
    waiting, caught = threading.Event(), list[str]()
    limited = Effect(first=waiting.set, applied=False, answer=refusals.rate_limited(seconds=500))

    def send() -> None:
        try:
            p.upload(path, path.name)
        except HubError as e:
            caught.append(str(e))

    with (  # noqa: PT012  (the thread must be at it when it is raised)
        pytest.raises(KeyError),
        publisher(MAIN, KEY, token=hub.tokens.write) as p,
    ):
        hub.fail(limited, path="/preupload/", times=99)
        thread = threading.Thread(target=send)
        thread.start()
        assert waiting.wait(HANG)
        raise KeyError
    thread.join(HANG)
    assert caught == [f"{REPO}: publishing was given up"]


# Branches and pull requests


@pytest.mark.parametrize("branch", ["bf16", "wip/bf16"])
def test_a_branch_is_made_from_main_and_main_stays(branch: str, hub: HubServer, publish: Publish) -> None:
    hub.create(REPO, {"notes.txt": b"1"})
    done = publish(target=Target(REPO, branch=branch))
    assert has(hub, {**FILES, "notes.txt": b"1"}, branch)
    assert has(hub, {"notes.txt": b"1"})
    assert done.url == f"{hub.endpoint}/{REPO}/tree/{branch}"
    hub.commit(REPO, {"notes.txt": b"2"})
    assert publish(target=Target(REPO, branch=branch)).already
    assert not publish().already


def test_a_pull_request_is_opened_and_found_again(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    done = publish(target=Target(REPO, pr=True))
    assert (pull(hub).title, pull(hub).status) == (TITLE, "open")
    assert done.pr_url == f"{hub.endpoint}/{REPO}/discussions/1"
    assert titles(hub) == ["initial commit"]
    assert has(hub, FILES, "refs/pr/1")
    assert hub.seen(path="whoami") == []
    again = publish(target=Target(REPO, pr=True))
    assert again == Published(REPO, done.commit, done.url, done.pr_url, already=True)
    publish({"a.txt": b"1"}, target=Target(REPO, pr=True), key=OTHER)
    assert len(hub.pull_requests(REPO)) == 2


def test_whoever_may_read_may_open_a_pull_request(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    publish(target=Target(REPO, pr=True), token=hub.tokens.stranger)
    assert (pull(hub).author, has(hub, FILES, "refs/pr/1")) == ("stranger", True)


def test_a_pull_request_of_somebody_else_is_not_trusted(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    publish(shards(2, seed=9), target=Target(REPO, pr=True), token=hub.tokens.stranger)
    done = publish(target=Target(REPO, pr=True))
    assert done.pr_url == f"{hub.endpoint}/{REPO}/discussions/2"
    assert has(hub, FILES, "refs/pr/2")


@pytest.mark.parametrize("merged", [True, False])
def test_a_merged_pull_request_is_published_and_a_closed_one_is_not(
    merged: bool, hub: HubServer, hub_api: HfApi, publish: Publish
) -> None:
    hub.create(REPO)
    publish(target=Target(REPO, pr=True))
    if merged:
        hub_api.merge_pull_request(REPO, 1)
    else:
        hub_api.change_discussion_status(REPO, 1, "closed")
    done = publish(target=Target(REPO, pr=True))
    assert done.already is merged
    assert len(hub.pull_requests(REPO)) == (1 if merged else 2)


def test_a_pull_request_whose_weights_were_changed_gets_another_commit(hub: HubServer, publish: Publish) -> None:
    hub.create(REPO)
    first = publish(target=Target(REPO, pr=True))
    hub.commit(REPO, {next(iter(shards(2))): b"broken"}, revision="refs/pr/1")
    done = publish(target=Target(REPO, pr=True))
    assert (done.pr_url, done.already) == (first.pr_url, False)
    assert titles(hub, pull(hub).ref) == [TITLE, "change 2", TITLE, "initial commit"]
    assert has(hub, FILES, "refs/pr/1")


def test_a_pull_request_of_what_main_has_is_none(hub: HubServer, publish: Publish) -> None:
    head = hub.create(REPO, FILES)
    done = publish(target=Target(REPO, pr=True))
    assert done == Published(REPO, head, f"{hub.endpoint}/{REPO}", already=True)
    assert hub.pull_requests(REPO) == []


def test_a_pull_request_to_a_branch_is_refused() -> None:
    with pytest.raises(UsageError, match="a pull request goes to main"):
        Target(REPO, branch="x", pr=True)


# Other processes


SENDS = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from precconv.hub.publish import Target, publication_title, publisher
with publisher(Target("acme/model"), "1a2b3c4d5e6f7081") as p:
    if p.already is None:
        with ThreadPoolExecutor(4) as pool:
            operations = list(pool.map(lambda path: p.upload(path, path.name), Path("files").iterdir()))
        if "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        p.commit(operations, title=publication_title("org/name", "bf16"))
"""


def sends(hub: HubServer, tmp_path: Path, *args: str, xet: bool = False) -> int:
    (tmp_path / "files").mkdir(exist_ok=True)
    for name, data in FILES.items():
        (tmp_path / "files" / name).write_bytes(data)
    environment = hub.environment(tmp_path / "home", token=hub.tokens.write, xet=xet) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SENDS, *args]
    return subprocess.run(command, env=environment, cwd=tmp_path, timeout=HANG, check=False).returncode


@posix
def test_a_run_that_is_killed_before_its_commit_is_made_good_by_the_next(hub: HubServer, tmp_path: Path) -> None:
    assert sends(hub, tmp_path, "kill") == -9
    assert titles(hub) == ["initial commit"]
    sent = len(hub.seen("PUT"))
    assert [sends(hub, tmp_path), sends(hub, tmp_path)] == [0, 0]
    assert titles(hub) == [TITLE, "initial commit"]
    assert has(hub, FILES)
    assert (sent, len(hub.seen("PUT"))) == (2, 2)


def test_xet_is_used_where_it_is_on(hub: HubServer, tmp_path: Path) -> None:
    assert sends(hub, tmp_path, xet=True) == 0
    assert hub.seen("POST", "^/v1/shards")
    assert hub.seen("PUT") == []
    assert has(hub, FILES)
    assert titles(hub) == [TITLE, "initial commit"]


# Keys and titles


def test_a_key_stands_for_source_commit_options_and_version() -> None:
    key = publication_key("org/name", "c0ffee", {"to": "bf16", "keep": ["a"]}, version="1")
    assert key == publication_key("org/name", "c0ffee", {"keep": ["a"], "to": "bf16"}, version="1")
    others = [
        publication_key("org/other", "c0ffee", {"to": "bf16", "keep": ["a"]}, version="1"),
        publication_key("org/name", None, {"to": "bf16", "keep": ["a"]}, version="1"),
        publication_key("org/name", "c0ffee", {"to": "bf16"}, version="1"),
        publication_key("org/name", "c0ffee", {"to": "bf16", "keep": ["a"]}, version="2"),
    ]
    assert len({key, *others}) == 5
    assert len(key) == 16
    assert int(key, 16) >= 0


@pytest.mark.parametrize("source", [None, "/home/me/model", "..\\model", "./model", "a/b/c", "model"])
def test_a_title_names_a_repo_and_no_path(source: str | None) -> None:
    assert publication_title(source, "fp16") == f"Convert to fp16 (precconv {__version__})"
    assert publication_title("org/name", "bf16") == TITLE


def test_no_token_stands_in_a_commit(in_process: HubServer, waits: list[float]) -> None:
    hub, token = in_process, in_process.tokens.write
    with publisher(MAIN, KEY, token=token, sleep=waits.append) as p:
        p.commit([p.attach(b"1", "a.txt")], title=f"with {token}", description=f"and {token}")
    (last, _) = hub.commits(REPO)
    assert (last.title, last.description) == ("with [token]", f"and [token]\n\nprecconv-key: {KEY}")


def test_an_operation_can_be_committed_after_a_commit_that_failed(in_process: HubServer, waits: list[float]) -> None:
    hub = in_process
    hub.create(REPO)
    hub.fail(faults.refuse(refusals.storage_quota()), path="/commit/")
    with publisher(MAIN, KEY, token=hub.tokens.write, sleep=waits.append) as p:
        operations: list[CommitOperationAdd] = [p.attach(json.dumps({}).encode(), "config.json")]
        with pytest.raises(HubError):
            p.commit(operations, title=TITLE)
        p.commit(operations, title=TITLE)
    assert titles(hub) == [TITLE, "initial commit"]


def test_the_same_operations_can_be_committed_to_two_branches(
    in_process: HubServer, tmp_path: Path, waits: list[float]
) -> None:
    hub, files = in_process, {**shards(1), "config.json": b"{}"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    operations: list[CommitOperationAdd] = []
    first = hub.create(REPO)
    hub.repo(REPO).heads["two"] = first
    for target in (MAIN, Target(REPO, branch="two")):
        with publisher(target, KEY, token=hub.tokens.write, sleep=waits.append) as p:
            operations = operations or [p.upload(tmp_path / name, name) for name in files]
            assert not p.commit(operations, title=TITLE).already
    assert has(hub, files)
    assert has(hub, files, "two")
