"""A model on the Hub as a source: its listing at one commit, headers read by range, and files fetched to the cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from .._version import __version__
from ..errors import HubError, InputError, OutputError, SourceChangedError
from ..fileio import InputFile, SourceFile
from ..paths import reason
from ..repo.names import parse_weight
from ..repo.source import Files
from .client import LIBRARY, client, quiet, translated
from .refs import Ref
from .retries import FEW, persistently

__all__ = ["HubFile", "HubRepo", "fetch", "fetched", "find", "remote_files"]

#: Bytes asked for at least: a header is mostly smaller, and a second request costs more.
BLOCK = 1 << 16
#: Files fetched side by side.
FETCHES = 4
HEADERS = 8  #: headers asked for side by side


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repo at one commit."""

    id: str  #: as the Hub calls it now; a renamed repo is found under its old name too
    commit: str
    sizes: Mapping[str, int]  #: bytes of every file
    asked: Ref | None = None  #: what it was found by, on the Hub

    @property
    def shown(self) -> str:
        return f"{self.id}@{self.commit}"


def find(ref: Ref) -> HubRepo:
    """The repo and its commit, resolved once; raises HubError.

    Offline (``HF_HUB_OFFLINE``), what is in the cache.
    """
    try:
        return _cached(ref) if is_offline() else persistently(lambda: _listed(ref), sleep=_sleep, tries=FEW)
    except HubError as e:
        if not ref.is_guess or e.kind not in ("not found", "offline", "connection"):
            raise
        message = f"is no file or directory here, and as a model on the Hub {e.message}"
        raise HubError(message, kind=e.kind, path=str(ref), hint=e.hint, wait=e.wait) from None


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _listed(ref: Ref) -> HubRepo:
    with translated(ref.repo, what=ref.revision):
        info = client().model_info(ref.repo, revision=ref.revision, files_metadata=True)
    sizes = {s.rfilename: int(s.size or 0) for s in info.siblings or ()}
    return HubRepo(info.id, str(info.sha), sizes, ref)


def _cached(ref: Ref) -> HubRepo:
    from huggingface_hub import snapshot_download

    with translated(ref.repo, what=ref.revision):
        root = Path(snapshot_download(ref.repo, revision=ref.revision, local_files_only=True))
    files = [p for p in root.rglob("*") if p.is_file()]
    return HubRepo(ref.repo, root.name, {p.relative_to(root).as_posix(): p.stat().st_size for p in files})


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def cache_directory() -> Path:
    """Where the client's cache is, or will be: the part of its path that exists."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    return next(p for p in (cache, *cache.parents) if p.is_dir())


def is_cached(repo: HubRepo, name: str) -> bool:
    """Whether a file is in the client's cache, at this commit."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo.id, name, revision=repo.commit), str)


