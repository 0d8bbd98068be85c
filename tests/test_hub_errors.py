"""Every way in which the Hub says no, as one sentence with what to do; and what of a token gets out: nothing.

Against the tests' own Hub with the real client.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, errors, hf_hub_download

from precconv import HubError
from precconv.hub.client import client, history, quiet, scrubbed, translated
from precconv.hub.failures import hub_error
from precconv.hub.retries import TRIES, persistently

from .hub import faults, refusals
from .hub.patience import impatient
from .hub.refusals import Refused
from .hub.server import HubServer
from .processes import HANG

REPO = "acme/model"
#: What the client speaks HTTP with: httpx2, in 1.x httpx.
HTTP: Any = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
NAME = "model.safetensors"
WEIGHTS = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's own waits are not waited for."""
    return impatient(monkeypatch)


def failure(action: Callable[[], object], *, what: str | None = None, repo: str = REPO) -> HubError:
    with pytest.raises(HubError) as caught, translated(repo, what=what):
        action()
    assert caught.value.exit_code == 5
    assert caught.value.path == repo
    return caught.value


def info(*, token: str | bool = False, repo: str = REPO) -> HubError:
    return failure(lambda: client(token=token).model_info(repo), repo=repo)


def download(token: str | bool, *, name: str = NAME, revision: str | None = None) -> Callable[[], object]:
    return lambda: hf_hub_download(REPO, name, revision=revision, token=token)


# The sentences


def test_a_repo_that_is_not_there_is_one_that_may_be_private(in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO, private=True)
    for repo in (REPO, "acme/none"):
        error = info(repo=repo)
        assert (error.kind, str(error)) == (
            "not found",
            f"{repo}: there is no such repo, or it is private and no token was sent",
        )
        assert error.hint == "check the name; for a private repo log in with hf auth login, or set HF_TOKEN"
        error = info(token=hub.tokens.stranger, repo=repo)
        assert (error.kind, error.message) == (
            "not found",
            "there is no such repo, or the token's account may not see it",
        )
        assert error.hint == "check the name, and whose token it is: hf auth whoami"


def test_a_gated_repo_says_where_to_ask(in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO, {NAME: WEIGHTS}, gated=True)
    error = failure(download(hub.tokens.stranger))
    assert (error.kind, error.message) == ("gated", "is gated, and the token's account has not been let in")
    assert error.hint == f"ask for access at {hub.endpoint}/{REPO}"
    error = failure(download(False))
    assert (error.kind, error.message) == ("gated", "is gated, and no token was sent")
    assert error.hint is not None
    assert error.hint.startswith(f"ask for access at {hub.endpoint}/{REPO}, then log in with hf auth login")


def test_a_wrong_token_is_said_to_be_one(in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO)
    error = info(token=hub.tokens.wrong)
    assert (error.kind, error.message) == ("token", "the Hub does not accept the token")
    assert error.hint is not None
    assert error.hint.startswith(f"make a new one at {hub.endpoint}/settings/tokens")


@pytest.mark.parametrize(
    ("sent", "code", "kind"), [(True, "", "token"), (True, "RepoNotFound", "not found"), (False, "", "not found")]
)
def test_a_token_that_has_expired_is_no_missing_repo(sent: bool, code: str, kind: str) -> None:
    """The client says so of every 401 without a code, over https only."""
    headers = {"Authorization": "Bearer hf_testtokenwrite"} if sent else {}
    request = HTTP.Request("GET", "https://hub/api/models/acme/model", headers=headers)
    answer = HTTP.Response(401, headers={"X-Error-Code": code} if code else {}, request=request)
    error = hub_error(errors.RepositoryNotFoundError("x", response=answer), REPO)
    assert error is not None
    assert error.kind == kind


def test_what_needs_a_token_says_so(in_process: HubServer) -> None:
    in_process.create(REPO)
    for action in (lambda: client(token=False).create_repo(REPO), lambda: client(token=True).whoami()):
        error = failure(action)
        assert (error.kind, error.message) == ("token", "needs a token")


