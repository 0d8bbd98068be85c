"""What the Hub's client raises, as one sentence and what to do.

Nothing is imported to recognise an exception: what raised it is loaded.  Its own text goes no further, because it may
hold a token or a signed address; of the Hub's words only its sentence is kept, without what looks like a token.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import HubError, HubKind

__all__ = ["OFFLINE", "OFFLINE_HINT", "hub_error", "scrubbed", "translated"]

OFFLINE = "is not in the cache, and the client is offline"
OFFLINE_HINT = "fetch it once with a connection, or unset HF_HUB_OFFLINE"

_HTTP = ("httpx", "httpx2", "requests")  # the client's, by its version: 1.x, 2.x, 0.x
#: Of the client's errors those that are no OSError or ValueError in every version.
_OF_CLIENT = ("EntryNotFoundError", "RevisionResolutionError", "XetDownloadError")
_TOKEN = re.compile(r"(?<!/)hf_(?:(?:oauth|jwt|app)_[\w.-]+|[A-Za-z0-9]{12,})|(?<=[Bb]earer )[^\s'\"]+")
#: How Xet's Rust side says a status; it has no other exception than ConnectionError (hf_xet 1.8).
_XET_STATUS = re.compile(r"\((\d{3}) [A-Z][A-Za-z -]+\)")
_RATE = re.compile(r"r=0;\s*t=(\d+)")
_ROOM = re.compile("storage|quota|limit|upgrade|too large|payment", re.IGNORECASE)
_CARD = "Invalid metadata in README.md"  #: how the client begins what the Hub says of a card before a commit
_LONGEST = 200  #: characters of the Hub's sentence


@contextmanager
def translated(repo: str, *, what: str | None = None) -> Iterator[None]:
    """What the client raises inside comes out as HubError; ``what`` (a file, a revision) stands before the sentence.

    Anything else, the local file system's errors among it, comes out as it is.
    """
    try:
        yield
    except _foreign() as e:
        found = hub_error(e, repo, what=what)
        if found is None:
            raise
        try:
            raise found from None
        finally:
            found.__context__ = None  # its headers and texts may hold the token


def _foreign() -> tuple[type[BaseException], ...]:
    """Every class that may be the client's, looked up when something has been raised."""
    errors = sys.modules.get("huggingface_hub.errors")
    of_client = [getattr(errors, name) for name in _OF_CLIENT if hasattr(errors, name)]
    of_http = [sys.modules[name].HTTPError for name in _HTTP if hasattr(sys.modules.get(name), "HTTPError")]
    return (OSError, RuntimeError, ValueError, AttributeError, *of_client, *of_http)


def scrubbed(text: str, *secrets: str) -> str:
    """The text without these secrets and without anything that looks like a token of the Hub's."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "[token]")
    return _TOKEN.sub("[token]", text)


def hub_error(error: BaseException, repo: str, *, what: str | None = None) -> HubError | None:
    """The sentence for an exception of the client's, None for one that is not."""
    about = _About(repo, _endpoint())
    said = next((s for e in _chain(error) if (s := _said(e, about)) is not None), None)
    if said is None and _is_a(error, "LocalEntryNotFoundError", "RevisionResolutionError"):
        said = _Said("offline", "is not in the cache, and the Hub was not asked", "fetch it once with a connection")
    if said is None:
        return None
    message = said.text if what is None else f"{what}: {said.text}"
    hint = scrubbed(said.hint) if said.hint else None
    return HubError(scrubbed(message), kind=said.kind, path=scrubbed(repo), hint=hint, wait=said.wait)


@dataclass(frozen=True, slots=True)
class _About:
    repo: str
    endpoint: str

    @property
    def page(self) -> str:
        return f"{self.endpoint}/{self.repo}"

    @property
    def tokens(self) -> str:
        return f"{self.endpoint}/settings/tokens"


@dataclass(frozen=True, slots=True)
class _Said:
    kind: HubKind
    text: str
    hint: str | None = None
    wait: float | None = None


