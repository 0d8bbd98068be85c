"""Who the tokens belong to, and what they may do.

A token has a role of its own: with a read token its owner can't write even to their own repos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from . import refusals
from .store import Repo

Role = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Account:
    """A user, the role of one of their tokens, and their roles in organisations."""

    name: str
    role: Role
    orgs: Mapping[str, Role]


@dataclass(frozen=True, slots=True)
class Tokens:
    """``write`` and ``read`` are the tokens of ``tester``, who may write to the organisation ``acme``.

    ``guest`` is a write token of ``guest``, who is a member of ``acme`` and may only read there.
    ``stranger`` is a write token of somebody who is no member.  Nobody has ``wrong``; ``none`` is to send no token.
    """

    write: str = "hf_testtokenwrite"
    read: str = "hf_testtokenread"
    guest: str = "hf_testtokenguest"
    stranger: str = "hf_testtokenstranger"
    wrong: str = "hf_testtokenwrong"
    none: Literal[False] = False


TOKENS = Tokens()
_ACCOUNTS: Mapping[str, Account] = {
    TOKENS.write: Account("tester", "write", {"acme": "write"}),
    TOKENS.read: Account("tester", "read", {"acme": "write"}),
    TOKENS.guest: Account("guest", "write", {"acme": "read"}),
    TOKENS.stranger: Account("stranger", "write", {}),
}


def account(headers: Mapping[str, str]) -> Account | None:
    """Whose request it is; None without a token.  A token that nobody has is refused."""
    sent = headers.get("Authorization") or ""
    if not sent:
        return None
    found = _ACCOUNTS.get(sent.removeprefix("Bearer "))
    if found is None:
        raise refusals.bad_token()
    return found


def signed_in(headers: Mapping[str, str]) -> Account:
    found = account(headers)
    if found is None:
        raise refusals.not_signed_in()
    return found


def is_member(who: Account | None, namespace: str) -> bool:
    return who is not None and (namespace == who.name or namespace in who.orgs)


def may_write(who: Account | None, namespace: str) -> bool:
    if who is None or who.role != "write":
        return False
    return namespace == who.name or who.orgs.get(namespace) == "write"


def may_see(who: Account | None, repo: Repo) -> bool:
    return not repo.private or is_member(who, repo.namespace)


def may_read(who: Account | None, repo: Repo) -> bool:
    """A gated repo can be seen by all, its files only by members and those let in."""
    return not repo.gated or is_member(who, repo.namespace) or (who is not None and who.name in repo.allowed)
