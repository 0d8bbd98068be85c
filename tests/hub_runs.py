"""Running precconv against the tests' own Hub, in a directory of its own; whatever happens, no token comes out."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import Result

from precconv.hub import retries

from .command import run
from .hub.server import HubServer
from .processes import HANG, ROOT, command

__all__ = ["Waits", "Work", "here", "model_files", "waits"]

T = TypeVar("T")


class Waits(list[float]):
    """Seconds that the client or precconv would have waited; a Hub that is away is waited for."""

    hub: HubServer | None = None

    def append(self, seconds: float) -> None:
        super().append(seconds)
        for outage in [] if self.hub is None else self.hub._outages:
            outage.join()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """All waits are over at once."""
    asked = Waits()

    class Impatient:
        sleep = staticmethod(asked.append)
        time = staticmethod(time.time)

    def persistently(action: Callable[[], T], *, tries: int = retries.TRIES, **_: Any) -> T:
        return retries.persistently(action, sleep=asked.append, tries=tries)

    monkeypatch.setattr("huggingface_hub.utils._http.time", Impatient)
    monkeypatch.setattr("huggingface_hub.file_download.time", Impatient)
    for module in ("source", "publish"):
        monkeypatch.setattr(f"precconv.hub.{module}.persistently", persistently)
    return asked


class Work:
    """The working directory of the runs, which begins empty."""

    def __init__(self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub, self.path, self.home = hub, tmp_path / "work", tmp_path / "hf-home"
        self.path.mkdir()
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(self.path)

    def __call__(self, *args: object, token: str | bool = "") -> Result:
        """In this process; without a ``token``, none."""
        if token:
            self._monkeypatch.setenv("HF_TOKEN", str(token))
        else:
            self._monkeypatch.delenv("HF_TOKEN", raising=False)
        done = run(*args)
        self.require_no_token(f"{done.stdout}{done.stderr}".encode(), "the output")
        return done

    def ok(self, *args: object, token: str | bool = "") -> str:
        """Of a run that ends well, what is on stdout."""
        done = self(*args, token=token)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def refused(self, code: int, *args: object, token: str | bool = "") -> str:
        """Of a run that is refused in one sentence, that sentence; nothing is left in the directory."""
        before = self.left()
        done = self(*args, token=token)
        assert done.exit_code == code, done.output
        first, *rest = done.stderr.splitlines()
        assert first.startswith("error: ")
        assert len(rest) <= 1
        assert all(line.startswith("hint: ") for line in rest)
        assert self.left() == before
        return done.stderr

    def start(self, *args: object, token: str | None = None, **env: str) -> subprocess.Popen[str]:
        """In a process of its own, with Xet."""
        found = self.hub.environment(self.home, token=token) | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"} | env
        return subprocess.Popen(
            command([str(arg) for arg in args]), cwd=self.path, env=found, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def apart(self, *args: object, token: str | None = None, **env: str) -> tuple[int, str, str]:
        """The same to the end: exit code, stdout, stderr."""
        with self.start(*args, token=token, **env) as process:
            out, err = process.communicate(timeout=HANG)
        self.require_no_token(f"{out}{err}".encode(), "the output")
        return process.returncode, out, err

    def left(self) -> list[str]:
        return sorted(p.relative_to(self.path).as_posix() for p in self.path.rglob("*"))

    def require_no_token(self, data: bytes, what: str) -> None:
        for token in filter(None, [*vars_of(self.hub.tokens).values()]):
            assert token.encode() not in data, what


def vars_of(tokens: Any) -> Mapping[str, str]:
    return {name: str(getattr(tokens, name)) for name in tokens.__slots__ if getattr(tokens, name)}


@pytest.fixture
def here(in_process: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: Waits) -> Iterator[Work]:
    waits.hub = in_process
    work = Work(in_process, tmp_path, monkeypatch)
    yield work
    for path in tmp_path.rglob("*"):
        if path.is_file():
            work.require_no_token(path.read_bytes(), str(path))


def model_files(root: Path) -> dict[str, bytes | Path]:
    """A directory's files, to fill a repo with."""
    return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}