def _endpoint() -> str:
    constants = sys.modules.get("huggingface_hub.constants")
    return str(getattr(constants, "ENDPOINT", "https://huggingface.co"))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The client wraps a failed upload in RuntimeError and a missing file in LocalEntryNotFoundError."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_a(error: BaseException, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(error).__mro__)


def _said(error: BaseException, about: _About) -> _Said | None:
    if _is_a(error, "HfHubHTTPError"):
        return _answered(error, about)
    if _is_a(error, "OfflineModeIsEnabled"):
        return _Said("offline", OFFLINE, OFFLINE_HINT)
    if _is_a(error, "LocalTokenNotFoundError"):
        return _wants_token(about)
    if _is_a(error, "HFValidationError"):
        return _Said("refused", "is not a name that the Hub takes", "write it as org/name")
    if _is_a(error, "LocalProtocolError") or (isinstance(error, UnicodeEncodeError) and "earer" in str(error.object)):
        hint = f"copy it again from {about.tokens}"
        return _Said("token", "the token cannot be sent: it holds a character that no token has", hint)
    if isinstance(error, ValueError) and str(error).startswith(_CARD):
        said = scrubbed(_plain(str(error).removeprefix(_CARD).lstrip(".")))
        return _Said("refused", f"the Hub refuses the model card's metadata{_after_colon(said)}", "mend README.md")
    if isinstance(error, ConnectionError | RuntimeError) and (status := _XET_STATUS.search(str(error))):
        return _stored(int(status[1]), about)
    return _unreached(error, about)


# Answers


def _answered(error: Any, about: _About) -> _Said:
    """For an exception with the Hub's answer."""
    response, sent = error.response, _token_sent(error.response)
    status, said = int(response.status_code), _sentence(error, sent)
    if _is_a(error, "GatedRepoError"):
        return _gated(about, sent=bool(sent))
    if _is_a(error, "DisabledRepoError"):
        return _Said("disabled", "the Hub has disabled it", f"see {about.page}")
    if _is_a(error, "RevisionNotFoundError"):
        return _Said("revision", "there is no such branch, tag or commit", f"{about.page}/commits/main lists them")
    if _is_a(error, "EntryNotFoundError"):
        return _Said("file", "there is no such file", f"{about.page}/tree/main lists them")
    if _is_a(error, "RepositoryNotFoundError") and (
        status != 401 or not sent or response.headers.get("X-Error-Code") == "RepoNotFound"
    ):
        return _missing(sent=bool(sent))
    if status in (402, 403, 413) and (status != 403 or _ROOM.search(said)):
        hint = f"make room or change the plan at {about.endpoint}/settings/billing, or push to another account"
        return _Said("quota", f"the Hub has no room for it{_after_colon(said)}", hint)
    return _by_status(status, said, about, response.headers, token=bool(sent))


def _by_status(status: int, said: str, about: _About, headers: Mapping[str, str], *, token: bool) -> _Said:
    if status == 401:
        return _unknown_token(about) if token else _wants_token(about)
    if status == 403:
        hint = f"use a token that may write to {about.repo.split('/')[0]}: {about.tokens}"
        return _Said("permission", f"the token does not allow it{_after_colon(said)}", hint)
    if status == 412:
        return _Said("conflict", "somebody else's commit came first", "run the same command again")
    if status == 429:
        wait = _wait(headers)
        long = "" if wait is None else f" for another {wait:.0f} s"
        return _Said("rate limit", f"the Hub limits the rate of requests{long}", "wait, or use fewer workers", wait)
    if status == 408 or status >= 500:
        request = headers.get("X-Request-Id")
        text = f"the Hub failed ({status}{f', request {_plain(request)}' if request else ''})"
        return _Said("server", text, "try again later", _wait(headers))
    return _Said("refused", f"the Hub refused it ({status}){_after_colon(said)}")


