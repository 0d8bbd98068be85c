"""What every command shares: failures as one sentence, signals, talk on stderr, the progress bar."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from .. import text
from ..errors import PrecconvError

__all__ = ["INTERRUPTED", "progress_bar", "reported", "say", "undisturbed", "unread"]

INTERRUPTED = 130


@contextmanager
def reported() -> Iterator[None]:
    """Deliberate failures as one sentence, a hint and their exit code; signals as an interruption."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup has the right to stay
            signal.signal(number, _interrupt)
    try:
        yield
    except PrecconvError as e:
        for line in text.failure(e):
            say(line)
        sys.exit(e.exit_code)
    except KeyboardInterrupt as e:
        say(str(e) or "interrupted; nothing was written")
        sys.exit(INTERRUPTED)
    except OSError:  # nobody reads our results, or they cannot be written where they go
        _forget_stdout()
        sys.exit(1)


def say(line: str) -> None:
    """Talk, on stderr; nothing depends on whether anybody listens."""
    with suppress(OSError, ValueError, AttributeError):
        click.echo(line, err=True)


@contextmanager
def unread() -> Iterator[None]:
    """For a conversion's words about itself: what became of it does not depend on whether anybody reads them."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        _forget_stdout()


def _forget_stdout() -> None:
    """Let the interpreter's last flush go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def undisturbed() -> Iterator[None]:
    """The output has its name: no signal may make this a failure any more."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar in bytes on a terminal, nothing elsewhere."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    screen = shutil.get_terminal_size()  # tqdm shows nothing on a terminal that says it has no columns or no lines
    with tqdm(unit="B", unit_scale=True, leave=False, file=sys.stderr, ncols=screen.columns, nrows=screen.lines) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
