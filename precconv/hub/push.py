"""An output on its way to the Hub: its files are sent as they are finished, and committed when all are there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, UsageError
from ..filing import check_filing, filed
from ..paths import reason
from ..plan import Plan
from ..repo.names import parse_index, parse_weight
from ..repo.source import Files
from ..report import Report
from ..request import Request
from .client import quiet
from .publish import Publisher, Target, publication_key, publication_title, publisher

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

__all__ = ["HubSink", "Push", "already", "pushing"]

#: Files sent side by side, while others are converted.
UPLOADS = 2


@dataclass(frozen=True, slots=True)
class Push:
    """Where an output is published; with ``low_disk`` no more of it than a file at a time lies here."""

    target: Target
    low_disk: bool = False
    engine: str | None = None  #: converts the shards, where it is not this process
    address: str | None = None  #: of the engine's cluster
    workers: int | None = None  #: shards at a time on the engine


class HubSink:
    """Made by ``pushing``; ``already`` when an earlier run published the same."""

    def __init__(self, to: Publisher, source: str | None, request: Request, pool: ThreadPoolExecutor | None) -> None:
        self.already = to.already
        self._is_beside = source == to.target.repo and request.variant is not None
        self._to, self._source, self._request, self._pool = to, source, request, pool
        self._sent: list[Future[CommitOperationAdd]] = []

    def take(self, path: Path, name: str) -> None:
        """Send a file: in another thread, but where it is removed right after.

        Raises what went wrong with an earlier one: who cannot publish need not convert the rest.
        """
        for sent in self._sent:
            if sent.done():
                sent.result()
        if self._is_beside and not _is_weights(name):  # the config and the card there are about the source
            return
        if self._pool is None:
            self.sent(self._to.upload(path, name))
        else:
            self._sent.append(self._pool.submit(self._to.upload, path, name))

    @property
    def target(self) -> Target:
        """Where it goes, under its full name."""
        return self._to.target

    def sent(self, operation: CommitOperationAdd) -> None:
        """A file that was sent from elsewhere."""
        done: Future[CommitOperationAdd] = Future()
        done.set_result(operation)
        self._sent.append(done)

    def finish(self, done: Report) -> Report:
        """Commit what was sent; the report with where it is."""
        operations = [future.result() for future in self._sent]
        title = publication_title(self._source, self._request.to)
        kept = "".join(f"\n- {g.tensors} tensors {g.to}: {g.why}" for g in done.plan.groups())
        published = self._to.commit(operations, title=title, description=f"By dtype and reason:{kept}")
        return replace(done, output=published.pr_url or published.url, published=asdict(published))


@contextmanager
def pushing(target: Target, files: Files, request: Request, *, at_once: bool) -> Iterator[HubSink]:
    """A sink for a conversion of ``files``; with ``at_once`` a file is sent before ``take`` returns."""
    source, state = files.repo or files.root.resolve().name, files.commit or _state(files)
    key = publication_key(source, state, request.repo_options())
    with quiet(), ThreadPoolExecutor(UPLOADS) as pool, publisher(target, key) as to:
        _check_place(to.target, files, request)
        try:
            yield HubSink(to, files.repo, request, None if at_once else pool)
        finally:  # waited for when the publisher has ended what waits for the Hub
            pool.shutdown(wait=False, cancel_futures=True)


def _check_place(target: Target, files: Files, request: Request) -> None:
    """Raises UsageError for a publication in place of what it is made from."""
    if target.repo == files.repo and not (target.pr or request.variant or target.branch not in (None, "main")):
        hint = "publish beside it with --variant, or with --branch or --pr, or push to another repo"
        raise UsageError("is the source, whose weights would be replaced", path=target.repo, hint=hint)


def _is_weights(name: str) -> bool:
    last = name.rpartition("/")[2]
    return parse_weight(last) is not None or parse_index(last) is not None


def _state(files: Files) -> str:
    """What changes when a local model does."""
    try:
        stats = [(path, (files.root / path).stat()) for path in files.paths]
    except OSError as e:
        raise InputError(f"cannot be read: {reason(e)}", path=files.root) from e
    return repr([(path, s.st_size, s.st_mtime_ns) for path, s in stats])


def already(sink: HubSink, files: Files, made: Plan, request: Request) -> Report:
    """The report on what an earlier run has published, written where the request wants one."""
    assert sink.already is not None
    done = Report(
        source=files.shown,
        output=sink.already.pr_url or sink.already.url,
        plan=made,
        seen={},
        findings=(),
        options=request.repo_options(),
        source_bytes=0,
        output_bytes=0,
        verified_bytes=0,
        seconds=0.0,
        published=asdict(sink.already),
    )
    check_filing(request, [files.root / path for path in files.paths])
    with filed(done, request):
        pass
    return done
