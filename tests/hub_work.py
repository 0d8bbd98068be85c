"""Batches and spread conversions against the tests' Hub, in a directory of their own that must not hold a token."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from precconv import BatchReport, convert_many

from .hub.server import HubServer
from .processes import HANG, ROOT, command

__all__ = ["LEDGER", "PUSH", "Ended", "Place", "command_lines", "outcomes", "quick"]

LEDGER = "precconv-batch.jsonl"
PUSH = "tester/{name}-{to}"


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class Place:
    """A working directory, the client's cache beside it, and what runs there."""

    def __init__(self, hub: HubServer, root: Path) -> None:
        self.hub, self.path, self.home = hub, root / "work", root / "hf-home"
        self.path.mkdir()

    def start(self, *args: object, **env: str) -> subprocess.Popen[str]:
        """The command line in a process of its own, with the token that may write."""
        found = self.hub.environment(self.home, token=self.hub.tokens.write, xet=False)
        found |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"} | env
        return subprocess.Popen(
            command([str(arg) for arg in args]), cwd=self.path, env=found, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def run(self, *args: object, **env: str) -> Ended:
        """The same to its end."""
        with self.start(*args, **env) as process:
            stdout, stderr = process.communicate(timeout=HANG)
        return Ended(process.returncode, stdout, stderr)

    def batch(self, *sources: Any, **options: Any) -> BatchReport:
        """A batch in this process, to FP16."""
        return convert_many(sources, **{"to": "fp16", "push": PUSH, "output_dir": self.path, **options})

    def records(self) -> list[dict[str, Any]]:
        """What the ledger says; a line that a killed run left torn is passed over."""
        path, found = self.path / LEDGER, []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def ends(self) -> dict[str, dict[str, Any]]:
        """The last record of each source."""
        return {record["source"]: record for record in self.records()}

    def left(self) -> list[str]:
        return sorted(p.name for p in self.path.iterdir())

    def tokens_in(self, *texts: str) -> list[str]:
        """Where a token is that should be nowhere: in these texts, or a file of the working directory."""
        known = [t.encode() for t in (self.hub.tokens.write, self.hub.tokens.read, self.hub.tokens.guest)]
        looked = {f"text {n}": text.encode() for n, text in enumerate(texts)}
        looked |= {str(p): p.read_bytes() for p in self.path.rglob("*") if p.is_file()}
        return [name for name, data in looked.items() if any(token in data for token in known)]


def command_lines(into: list[str]) -> Callable[[], None]:
    """What reads the command line of every process of the machine into a list, where the system shows them."""

    def read() -> None:
        for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
            if entry.isdecimal():
                try:
                    into.append(Path("/proc", entry, "cmdline").read_text("utf-8", "replace"))
                except OSError:
                    continue

    return read


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would be waited for in this process is tried again at once, but where the Hub says how long."""

    class Impatient:
        time = staticmethod(time.time)

        @staticmethod
        def sleep(_: float) -> None:
            return None

    monkeypatch.setattr("huggingface_hub.utils._http.time", Impatient)
    monkeypatch.setattr("huggingface_hub.file_download.time", Impatient)
    monkeypatch.setattr("precconv.hub.retries._LONGEST_OWN", 0.0)


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All waits are real again, whatever a fixture of a wider scope has made of them."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", time)
    monkeypatch.setattr("huggingface_hub.file_download.time", time)
    monkeypatch.setattr("precconv.hub.retries._LONGEST_OWN", 60.0)


def outcomes(report: BatchReport) -> list[str]:
    return [r.outcome for r in report.results]