def _remember(repo: HubRepo) -> None:
    """Tell the cache which commit the reference stood for: offline, the client looks there.

    It does so itself when it is asked for a branch, but then another file may come from another commit.
    The layout: huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if repo.asked is None or repo.asked.revision == repo.commit:
        return
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo.id, repo_type="model") / "refs"
    with contextlib.suppress(OSError):  # a cache that cannot be written serves as well
        place = folder / (repo.asked.revision or constants.DEFAULT_REVISION)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(repo.commit)


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
                # who jumps, as from record to record of a zip, does not want what follows
                is_next = 0 <= offset - self._start <= len(self._block)
                self._block = self._fetch(offset, max(end, min(offset + BLOCK, self.size) if is_next else end))
                self._start = offset
            at = offset - self._start
            buffer[:] = self._block[at : at + len(buffer)]

    def look(self) -> None:
        """Ask for the first bytes, so that they are here when they are wanted."""
        if self.size:
            self.read(0, 1)

    def _fetch(self, start: int, end: int) -> bytes:
        return persistently(lambda: self._range(start, end), sleep=_sleep, tries=FEW)

    def _range(self, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        repo = self._repo
        with translated(repo.id, what=self._name):
            url = hf_hub_url(repo.id, self._name, revision=repo.commit)
            known = build_hf_headers(library_name=LIBRARY, library_version=__version__)
            headers = {**known, "Range": f"bytes={start}-{end - 1}"}
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
        if is_offline():
            return opened_at(repo, path)
        if path not in here:
            here.update({p: HubFile(repo, p) for p in _with(path, repo.sizes)})
            if len(here) > 1:  # headers are many small requests: side by side
                with ThreadPoolExecutor(HEADERS) as pool:
                    list(pool.map(HubFile.look, here.values()))
        return here.pop(path)

    return Files(root, sorted(repo.sizes), opened, repo.shown, repo.id, repo.commit, repo.sizes)


def opened_at(repo: HubRepo, name: str) -> SourceFile:
    """One file, read by range; offline, from the cache."""
    return InputFile(fetched(repo, name)) if is_offline() else HubFile(repo, name)


def _with(path: str, names: Iterable[str]) -> list[str]:
    """The shards that a file is one of, as its name has it; itself alone where it is none."""
    shard = _numbering(path)
    return [path] if shard is None else [p for p in names if _numbering(p) == shard]


def _numbering(path: str) -> tuple[str, str] | None:
    """The directory and the numbering that a shard belongs to."""
    where, _, name = path.rpartition("/")
    found = parse_weight(name)
    return None if found is None or found.number is None else (where, found.group)


@dataclass(slots=True)
class _Counter:
    """Bytes fetched, over all threads."""

    done: int = 0
    lock: Lock = field(default_factory=Lock)
    stopped: Event = field(default_factory=Event)

    def add(self, count: int) -> None:
        """Called by the client as bytes come: raises once ``stopped``, which ends its download."""
        with self.lock:
            self.done += count
        if self.stopped.is_set():
            raise _given_up()

    def pause(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise _given_up()


def _given_up() -> HubError:
    return HubError("fetching was given up", kind="refused")


def fetch(repo: HubRepo, names: Sequence[str], progress: Callable[[int, int], None] | None = None) -> Path:
    """Bring files to the client's cache; the snapshot's directory.  Those that are there already are not asked for.

    ``progress``: called in this thread with (done, total) bytes.  Raises HubError.
    """
    total = sum(repo.sizes[name] for name in names)
    counter = _Counter()
    with quiet(), ThreadPoolExecutor(FETCHES) as pool:
        pending = [pool.submit(fetched, repo, name, counter.add, sleep=counter.pause) for name in names]
        try:
            paths = [_waited(f, lambda: progress and progress(min(counter.done, total), total)) for f in pending]
        except BaseException:
            counter.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if progress is not None:
        progress(total, total)
    if not names:
        return Path(repo.id)
    _remember(repo)
    return paths[0].parents[len(Path(names[0]).parts) - 1]


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


def fetched(
    repo: HubRepo,
    name: str,
    count: Callable[[int], None] | None = None,
    *,
    to: Path | None = None,
    sleep: Callable[[float], object] = _sleep,
) -> Path:
    """Bring one file to the client's cache, or to the directory ``to``; where it is.

    ``count``: called from any thread with the bytes that came.  Raises HubError, or OutputError for a full disk.
    """
    try:
        path = persistently(lambda: _fetched(repo, name, count, to), sleep=sleep)
    except OSError as e:
        raise OutputError(f"cannot be fetched: {reason(e)}", path=Path(repo.id, name)) from e
    if path.stat().st_size != repo.sizes[name]:
        message = f"has {path.stat().st_size} bytes in the cache, {repo.sizes[name]} on the Hub"
        raise InputError(message, path=path, hint="remove it from the cache and run again")
    return path


def _fetched(repo: HubRepo, name: str, count: Callable[[int], None] | None, to: Path | None) -> Path:
    from huggingface_hub import hf_hub_download

    with translated(repo.id, what=name):
        return Path(
            hf_hub_download(
                repo.id,
                name,
                revision=repo.commit,
                local_dir=to,
                tqdm_class=_bar(count),
                library_name=LIBRARY,
                library_version=__version__,
            )
        )


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
