"""What goes wrong on purpose: an effect on the next requests that a rule fits.

An effect is plain data; ``server`` carries it out.  A test says ``hub.fail(faults.cut(1000), path="/objects/")``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from . import refusals
from .refusals import Refused


@dataclass(frozen=True, slots=True)
class Effect:
    """In the order in which they happen; see the functions below."""

    first: Callable[[], object] | None = None
    wait: float = 0.0
    outage: float = 0.0
    applied: bool = True
    then: Callable[[], object] | None = None
    answer: Refused | None = None
    silent: bool = False
    cut: int | None = None


def refuse(error: Refused) -> Effect:
    """Answer with this, and do nothing."""
    return Effect(applied=False, answer=error)


def status(code: int) -> Effect:
    """A failure of the server's (500, 502, 503), which does nothing."""
    return refuse(Refused(code, "Internal Server Error"))


def rate_limited(*, seconds: int = 0, header: str = "RateLimit") -> Effect:
    """429; the client waits one second more than it is told to."""
    return refuse(refusals.rate_limited(seconds=seconds, header=header))


def lost(code: int | None = None) -> Effect:
    """Do what was asked, then answer with a failure, or cut the connection instead of answering."""
    return Effect(answer=Refused(code, "Internal Server Error") if code else None, silent=code is None)


def cut(after: int) -> Effect:
    """Cut the connection after this many bytes of the answer's body."""
    return Effect(cut=after)


def slow(seconds: float) -> Effect:
    """Answer this much later."""
    return Effect(wait=seconds)


def outage(seconds: float) -> Effect:
    """Cut every connection and listen again, on the same ports, after this time; connecting is refused until then."""
    return Effect(outage=seconds)


def before(action: Callable[[], object]) -> Effect:
    """Let something else happen first: somebody's commit, a rename."""
    return Effect(first=action)


def after(action: Callable[[], object]) -> Effect:
    """Let something else happen when it is done and not yet answered: the client is killed."""
    return Effect(then=action, silent=True)


@dataclass(slots=True)
class Rule:
    """An effect on the next ``left`` requests with this method and a path in which the expression is found."""

    effect: Effect
    method: str
    path: re.Pattern[str]
    left: int

    def fits(self, method: str, target: str) -> bool:
        return self.left > 0 and self.method in ("", method) and self.path.search(target) is not None


@dataclass(slots=True)
class Rules:
    rules: list[Rule] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, target: str) -> Effect | None:
        """The effect on this request, of the oldest rule that fits and has any left."""
        with self.lock:
            for rule in self.rules:
                if rule.fits(method, target):
                    rule.left -= 1
                    return rule.effect
        return None
