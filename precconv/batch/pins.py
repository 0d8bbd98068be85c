"""References to the Hub, resolved once for a whole batch: every job of one is about the commit that was there then."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ..errors import InputError, PrecconvError
from ..hub.refs import Ref, parse_ref
from ..hub.source import find

__all__ = ["Pin", "pin_all", "reference"]

#: Repos asked for side by side.
_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Pin:
    """A reference as it is now; ``commit`` is None for one that the Hub does not give: its job will say why."""

    ref: Ref
    repo: str  #: as the Hub calls it now
    commit: str | None

    @property
    def source(self) -> str:
        """The reference for ``convert``, with the commit in it."""
        return str(self.ref if self.commit is None else replace(self.ref, repo=self.repo, revision=self.commit))


def pin_all(sources: Iterable[str]) -> dict[str, Pin]:
    """The references among ``sources``, pinned; local paths are not in it."""
    refs = {source: ref for source in dict.fromkeys(sources) if (ref := reference(source)) is not None}
    if not refs:
        return {}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return dict(zip(refs, pool.map(_pin, refs.values()), strict=True))


def reference(source: str) -> Ref | None:
    """The reference that a source is, None for a path and for what is neither."""
    try:
        return parse_ref(source)
    except InputError:
        return None


def _pin(ref: Ref) -> Pin:
    try:
        found = find(ref)
    except PrecconvError:
        return Pin(ref, ref.repo, None)
    return Pin(ref, found.id, found.commit)