def test_a_file_and_a_revision_that_are_not_there_are_named(in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO, {NAME: WEIGHTS})
    error = failure(download(False, name="none.bin"), what="none.bin")
    assert (error.kind, str(error)) == ("file", f"{REPO}: none.bin: there is no such file")
    assert error.hint == f"{hub.endpoint}/{REPO}/tree/main lists them"
    error = failure(download(False, revision="v9"), what="revision 'v9'")
    assert (error.kind, error.message) == ("revision", "revision 'v9': there is no such branch, tag or commit")


def test_a_disabled_repo_says_so(in_process: HubServer) -> None:
    in_process.create(REPO)
    in_process.repo(REPO).disabled = True
    error = info()
    assert (error.kind, error.message) == ("disabled", "the Hub has disabled it")


def pushed(token: str) -> Callable[[], object]:
    addition = CommitOperationAdd(NAME, WEIGHTS)
    return lambda: client(token=token).create_commit(REPO, [addition], commit_message="weights")


def test_who_may_not_write_hears_it_in_the_hubs_words(in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO)
    error = failure(pushed(hub.tokens.read))
    assert (error.kind, error.message) == (
        "permission",
        "the token does not allow it: You don't have the required permissions to perform this operation",
    )
    assert error.hint == f"use a token that may write to acme: {hub.endpoint}/settings/tokens"
    error = failure(lambda: client(token=hub.tokens.stranger).create_repo("acme/new"))
    assert (error.kind, error.message) == (
        "permission",
        'the token does not allow it: You don\'t have the rights to create a model under the namespace "acme"',
    )


