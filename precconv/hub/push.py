"""An output on its way to the Hub: its files are sent as they are finished, and committed when all are there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..paths import reason
from ..plan import Plan
from ..repo.source import Files
from ..report import Report
from ..request import Request
from .client import quiet
from .publish import Published, Publisher, Target, publication_key, publication_title, publisher

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


class HubSink:
    """Made by ``pushing``; ``already`` when an earlier run published the same."""

    def __init__(self, to: Publisher, source: str | None, request: Request, pool: ThreadPoolExecutor | None) -> None:
        self.already = to.already
        self.published: Published | None = None
        self._to, self._source, self._request, self._pool = to, source, request, pool
        self._sent: list[Future[CommitOperationAdd]] = []

    def take(self, path: Path, name: str) -> None:
        """Send a file: in another thread, but where it is removed right after."""
        if self._pool is None:
            done: Future[CommitOperationAdd] = Future()
            done.set_result(self._to.upload(path, name))
            self._sent.append(done)
        else:
            self._sent.append(self._pool.submit(self._to.upload, path, name))

    def finish(self, done: Report) -> str:
        """Commit what was sent; its address."""
        operations = [future.result() for future in self._sent]
        title = publication_title(self._source, self._request.to)
        kept = "".join(f"\n- {g.tensors} tensors {g.to}: {g.why}" for g in done.plan.groups())
        self.published = self._to.commit(operations, title=title, description=f"By dtype and reason:{kept}")
        return self.published.pr_url or self.published.url


@contextmanager
def pushing(target: Target, files: Files, request: Request, *, at_once: bool) -> Iterator[HubSink]:
    """A sink for a conversion of ``files``; with ``at_once`` a file is sent before ``take`` returns."""
    source, state = files.repo or files.root.resolve().name, files.commit or _state(files)
    with quiet(), publisher(target, publication_key(source, state, request.repo_options())) as to:
        if at_once:
            yield HubSink(to, files.repo, request, None)
            return
        pool = ThreadPoolExecutor(UPLOADS)
        try:
            yield HubSink(to, files.repo, request, pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _state(files: Files) -> str:
    """What changes when a local model does."""
    try:
        stats = [(path, (files.root / path).stat()) for path in files.paths]
    except OSError as e:
        raise InputError(f"cannot be read: {reason(e)}", path=files.root) from e
    return repr([(path, s.st_size, s.st_mtime_ns) for path, s in stats])


def already(sink: HubSink, files: Files, made: Plan, request: Request) -> Report:
    """The report on what an earlier run has published."""
    assert sink.already is not None
    return Report(
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
