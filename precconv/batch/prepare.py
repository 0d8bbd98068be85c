"""From entries to jobs: options put together and checked, outputs named, what is there twice taken once.

Whatever is wrong with the request itself is raised here, before any work.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import PrecconvError, UsageError
from ..request import Request, request_of
from .jobs import Job
from .lists import Entry
from .options import check_options
from .outputs import check_places, check_template, output_place
from .sources import identity, resolved

__all__ = ["Batch", "Planned", "prepare"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A job that has a place in the ledger."""

    job: Job
    source: str  #: as it was given
    key: str  #: digest of what the source is now, the options and the version

    @property
    def output(self) -> Path:
        return Path(self.job.options["output"])

    @property
    def force(self) -> bool:
        return bool(self.job.options.get("force"))


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be done."""

    jobs: tuple[Planned, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draft:
    entry: Entry
    options: dict[str, Any]  #: of ``convert``
    request: Request
    output: Path


def prepare(
    entries: Sequence[Entry],
    *,
    options: Mapping[str, Any],
    output: str | None,
    output_dir: Path,
) -> Batch:
    """The jobs for entries, each with its own options, else ``options``, else the defaults of its list.

    ``output``: template; raises UsageError for one that cannot be used, for options that contradict each other, for
    outputs in each other's way, and where nothing says the target.
    """
    if not entries:
        raise UsageError("there is nothing to convert", hint="name sources, or a list of them")
    common = check_options(options, "options")
    drafts, notes = _distinct([_draft(e, common, output, output_dir) for e in entries])
    made = {os.path.realpath(d.output): d.entry.source for d in drafts}
    kept = []
    for draft in drafts:
        maker = made.get(resolved(draft.entry.source)) if draft.entry.globbed else None
        if maker is None:
            kept.append(draft)
        elif maker != draft.entry.source:
            notes.append(f"{draft.entry.source} is the output of {maker}: left out")
        else:
            notes.append(f"{draft.entry.source} is named like an output: left out")
    check_places([(resolved(d.entry.source), d.output) for d in kept])
    return Batch(tuple(map(_planned, kept)), tuple(notes))


def _draft(entry: Entry, common: Mapping[str, Any], template: str | None, root: Path) -> _Draft:
    options = {**entry.defaults, **common, **entry.options}
    default = options.pop("output", None)
    if "to" not in options:
        raise UsageError(f"{entry.source}: nothing says the target", hint="give --to, or 'to' in the list")
    try:
        request = request_of(**options)
    except PrecconvError as e:
        if entry.options or entry.defaults:
            e.args = (f"{entry.source}: {e}",)
        raise
    said = next((t for t in (entry.output, template, default) if t is not None), None)
    if said is not None:
        check_template(said)
    place = output_place(entry.source, request.policy.target, said, root, request.format)
    return _Draft(entry, options, request, place)


def _distinct(drafts: Sequence[_Draft]) -> tuple[list[_Draft], list[str]]:
    """Each source once for each output and set of options; what was there more often is named."""
    found: dict[str, list[_Draft]] = {}
    for draft in drafts:
        mark = json.dumps([resolved(draft.entry.source), draft.request.repo_options(), str(draft.output)])
        found.setdefault(mark, []).append(draft)
    twice = [same for same in found.values() if len(same) > 1]
    notes = [f"{same[0].entry.source} is listed {len(same)} times, and converted once" for same in twice]
    return [same[0] for same in found.values()], notes


def _planned(draft: _Draft) -> Planned:
    """The job with its rules read, and with no path that depends on where a process runs."""
    options = {k: v for k, v in draft.options.items() if k not in ("keep", "rule", "rules")}
    options |= {"rule": list(draft.request.policy.rules), "output": os.fspath(draft.output), "durable": True}
    source = draft.entry.source
    place = os.path.abspath(source) if os.path.lexists(source) else source  # noqa: PTH100  links name outputs
    said = {"version": __version__, "source": identity(source), "options": draft.request.repo_options()}
    key = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
    return Planned(Job(place, options), source, key)
