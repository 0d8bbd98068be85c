"""Commands in processes of their own that are killed, or interrupted, at one exact step of their work.

``python -m tests.forked`` imports everything once and forks for each command, so a hundred of them take seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .processes import environment


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; ``steps`` are what it did up to then, such as ``recorded model.safetensors``."""

    code: int  #: exit code, or less than 0: the signal that killed it
    steps: list[str]
    stdout: str
    stderr: str

    def written(self) -> set[str]:
        """The files into which something was written."""
        return {step.removeprefix("write ") for step in self.steps if step.startswith("write ")}


Runner = Callable[..., Ended]


@contextmanager
def commands(scratch: Path) -> Iterator[Runner]:
    """A function that runs ``precconv``; ``scratch`` is for what it says."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", scratch], cwd=scratch, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def run(
        *args: str | Path,
        at: int | None = None,
        by: signal.Signals = signal.SIGKILL,
        values: Mapping[str, object] | None = None,
        only: Sequence[str] = ("",),
    ) -> Ended:
        """``at``: the number of the step before which signal ``by`` comes; ``values``: of each ``module:name``.

        ``only``: what the text of a step begins with that counts as one.
        """
        stdin.write(json.dumps([[os.fspath(a) for a in args], at, by, values or {}, only]) + "\n")
        stdin.flush()
        return Ended(**json.loads(stdout.readline()))

    try:
        yield run
    finally:
        stdin.close()
        server.wait()
        stdout.close()


# In the process that forks


def serve(scratch: Path) -> None:
    import torch

    torch.set_num_threads(1)
    import precconv.cli  # noqa: F401

    files = {name: scratch / name for name in ("steps", "stdout", "stderr")}
    for line in sys.stdin:
        args, at, by, values, only = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_here(args, at, signal.Signals(by), values, tuple(only), files)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = {name: path.read_text("utf-8") for name, path in files.items()}
        sys.stdout.write(json.dumps({**said, "code": code, "steps": said["steps"].splitlines()}) + "\n")
        sys.stdout.flush()


def run_here(
    args: list[str], at: int | None, by: signal.Signals, values: Mapping[str, object], only: tuple[str, ...],
    files: Mapping[str, Path],
) -> None:  # fmt: skip
    fds = {name: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name, path in files.items()}
    os.dup2(fds["stdout"], 1)
    os.dup2(fds["stderr"], 2)
    done, one = 0, threading.Lock()

    def step(text: str) -> None:
        nonlocal done
        if not text.startswith(only):
            return
        with one:
            done += 1
            if done - 1 == at:
                os.kill(os.getpid(), by)
            os.write(fds["steps"], f"{text}\n".encode())

    observe(step)
    for name, value in values.items():
        module, _, attribute = name.partition(":")
        owner = import_module(module)
        old = getattr(owner, attribute)
        setattr(owner, attribute, (lambda *_, value=value: value) if callable(old) else value)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["precconv", *args]
    code = 1
    try:
        import_module("precconv.cli").main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def observe(step: Callable[[str], None]) -> None:
    """Say every step that changes something on the disk, before it is done and, for the large ones, after it."""
    from precconv import fileio
    from precconv.batch.ledger import Ledger
    from precconv.hub import publish
    from precconv.repo import stage

    def wrap(owner: Any, name: str, before: Callable[..., str] | None, after: Callable[..., str] | None) -> None:
        real = getattr(owner, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                step(before(*args))
            result = real(*args, **kwargs)
            if after is not None:
                step(after(*args))
            return result

        setattr(owner, name, observed)

    wrap(fileio.PartFile, "write", lambda part, *_: f"write {part.final.name}", None)
    wrap(fileio.PartFile, "publish", lambda part: f"name {part.final.name}", lambda part: f"named {part.final.name}")
    wrap(fileio.PartFile, "sync", lambda part: f"sync {part.final.name}", None)
    wrap(fileio, "sync_directory", lambda path: f"sync {path.name}/", None)
    wrap(stage, "sync_directory", lambda path: f"sync {path.name}/", None)
    wrap(stage.Stage, "record", None, lambda _, name, *__: f"recorded {name}")
    wrap(stage.Stage, "copy", lambda _, __, name: f"copy {name}", lambda _, __, name: f"copied {name}")
    wrap(stage.Stage, "publish", lambda *_: "publish", lambda *_: "published")
    wrap(Path, "rename", lambda path, _: f"rename {path.name}", lambda path, _: f"renamed {path.name}")
    wrap(Ledger, "add", lambda _, event: f"ledger {event}", lambda _, event: f"ledgered {event}")
    wrap(publish, "_uploaded", lambda *args: f"send {args[3]}", lambda *args: f"sent {args[3]}")
    wrap(publish.Publisher, "commit", lambda *_: "commit", lambda *_: "committed")
    wrap(shutil, "rmtree", lambda path, *_: f"remove {Path(path).name}", None)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
