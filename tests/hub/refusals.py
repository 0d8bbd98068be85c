"""How the Hub says no: a status, a code and a sentence.

The client picks its exception from ``X-Error-Code`` and ``X-Error-Message``, hardly ever from the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class Refused(Exception):  # noqa: N818  (an answer, not a mistake of the server's)
    """Raised by a route, or put in its place by a fault."""

    status: int
    message: str = ""
    code: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        named = {"X-Error-Code": self.code, "X-Error-Message": self.message}
        return {**{name: text for name, text in named.items() if text}, **self.extra}


def moved(location: str) -> Refused:
    """A renamed repo: the client asks again at ``location``, a path on the same server, with the same method."""
    return Refused(307, f"Temporary Redirect. Redirecting to {location}", extra={"Location": location})


def repo_not_found(*, signed_in: bool) -> Refused:
    """Missing, or private and not yours: the Hub gives the same answer to both."""
    return Refused(404 if signed_in else 401, "Repository not found", "RepoNotFound")


def revision_not_found(revision: str) -> Refused:
    return Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def entry_not_found(path: str, *, commit: str = "") -> Refused:
    return Refused(404, f"Entry not found: {path}", "EntryNotFound", {"X-Repo-Commit": commit} if commit else {})


def gated(repo_id: str, *, signed_in: bool) -> Refused:
    text = f"Access to model {repo_id} is restricted and you are not in the authorized list."
    return Refused(403 if signed_in else 401, text, "GatedRepo")


def disabled() -> Refused:
    return Refused(403, "Access to this resource is disabled.")


def bad_token() -> Refused:
    return Refused(401, "Invalid credentials in Authorization header")


def not_signed_in() -> Refused:
    return Refused(401, "Invalid username or password.")


def no_write_permission() -> Refused:
    return Refused(403, "You don't have the required permissions to perform this operation")


def no_right_to_create(namespace: str) -> Refused:
    return Refused(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')


def conflict() -> Refused:
    """Somebody else's commit came first."""
    return Refused(412, "A commit has happened since. Please refresh and try again.")


def storage_quota() -> Refused:
    """The sentence is the one in huggingface_hub issue 3049."""
    return Refused(403, "Private repository storage limit reached, please upgrade your plan.")


def rate_limited(*, seconds: int = 0, header: str = "RateLimit") -> Refused:
    """Too many requests; ``header`` is how the time to wait is said, ``RateLimit`` (today) or ``Retry-After``."""
    today = {"RateLimit": f'"api";r=0;t={seconds}', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'}
    said = today if header == "RateLimit" else {"Retry-After": str(seconds)}
    text = "We had to rate limit you, you hit the quota of 1000 api requests per 5 minutes period."
    return Refused(429, text, extra=said)