ANSWERS = {
    "quota": (
        refusals.storage_quota(),
        "quota",
        "the Hub has no room for it: Private repository storage limit reached, please upgrade your plan",
    ),
    "too large": (Refused(413, "Payload too large"), "quota", "the Hub has no room for it: Payload too large"),
    "unpaid": (Refused(402), "quota", "the Hub has no room for it"),
    "conflict": (refusals.conflict(), "conflict", "somebody else's commit came first"),
    "bad request": (
        Refused(400, "LFS pointer\tpointed to a file that does not exist."),
        "refused",
        "the Hub refused it (400): LFS pointer pointed to a file that does not exist",
    ),
    "taken": (Refused(409, "x" * 300), "refused", f"the Hub refused it (409): {'x' * 200}…"),
    "server": (Refused(500, "Internal Server Error"), "server", "the Hub failed (500)"),
    "server's request": (
        Refused(503, extra={"X-Request-Id": "Root=1-2"}),
        "server",
        "the Hub failed (503, request Root=1-2)",
    ),
    "rate": (refusals.rate_limited(seconds=55), "rate limit", "the Hub limits the rate of requests for another 55 s"),
    "rate, the old way": (
        refusals.rate_limited(seconds=7, header="Retry-After"),
        "rate limit",
        "the Hub limits the rate of requests for another 7 s",
    ),
    "rate by date": (
        Refused(429, extra={"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}),
        "rate limit",
        "the Hub limits the rate of requests for another 0 s",
    ),
    "rate, no time": (
        Refused(429, extra={"Retry-After": "soon"}),
        "rate limit",
        "the Hub limits the rate of requests",
    ),
    "no such token": (refusals.bad_token(), "token", "the Hub does not accept the token"),
    "expired token": (Refused(401, "User Access Token is expired"), "token", "the Hub does not accept the token"),
}


@pytest.mark.parametrize(("answer", "kind", "text"), [*ANSWERS.values()], ids=[*ANSWERS])
def test_an_answer_is_one_sentence(answer: Refused, kind: str, text: str, in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO)
    hub.fail(faults.refuse(answer), method="POST", path="/commit/")
    error = failure(pushed(hub.tokens.write))
    assert (error.kind, error.message) == (kind, text)
    assert "\n" not in f"{error}{error.hint}"
    assert error.is_passing is (kind in ("server", "rate limit", "conflict"))


def test_how_long_to_wait_is_a_number_too(in_process: HubServer) -> None:
    hub = in_process
    hub.fail(faults.rate_limited(seconds=55), path="/models/")
    assert info().wait == 55.0
    hub.fail(faults.status(502), path="/models/")
    assert info().wait is None


def test_a_failed_upload_of_an_object_is_said_as_what_it_was(in_process: HubServer, patient: list[float]) -> None:
    hub = in_process
    hub.create(REPO)
    hub.fail(faults.refuse(refusals.storage_quota()), method="PUT")
    assert failure(pushed(hub.tokens.write), what=NAME).message == (
        f"{NAME}: the Hub has no room for it: Private repository storage limit reached, please upgrade your plan"
    )
    hub.fail(faults.status(503), method="PUT", times=99)
    assert failure(pushed(hub.tokens.write)).kind == "server"
    assert len(patient) == 5


def test_a_model_card_that_is_refused_is_said_to_be_one(in_process: HubServer) -> None:
    hub = in_process
    hub.create(REPO)
    hub.fail(faults.refuse(Refused(400, "bad")), path="/validate-yaml")
    card = CommitOperationAdd("README.md", b"---\nlicense: [\n---\n")
    error = failure(lambda: client(token=hub.tokens.write).create_commit(REPO, [card], commit_message="card"))
    assert (error.kind, error.message) == ("refused", "the Hub refuses the model card's metadata")
    found = hub_error(ValueError('Invalid metadata in README.md.\n- "license" must be a string'), REPO)
    assert found is not None
    assert found.message == 'the Hub refuses the model card\'s metadata: - "license" must be a string'


# Nobody there


@pytest.mark.usefixtures("in_process")
def test_a_hub_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        error = info()
    assert (error.kind, error.message) == ("connection", f"the connection to {endpoint} failed")
    assert error.hint == "check the network, the proxy settings and HF_ENDPOINT; then try again"
    assert error.is_passing


def test_an_answer_that_is_cut_is_a_failed_connection(in_process: HubServer) -> None:
    in_process.create(REPO)
    in_process.fail(faults.lost(), path="/models/")
    assert info().message == f"the connection to {in_process.endpoint} failed"


def test_an_answer_that_does_not_come_in_time_is_said_to_be_late(in_process: HubServer) -> None:
    in_process.create(REPO)
    in_process.fail(faults.slow(1000), path="/models/")
    error = failure(lambda: client(token=False).model_info(REPO, timeout=0.05))
    assert (error.kind, error.message) == ("connection", f"{in_process.endpoint} did not answer in time")


def test_an_untrusted_certificate_is_said_to_be_one() -> None:
    error = hub_error(HTTP.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"), REPO)
    assert error is not None
    assert (error.kind, error.message.partition(" https")[0]) == ("connection", "the certificate of")
    assert "SSL_CERT_FILE" in str(error.hint)


def test_offline_and_not_cached_says_how_to_get_it(in_process: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process.create(REPO, {NAME: WEIGHTS})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from huggingface_hub import close_session

    close_session()
    for action in (download(False), lambda: client().model_info(REPO)):
        error = failure(action)
        assert (error.kind, error.message) == ("offline", "is not in the cache, and the client is offline")
        assert error.hint == "fetch it once with a connection, or unset HF_HUB_OFFLINE"
    assert in_process.requests == []


def test_the_cache_alone_is_asked_when_that_is_wanted(in_process: HubServer) -> None:
    in_process.create(REPO, {NAME: WEIGHTS})
    error = failure(lambda: hf_hub_download(REPO, NAME, local_files_only=True))
    assert (error.kind, error.message) == ("offline", "is not in the cache, and the Hub was not asked")


def test_a_download_without_a_connection_says_that_it_failed(in_process: HubServer) -> None:
    in_process.fail(faults.lost(), times=99)
    assert failure(download(False)).kind == "connection"


def test_a_name_that_is_none_is_refused_without_asking(in_process: HubServer) -> None:
    error = failure(lambda: client(token=False).model_info("a/b/c"), repo="a/b/c")
    assert (error.kind, error.message, error.hint) == (
        "refused",
        "is not a name that the Hub takes",
        "write it as org/name",
    )
    assert in_process.requests == []


XET = {
    401: ("token", "the Hub does not accept the token"),
    403: ("permission", "the storage refused it (403): the token may not write, or the quota is used"),
    404: ("not found", "there is no such repo, or the token's account may not see it"),
    429: ("rate limit", "the Hub limits the rate of requests"),
    500: ("server", "the Hub failed (500)"),
}
XET_SAYS = {
    401: "Network error: Request error: HTTP status client error (401 Unauthorized), domain: http://h/api",
    403: "Network error: Request error: HTTP status client error (403 Forbidden), domain: http://h/v1/xorbs",
    404: "Network error: Request error: HTTP status client error (404 Not Found), domain: http://h/api",
    429: "Rate limited: Request error: HTTP status client error (429 Too Many Requests), domain: http://h/api",
    500: "Server error: Request error: HTTP status server error (500 Internal Server Error), domain: http://h/api",
}


@pytest.mark.parametrize("status", [*XET])
def test_a_refusal_that_only_xet_heard_is_read_from_its_text(status: int) -> None:
    for cls in (ConnectionError, RuntimeError):
        error = hub_error(cls(XET_SAYS[status]), REPO)
        assert error is not None
        assert (error.kind, error.message) == XET[status]


REALLY = """
from precconv import HubError
from precconv.hub.client import client, translated
try:
    with translated("acme/model", what="model.safetensors"):
        client().upload_file(path_or_fileobj="w.bin", path_in_repo="model.safetensors", repo_id="acme/model")
except HubError as error:
    print(error.kind, error)
"""


def test_xet_really_says_it_so(hub: HubServer, tmp_path: Path) -> None:
    hub.create(REPO)
    (tmp_path / "w.bin").write_bytes(WEIGHTS)
    hub.fail(faults.refuse(refusals.storage_quota()), path="/xet-write-token/", times=9)
    environment = hub.environment(tmp_path / "home", token=hub.tokens.write)
    done = subprocess.run(
        [sys.executable, "-c", REALLY], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8",
        timeout=HANG, check=False,
    )  # fmt: skip
    said = "permission acme/model: model.safetensors: the storage refused it (403): the token may not write"
    assert done.stdout.startswith(said), done.stderr


# What is not the Hub's


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "no such file", "x"), ValueError("x"), RuntimeError("x"), KeyError("x")]
)
def test_other_errors_come_out_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, translated(REPO):
        raise error
    assert caught.value is error


# Tokens


@pytest.mark.parametrize(
    "token", ["hf_" + "aB3" * 11 + "x", "hf_oauth_abc.def-ghi", "hf_jwt_eyJ.a_b", "hf_testtokenwrite"]
)
def test_what_looks_like_a_token_is_taken_out(token: str) -> None:
    assert scrubbed(f"a {token}, b") == "a [token], b"
    assert scrubbed(f"Authorization: Bearer {token}") == "Authorization: Bearer [token]"


def test_a_token_is_taken_out_whatever_it_looks_like_and_names_are_left() -> None:
    assert scrubbed("a secret b", "secret", "") == "a [token] b"
    text = "hf_xet and hf_hub_download of acme/hf_modelwithalongname"
    assert scrubbed(text) == text


def everything(error: BaseException) -> str:
    """What a traceback, a log or a ledger could show of it, and of all that hangs on it."""
    chain: list[BaseException] = [error]
    while (more := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(more)
    texts = [f"{e!r} {e} {e.args} {vars(e)}" for e in chain]
    return "\n".join([*texts, *traceback.format_exception(error), str(pickle.dumps(error))])


@pytest.mark.parametrize("token", ["hf_testtokenwrite", "odd-token"])
def test_no_token_gets_out_even_when_the_hub_repeats_it(token: str, in_process: HubServer) -> None:
    in_process.fail(faults.refuse(Refused(400, f"what is {token}?")), path="/models/")
    error = info(token=token)
    assert error.message == "the Hub refused it (400): what is [token]?"
    assert token not in everything(error)
    assert error.__context__ is None


@pytest.mark.parametrize("token", ["hf_abcdefghijkl\nmno", "hf_abcdefghijklmnö"])
@pytest.mark.usefixtures("in_process")
def test_a_token_that_cannot_be_sent_is_not_shown(token: str) -> None:
    error = info(token=token)
    assert (error.kind, error.message) == (
        "token",
        "the token cannot be sent: it holds a character that no token has",
    )
    assert "abcdefghijkl" not in everything(error)


def test_a_token_given_as_a_repo_is_not_shown() -> None:
    token = "hf_" + "x" * 34
    error = hub_error(ConnectionError("x"), token, what=token)
    assert error is not None
    assert token not in everything(error)


def test_an_error_can_be_pickled_with_all_it_says() -> None:
    error = HubError("m", kind="rate limit", path=REPO, hint="h", wait=3.0)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.hint, again.wait) == (f"{REPO}: m", "rate limit", "h", 3.0)


# The client


def test_the_client_says_who_it_is() -> None:
    headers: Any = client()._build_hf_headers()
    assert headers["user-agent"].startswith("precconv/")


def test_history_is_read_no_further_than_it_is_asked_for(in_process: HubServer) -> None:
    in_process.create(REPO, {NAME: WEIGHTS}, private=True)
    api = client(token=in_process.tokens.read)
    assert [c["title"] for c in history(api, REPO, "main")] == ["change 1", "initial commit"]


def test_the_clients_own_talk_is_off_inside_and_as_before_outside(
    in_process: HubServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = in_process
    hub.create(REPO)
    hub.fail(faults.status(503), path="/preupload/")
    with quiet():
        pushed(hub.tokens.write)()
        warnings.warn_explicit("a card without a licence", UserWarning, "hf_api.py", 1, module="huggingface_hub.hf_api")
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    hub.fail(faults.status(503), path="/preupload/")
    client(token=hub.tokens.write).upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id=REPO)
    assert "503" in caplog.text


# Going on


def failing(left: list[HubError]) -> Callable[[], str]:
    def action() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return action


def test_what_passes_is_waited_for_longer_and_longer() -> None:
    waits: list[float] = []
    found = [HubError("x", kind="server")] * (TRIES - 1)
    assert persistently(failing([*found]), sleep=waits.append) == "done"
    assert waits == [1, 2, 4, 8, 16, 32, 60]
    with pytest.raises(HubError):
        persistently(failing([*found, *found]), sleep=waits.append)
    assert len(waits) == 14


def test_a_wait_that_the_hub_asks_for_is_kept_but_not_any() -> None:
    waits: list[float] = []
    assert persistently(failing([HubError("x", kind="rate limit", wait=300)]), sleep=waits.append) == "done"
    assert waits == [301]
    with pytest.raises(HubError):
        persistently(failing([HubError("x", kind="rate limit", wait=3600)]), sleep=waits.append)
    assert waits == [301]


def test_what_does_not_pass_is_raised_at_once() -> None:
    with pytest.raises(HubError):
        persistently(failing([HubError("x", kind="permission")]), sleep=lambda _: pytest.fail("waited"))


@pytest.mark.parametrize("state", ["none", "closed"])
def test_a_session_that_another_thread_has_just_closed_is_a_failed_connection(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """What ``close_session`` leaves for whoever has asked for the session at that moment."""
    session = HTTP.Client()
    session.close()
    found = None if state == "none" else session
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", lambda: found)
    error = failure(lambda: client().model_info(REPO))
    assert (error.kind, error.is_passing) == ("connection", True)
    assert hub.seen("GET") == []


def test_an_error_of_our_own_is_not_the_clients() -> None:
    with pytest.raises(AttributeError), translated(REPO):
        None.request()  # type: ignore[attr-defined]
