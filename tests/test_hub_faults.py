"""Everything that the tests' own Hub can break, once, with the real client on the other side; how it ends."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, get_session, hf_hub_download
from huggingface_hub import errors as hf

from .hub import faults, refusals
from .hub.server import HubServer
from .processes import HANG

REPO = "acme/model"
WEIGHTS = bytes(range(256)) * 100
NAME = "model.safetensors"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's waits before it tries again, which are not waited for."""
    asked: list[float] = []

    class Impatient:
        sleep = staticmethod(asked.append)
        time = staticmethod(time.time)

    monkeypatch.setattr("huggingface_hub.utils._http.time", Impatient)
    monkeypatch.setattr("huggingface_hub.file_download.time", Impatient)
    return asked


def push(api: HfApi, *, parent: str | None = None) -> str:
    addition = CommitOperationAdd(NAME, WEIGHTS)
    return api.create_commit(REPO, [addition], commit_message="weights", parent_commit=parent).oid


def statuses(hub: HubServer, path: str) -> list[int]:
    return [e.status for e in hub.seen(path=path)]


# What the client gets over by itself


@pytest.mark.parametrize("header", ["RateLimit", "Retry-After"])
def test_a_rate_limit_is_waited_for(header: str, hub: HubServer, in_process: HubServer, waits: list[float]) -> None:
    in_process.create(REPO, {NAME: WEIGHTS})
    rule = hub.fail(faults.rate_limited(seconds=7, header=header), method="GET", path="^/objects/")
    assert Path(hf_hub_download(REPO, NAME)).read_bytes() == WEIGHTS
    assert (rule.left, waits) == (0, [8.0])
    assert statuses(hub, "^/objects/") == [429, 200]


@pytest.mark.parametrize("code", [500, 502, 503])
def test_a_failure_of_the_servers_is_tried_again(code: int, hub: HubServer, hub_api: HfApi, waits: list[float]) -> None:
    hub.create(REPO)
    hub.fail(faults.status(code), method="POST", path="/preupload/", times=2)
    push(hub_api)
    assert statuses(hub, "/preupload/") == [code, code, 200]
    assert waits == [1.0, 2.0]
    assert hub.read(REPO, NAME) == WEIGHTS


def test_a_failed_upload_of_an_object_is_tried_again(hub: HubServer, hub_api: HfApi, waits: list[float]) -> None:
    hub.create(REPO)
    hub.fail(faults.status(503), method="PUT")
    push(hub_api)
    assert [e.status for e in hub.seen("PUT")] == [503, 200]
    assert len(waits) == 1
    assert hub.read(REPO, NAME) == WEIGHTS


def test_a_download_that_is_cut_goes_on_where_the_client_has_the_rest(
    hub: HubServer, in_process: HubServer, waits: list[float]
) -> None:
    data = WEIGHTS * 450  # the client keeps pieces of 10 MiB
    in_process.create(REPO, {NAME: data})
    hub.fail(faults.cut(11_000_000), method="GET", path="^/objects/")
    assert Path(hf_hub_download(REPO, NAME)).read_bytes() == data
    first, second = hub.seen("GET", "^/objects/")
    assert (first.sent, first.range) == (11_000_000, "")
    assert (second.status, second.range) == (206, "bytes=10485760-")
    assert first.sent + second.sent == 11_000_000 + len(data) - 10485760
    assert waits == [1]


