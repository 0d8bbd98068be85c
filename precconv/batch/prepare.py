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
from .options import PUBLISHING, check_options
from .outputs import check_places, check_repos, check_template, output_place, repo_name
from .pins import Pin, pin_all, reference
from .sources import identity, resolved

__all__ = ["Batch", "Planned", "prepare"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A job that has a place in the ledger."""

    job: Job
    source: str  #: as it was given
    key: str  #: digest of what the source is now, the options and the version

    @property
    def output(self) -> Path | None:
        """None where it is published, and nothing of it stays here."""
        place = self.job.options.get("output")
        return None if place is None else Path(place)

    @property
    def place(self) -> str:
        """Where the output is, as the ledger has it."""
        return _place(self.job.options)

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
    output: Path | None  #: None where it is published only

    @property
    def place(self) -> str:
        return _place({**self.options, "output": self.output})


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
    made = {os.path.realpath(d.output): d.entry.source for d in drafts if d.output is not None}
    kept = []
    for draft in drafts:
        maker = made.get(resolved(draft.entry.source)) if draft.entry.globbed else None
        if maker is None:
            kept.append(draft)
        elif maker != draft.entry.source:
            notes.append(f"{draft.entry.source} is the output of {maker}: left out")
        else:
            notes.append(f"{draft.entry.source} is named like an output: left out")
    check_places([(resolved(d.entry.source), d.output) for d in kept if d.output is not None])
    check_repos([(d.entry.source, d.place) for d in kept if d.options.get("push") is not None])
    pins = pin_all(d.entry.source for d in kept)
    return Batch(tuple(_planned(d, pins.get(d.entry.source)) for d in kept), tuple(notes))


def _draft(entry: Entry, common: Mapping[str, Any], template: str | None, root: Path) -> _Draft:
    options = {**entry.defaults, **common, **entry.options}
    default = options.pop("output", None)
    if "to" not in options:
        raise UsageError(f"{entry.source}: nothing says the target", hint="give --to, or 'to' in the list")
    try:
        request = request_of(**{k: v for k, v in options.items() if k not in PUBLISHING})
    except PrecconvError as e:
        if entry.options or entry.defaults:
            e.args = (f"{entry.source}: {e}",)
        raise
    said = next((t for t in (entry.output, template, default) if t is not None), None)
    if said is not None:
        check_template(said)
    if options.get("push") is not None:
        found = reference(entry.source)
        if found is not None and found.file is not None:
            raise UsageError("--push publishes whole models", path=entry.source, hint="leave the file's name out")
        options["push"] = repo_name(options["push"], entry.source, request.to)
        if said is None:
            return _Draft(entry, options, request, None)
    elif any(options.get(name) for name in PUBLISHING):
        raise UsageError(f"{entry.source}: nothing says where to publish", hint="give --push REPO")
    place = output_place(entry.source, request.to, said, root, request.format)
    return _Draft(entry, options, request, place)


def _place(options: Mapping[str, Any]) -> str:
    """A path, or the repo that it is published in, with what tells it from others there."""
    output, push = options.get("output"), options.get("push")
    if push is None:
        assert isinstance(output, (str, os.PathLike))
        return str(output)
    pull = "#pr" if options.get("pr") else ""
    return f"hf://{push}{'@' + options['branch'] if options.get('branch') else ''}{pull}"


def _distinct(drafts: Sequence[_Draft]) -> tuple[list[_Draft], list[str]]:
    """Each source once for each output and set of options; what was there more often is named."""
    found: dict[str, list[_Draft]] = {}
    for draft in drafts:
        mark = json.dumps([resolved(draft.entry.source), draft.request.repo_options(), draft.place])
        found.setdefault(mark, []).append(draft)
    twice = [same for same in found.values() if len(same) > 1]
    notes = [f"{same[0].entry.source} is listed {len(same)} times, and converted once" for same in twice]
    return [same[0] for same in found.values()], notes


def _planned(draft: _Draft, pin: Pin | None) -> Planned:
    """The job with its rules read, and with no path that depends on where a process runs."""
    options = {k: v for k, v in draft.options.items() if k not in ("keep", "rule", "rules")}
    options |= {"rule": list(draft.request.policy.rules), "durable": True}
    if draft.output is not None:
        options["output"] = os.fspath(draft.output)
    source = draft.entry.source
    place = os.path.abspath(source) if os.path.lexists(source) else source  # noqa: PTH100  links name outputs
    if pin is not None:
        place = pin.source
    said = {
        "version": __version__,
        "source": identity(source, pin),
        "options": draft.request.repo_options(),
        **({"published": draft.place} if draft.options.get("push") else {}),
    }
    key = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
    return Planned(Job(place, options), source, key)
