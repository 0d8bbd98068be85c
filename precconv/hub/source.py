"""A model on the Hub as a source: its listing at one commit, headers read by range, and files fetched to the cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import HubError, InputError, OutputError, SourceChangedError
from ..fileio import InputFile, SourceFile
from ..paths import reason
from ..repo.source import Files
from .client import client, quiet, translated
from .refs import Ref

__all__ = ["HubFile", "HubRepo", "fetch", "fetched", "find", "remote_files"]

#: Bytes asked for at least: a header is mostly smaller, and a second request costs more.
BLOCK = 1 << 16
#: Files fetched side by side.
FETCHES = 4
HEADERS = 8  #: headers asked for side by side
_SHARD = re.compile(r"(.*-)\d{5}(-of-\d{5}.*)")


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repo at one commit."""

    id: str  #: as the Hub calls it now; a renamed repo is found under its old name too
    commit: str
    sizes: Mapping[str, int]  #: bytes of every file

    @property
    def shown(self) -> str:
        return f"{self.id}@{self.commit}"


def find(ref: Ref) -> HubRepo:
    """The repo and its commit, resolved once; raises HubError.

    Offline (``HF_HUB_OFFLINE``), what is in the cache.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _cached(ref)
    with translated(ref.repo, what=ref.revision):
        info = client().model_info(ref.repo, revision=ref.revision, files_metadata=True)
    sizes = {s.rfilename: int(s.size or 0) for s in info.siblings or ()}
    return HubRepo(info.id, str(info.sha), sizes)


def _cached(ref: Ref) -> HubRepo:
    from huggingface_hub import snapshot_download

    with translated(ref.repo, what=ref.revision):
        root = Path(snapshot_download(ref.repo, revision=ref.revision, local_files_only=True))
    files = [p for p in root.rglob("*") if p.is_file()]
    return HubRepo(ref.repo, root.name, {p.relative_to(root).as_posix(): p.stat().st_size for p in files})


class HubFile:
    """A file on the Hub, read by range; ``path`` is what it is called in messages."""

    def __init__(self, repo: HubRepo, name: str) -> None:
        self.path = Path(repo.id, name)
        self.size = repo.sizes[name]
        self._repo, self._name = repo, name
        self._lock = Lock()
        self._start, self._block = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset``."""
        if not buffer:
            return
        end = offset + len(buffer)
        if end > self.size:
            raise SourceChangedError(f"ends at byte {self.size}, before {end}", path=self.path)
        if len(buffer) >= BLOCK:  # nothing to keep, so nothing to wait for: threads ask side by side
            buffer[:] = self._fetch(offset, end)
            return
        with self._lock:
            if not self._start <= offset <= end <= self._start + len(self._block):
                self._block = self._fetch(offset, max(end, min(offset + BLOCK, self.size)))
                self._start = offset
            at = offset - self._start
            buffer[:] = self._block[at : at + len(buffer)]

    def look(self) -> None:
        """Ask for the first bytes, so that they are here when they are wanted."""
        if self.size:
            self.read(0, 1)

    def _fetch(self, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        repo = self._repo
        with translated(repo.id, what=self._name):
            url = hf_hub_url(repo.id, self._name, revision=repo.commit)
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
            response = http_backoff("GET", url, headers=headers)
            hf_raise_for_status(response)
            data = bytes(response.content)
        if response.status_code != 206:  # a server without ranges sends all of it
            data = data[start:end]
        if len(data) != end - start:
            message = f"the Hub sent {len(data)} bytes of {end - start}"
            raise HubError(message, kind="server", path=str(self.path), hint="try again later")
        return data

    def advise_sequential(self) -> None:
        """Nothing reads ahead here."""

    def require_unchanged(self) -> None:
        """A commit does not change."""

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self._block = b""


def remote_files(repo: HubRepo) -> Files:
    """The repo's files, opened where they are: for headers and small files."""
    root = Path(repo.id)

    here: dict[str, HubFile] = {}

    def opened(path: str) -> SourceFile:
        if _is_offline():
            return InputFile(fetched(repo, path))
        if path not in here:
            here.update({p: HubFile(repo, p) for p in _with(path, repo.sizes)})
            if len(here) > 1:  # headers are many small requests: side by side
                with ThreadPoolExecutor(HEADERS) as pool:
                    list(pool.map(HubFile.look, here.values()))
        return here.pop(path)

    return Files(root, sorted(repo.sizes), opened, repo.shown, repo.id, repo.commit, repo.sizes)


def _with(path: str, names: Iterable[str]) -> list[str]:
    """The shards that a file is one of, as its name has it; itself alone where it is none."""
    shard = _SHARD.fullmatch(path)
    if shard is None:
        return [path]
    return [p for p in names if (found := _SHARD.fullmatch(p)) is not None and found.groups() == shard.groups()]


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass(slots=True)
class _Counter:
    """Bytes fetched, over all threads."""

    done: int = 0
    lock: Lock = field(default_factory=Lock)

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count


def fetch(repo: HubRepo, names: Sequence[str], progress: Callable[[int, int], None] | None = None) -> Path:
    """Bring files to the client's cache; the snapshot's directory.  Those that are there already are not asked for.

    ``progress``: called in this thread with (done, total) bytes.  Raises HubError.
    """
    total = sum(repo.sizes[name] for name in names)
    counter = _Counter()
    with quiet(), ThreadPoolExecutor(FETCHES) as pool:
        pending = [pool.submit(fetched, repo, name, counter.add) for name in names]
        try:
            paths = [_waited(f, lambda: progress and progress(min(counter.done, total), total)) for f in pending]
        except BaseException:
            for future in pending:
                future.cancel()
            raise
    if progress is not None:
        progress(total, total)
    first = Path(names[0])
    return paths[0].parents[len(first.parts) - 1]


def _waited(future: Any, tick: Callable[[], object]) -> Path:
    while True:
        try:
            found = future.result(timeout=0.1)
        except TimeoutError:
            if future.done():
                raise
            tick()
        else:
            tick()
            assert isinstance(found, Path)
            return found


def fetched(repo: HubRepo, name: str, count: Callable[[int], None] | None = None, *, to: Path | None = None) -> Path:
    """Bring one file to the client's cache, or to the directory ``to``; where it is.

    ``count``: called from any thread with the bytes that came.  Raises HubError, or OutputError for a full disk.
    """
    from huggingface_hub import hf_hub_download

    try:
        with translated(repo.id, what=name):
            path = Path(
                hf_hub_download(
                    repo.id, name, revision=repo.commit, local_dir=to, tqdm_class=_bar(count), library_name="precconv"
                )
            )
    except OSError as e:
        raise OutputError(f"cannot be fetched: {reason(e)}", path=Path(repo.id, name)) from e
    if path.stat().st_size != repo.sizes[name]:
        message = f"has {path.stat().st_size} bytes in the cache, {repo.sizes[name]} on the Hub"
        raise InputError(message, path=path, hint="remove it from the cache and run again")
    return path


def _bar(count: Callable[[int], None] | None) -> type[Any]:
    """A progress bar that is not seen, and tells ``count`` of the bytes."""
    from tqdm import tqdm

    class Counting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own bars have names
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if count is not None and n is not None:
                count(int(n))
            return None

    return Counting