def _missing(*, sent: bool) -> _Said:
    if sent:
        text = "there is no such repo, or the token's account may not see it"
        return _Said("not found", text, "check the name, and whose token it is: hf auth whoami")
    text = "there is no such repo, or it is private and no token was sent"
    return _Said("not found", text, "check the name; for a private repo log in with hf auth login, or set HF_TOKEN")


def _gated(about: _About, *, sent: bool) -> _Said:
    if sent:
        text = "is gated, and the token's account has not been let in"
        return _Said("gated", text, f"ask for access at {about.page}")
    hint = f"ask for access at {about.page}, then log in with hf auth login, or set HF_TOKEN"
    return _Said("gated", "is gated, and no token was sent", hint)


def _unknown_token(about: _About) -> _Said:
    hint = f"make a new one at {about.tokens}, then log in with hf auth login, or set HF_TOKEN"
    return _Said("token", "the Hub does not accept the token", hint)


def _wants_token(about: _About) -> _Said:
    return _Said(
        "token", "needs a token", f"make one at {about.tokens}, then log in with hf auth login, or set HF_TOKEN"
    )


def _token_sent(response: Any) -> str:
    """The token that the request went with, empty for none."""
    request = getattr(response, "request", None)
    sent = "" if request is None else request.headers.get("Authorization") or ""
    return str(sent).removeprefix("Bearer ")


def _sentence(error: Any, token: str) -> str:
    """The Hub's own words, on one line."""
    said = error.response.headers.get("X-Error-Message") or getattr(error, "server_message", None) or ""
    return scrubbed(_plain(str(said)), token).rstrip(".")


def _plain(text: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _after_colon(said: str) -> str:
    return f": {said}" if said else ""


def _wait(headers: Mapping[str, str]) -> float | None:
    """Seconds until the next request has a chance, as the Hub says it today or as RFC 9110, section 10.2.3, does."""
    if (rate := _RATE.search(headers.get("RateLimit") or "")) is not None:
        return float(rate[1])
    said = (headers.get("Retry-After") or "").strip()
    if said.isdecimal():
        return float(said)
    from email.utils import parsedate_to_datetime  # as ssl, a hundredth of a second that no local work needs

    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return None


# No answer, or one that only Xet heard


def _stored(status: int, about: _About) -> _Said:
    if status == 403:
        hint = f"see {about.tokens} and {about.endpoint}/settings/billing"
        return _Said("permission", "the storage refused it (403): the token may not write, or the quota is used", hint)
    if status == 404:
        return _missing(sent=True)
    return _by_status(status, "", about, {}, token=True)


def _unreached(error: BaseException, about: _About) -> _Said | None:
    of_http = type(error).__module__.partition(".")[0] in _HTTP or _has_lost_client(error)
    if not of_http and not (isinstance(error, ConnectionError | TimeoutError) or _is_a(error, "SSLError", "gaierror")):
        return None
    if "CERTIFICATE_VERIFY" in str(error) or _is_a(error, "SSLError"):
        hint = "if a proxy is between, let SSL_CERT_FILE name its certificate authority"
        return _Said("connection", f"the certificate of {about.endpoint} is not trusted", hint)
    hint = "check the network, the proxy settings and HF_ENDPOINT; then try again"
    if isinstance(error, TimeoutError) or _is_a(error, "TimeoutException", "Timeout"):
        return _Said("connection", f"{about.endpoint} did not answer in time", hint)
    return _Said("connection", f"the connection to {about.endpoint} failed", hint)


def _has_lost_client(error: BaseException) -> bool:
    """All threads share the client's session, which one whose connection failed closes under the others.

    They find none (``get_session`` of huggingface_hub 2.4 looks for it twice), or a closed one.
    """
    if isinstance(error, RuntimeError):
        return str(error) == "Cannot send a request, as the client has been closed."
    if not isinstance(error, AttributeError) or error.obj is not None:
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).startswith("huggingface_hub.")