def test_an_outage_refuses_connections_and_is_over_on_the_same_port(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    hub.fail(faults.outage(0.2), method="POST", path="/preupload/")
    push(hub_api)  # tries again after a second
    assert statuses(hub, "/preupload/") == [0, 200]
    assert hub.read(REPO, NAME) == WEIGHTS


# What it leaves to the caller


def test_a_commit_is_not_tried_again(hub: HubServer, hub_api: HfApi, waits: list[float]) -> None:
    hub.create(REPO)
    hub.fail(faults.rate_limited(seconds=1), path="/commit/")
    with pytest.raises(hf.HfHubHTTPError, match="rate limit") as caught:
        push(hub_api)
    assert caught.value.response.status_code == 429
    assert (waits, len(hub.commits(REPO))) == ([], 1)


@pytest.mark.parametrize("code", [500, None], ids=["a failure", "nothing"])
def test_a_commit_may_land_and_be_answered_with(code: int | None, hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    hub.fail(faults.lost(code), method="POST", path="/commit/")
    with pytest.raises(Exception, match="500 Internal Server Error" if code else "disconnected") as caught:
        push(hub_api)
    assert isinstance(caught.value, hf.HfHubHTTPError) is (code is not None)
    assert statuses(hub, "/commit/") == [code or 0]
    assert hub.commits(REPO)[0].title == "weights"
    assert hub.read(REPO, NAME) == WEIGHTS


def test_somebody_elses_commit_may_come_just_before(hub: HubServer, hub_api: HfApi) -> None:
    parent = hub.create(REPO)
    hub.fail(faults.before(lambda: hub.commit(REPO, {"theirs.txt": b"1"})), method="POST", path="/commit/")
    with pytest.raises(hf.HfHubHTTPError, match="A commit has happened since") as caught:
        push(hub_api, parent=parent)
    assert caught.value.response.status_code == 412
    assert [c.author for c in hub.commits(REPO)] == ["somebody-else", "tester"]
    push(hub_api, parent=hub.commits(REPO)[0].oid)
    assert hub.files(REPO) == [".gitattributes", NAME, "theirs.txt"]


REFUSALS = {
    "conflict": (refusals.conflict(), hf.HfHubHTTPError, "A commit has happened since"),
    "storage": (refusals.storage_quota(), hf.HfHubHTTPError, "storage limit reached"),
    "wrong token": (refusals.bad_token(), hf.HfHubHTTPError, "Invalid credentials"),
    "gated": (refusals.gated(REPO, signed_in=True), hf.GatedRepoError, "not in the authorized list"),
    "no repo": (refusals.repo_not_found(signed_in=True), hf.RepositoryNotFoundError, "Repository Not Found"),
    "no permission": (refusals.no_write_permission(), hf.HfHubHTTPError, "required permissions"),
    "no revision": (refusals.revision_not_found("main"), hf.RevisionNotFoundError, "Revision Not Found"),
    "no file": (refusals.entry_not_found(NAME), hf.RemoteEntryNotFoundError, "Entry Not Found"),
    "disabled": (refusals.disabled(), hf.DisabledRepoError, "Access to this resource is disabled"),
}


@pytest.mark.parametrize(("refusal", "error", "text"), [*REFUSALS.values()], ids=[*REFUSALS])
def test_a_commit_can_be_refused_in_any_of_the_hubs_words(
    refusal: refusals.Refused, error: type[hf.HfHubHTTPError], text: str, hub: HubServer, hub_api: HfApi
) -> None:
    hub.create(REPO)
    hub.fail(faults.refuse(refusal), method="POST", path="/commit/")
    with pytest.raises(error, match=text) as caught:
        push(hub_api)
    assert caught.value.response.status_code == refusal.status
    assert len(hub.commits(REPO)) == 1


def test_a_slow_answer_comes_late(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO)
    hub.fail(faults.slow(0.2), path="/models/")
    start = time.monotonic()
    assert hub_api.model_info(REPO).id == REPO
    assert time.monotonic() - start >= 0.2


def test_a_client_that_has_the_file_gives_a_slow_answer_up(hub: HubServer, in_process: HubServer) -> None:
    in_process.create(REPO, {NAME: WEIGHTS})
    path = hf_hub_download(REPO, NAME)
    hub.commit(REPO, {NAME: b"new"})
    hub.fail(faults.slow(1000), method="HEAD")
    assert hf_hub_download(REPO, NAME, etag_timeout=0.2) == path
    assert hub.bytes_of_weights() == len(WEIGHTS)


# Rules


def test_a_rule_is_for_its_method_path_and_number_only(hub: HubServer, hub_api: HfApi) -> None:
    hub.create(REPO, {NAME: WEIGHTS})
    posts = hub.fail(faults.status(500), method="POST", path="/tree/")
    trees = hub.fail(faults.refuse(refusals.disabled()), path="/tree/")
    assert hub_api.model_info(REPO).id == REPO
    with pytest.raises(hf.DisabledRepoError):
        list(hub_api.list_repo_tree(REPO))
    assert [f.path for f in hub_api.list_repo_tree(REPO)] == [".gitattributes", NAME]
    assert (posts.left, trees.left) == (1, 0)


# The server itself


def reachable(origin: str) -> bool:
    parts = urlsplit(origin)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=5).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    return True


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"


def test_nothing_of_a_server_is_left_when_it_has_ended(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with HubServer(tmp_path) as hub:
        assert reachable(hub.endpoint)
        assert reachable(hub.site.storage)
        idle = http.client.HTTPConnection(urlsplit(hub.endpoint).netloc)
        idle.request("GET", "/")
        idle.getresponse().read()
        assert idle.sock is not None
    assert idle.sock.recv(1) == b""
    idle.close()
    assert not reachable(hub.endpoint)
    assert not reachable(hub.site.storage)
    assert set(threading.enumerate()) == before


def test_a_server_ends_at_once_in_the_middle_of_an_outage_or_a_slow_answer(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with HubServer(tmp_path) as hub, socket.socket() as slow, socket.socket() as last:
        parts = urlsplit(hub.endpoint)
        rule = hub.fail(faults.slow(1000), path="slow")
        hub.fail(faults.outage(1000), path="last")
        slow.connect((parts.hostname, parts.port))
        slow.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        eventually(lambda: not rule.left)
        last.connect((parts.hostname, parts.port))
        last.sendall(b"GET /last HTTP/1.1\r\n\r\n")
        eventually(lambda: not reachable(hub.endpoint))
    assert set(threading.enumerate()) == before


def test_a_mistake_of_the_servers_own_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="title"), HubServer(tmp_path) as hub:  # noqa: PT012  (it is raised at the end)
        hub.create(REPO)
        api = HfApi(endpoint=hub.endpoint, token=hub.tokens.write)
        url = f"{api.endpoint}/api/models/{REPO}/discussions"
        with pytest.raises(Exception, match="disconnected"):
            get_session().post(url, json={}, headers={"Authorization": f"Bearer {hub.tokens.write}"})


def test_an_unknown_address_is_said_to_be_one(hub: HubServer, in_process: HubServer) -> None:
    answer = get_session().get(f"{in_process.endpoint}/api/nothing")
    assert (answer.status_code, answer.json()["error"]) == (404, "the test Hub has no route for GET /api/nothing")
    assert [(e.method, e.path, e.status) for e in hub.requests] == [("GET", "/api/nothing", 404)]


def test_the_environment_of_a_process_has_this_hub_only(hub: HubServer, tmp_path: Path) -> None:
    base = {"PATH": "/bin", "https_proxy": "http://proxy", "HF_TOKEN": "mine", "HF_HUB_OFFLINE": "1"}
    found = hub.environment(tmp_path, base=base)
    assert found["HF_ENDPOINT"] == hub.endpoint
    assert found["HF_HOME"] == os.fspath(tmp_path)
    assert set(found) & {*base, "HF_HUB_DISABLE_XET"} == {"PATH"}
    assert hub.environment(tmp_path, token="t", xet=False)["HF_TOKEN"] == "t"
    assert hub.environment(tmp_path, token="t", xet=False)["HF_HUB_DISABLE_XET"] == "1"
