"""``precconv batch``: many sources, one ledger."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .. import text
from ..batch import log
from ..batch.lists import read_arguments
from ..batch.many import LEDGER_NAME, How, do, look
from ..batch.prepare import Batch, prepare
from ..batch.run import Listener, Standing
from ..batch.summary import BatchReport, PlannedBatch
from ..errors import OutputError
from ..paths import reason
from .base import reported, say, unread
from .convert import convert
from .options import Ordered, given_rules

__all__ = ["batch"]

#: Options of ``convert`` that are about one source, or that a batch has in its own way.
_OF_ONE = (
    "src",
    "output",
    "workers",
    "dry_run",
    "report",
    "as_json",
    "durable",
    "quiet",
    "verbose",
    "engine",
    "address",
)


@click.command(cls=Ordered)
@click.argument("lists", metavar="LIST...", nargs=-1, required=True)
@click.option(
    "--output-dir",
    type=click.Path(),
    default=".",
    show_default=True,
    metavar="DIR",
    help="Where the outputs go; made when it is not there.",
)
@click.option(
    "-o",
    "--output",
    metavar="TEMPLATE",
    help="Names in it, of {org}, {name}, {stem}, {to}, {revision}; default: as convert names them.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Sources at a time, which share the cores; default: 1, with ray one a node.",
)
@click.option(
    "--ledger",
    type=click.Path(),
    metavar="FILE",
    help=f"What remembers what is done; default: {LEDGER_NAME} in the output directory.",
)
@click.option("--retry-failed", is_flag=True, help="Do only what failed the last time.")
@click.option("--stop-after", type=click.IntRange(1), metavar="N", help="Begin nothing more after so many failures.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Processes of this machine, or tasks of a Ray cluster.",
)
@click.option("--address", metavar="auto|ray://...", help="The Ray cluster; default: the one this machine is in.")
@click.option(
    "--log",
    "log_file",
    type=click.Path(),
    metavar="FILE",
    help="Add a line for everything that happens: time, level, source, event, key=value.",
)
@click.option("--dry-run", is_flag=True, help="Print plans and sizes; read no tensor data, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Say everything that happens.")
def batch(
    lists: tuple[str, ...], *, output_dir: str, output: str | None, dry_run: bool, as_json: bool, quiet: bool,
    verbose: bool, log_file: str | None, ledger: str | None, **rest: Any,
) -> None:  # fmt: skip
    """Convert many sources: files, directories, quoted patterns, and lists of them.

    \b
    LIST is a file ending in .txt, .list or .toml, or - for stdin; anything else is
    a source.  A list has one source a line, # begins a comment.  In TOML, [defaults]
    and [[repo]] tables hold options.  What is done is not done again, what failed is.
    """
    with reported():
        entries = read_arguments(lists, sys.stdin.buffer.read)
        root = Path(output_dir)
        made = prepare(entries, options=_given(rest), output=output, output_dir=root)
        how = How(
            ledger=root / LEDGER_NAME if ledger is None else Path(ledger),
            **{name: rest[name] for name in ("retry_failed", "stop_after", "workers", "engine", "address")},
        )
        for note in made.notes:
            if not quiet:
                say(text.printable(f"note: {note}"))
        if dry_run and log_file is not None:
            raise click.UsageError("--dry-run writes nothing, --log neither")
        found: BatchReport | PlannedBatch
        found = look(made, how) if dry_run else _do(made, how, log_file, quiet=quiet, verbose=verbose)
        with unread():
            if as_json:
                click.echo(json.dumps(found.to_dict(), allow_nan=False))
            elif not quiet:
                click.echo(found.table())
        if not found.ok:
            sys.exit(1)


def _do(made: Batch, how: How, log_file: str | None, *, quiet: bool, verbose: bool) -> BatchReport:
    with _listening(made, log_file, quiet=quiet, verbose=verbose) as listener:
        return do(made, how, listener)


for _option in convert.params:  # the very same, in help and in meaning
    if _option.name not in _OF_ONE:
        _shared = copy.copy(_option)
        _shared.required = False  # --to: a list may say it
        batch.params.append(_shared)


def _given(rest: dict[str, Any]) -> dict[str, Any]:
    """The options of ``convert`` that stand on the command line."""
    context = click.get_current_context()
    names = [p.name for p in convert.params if p.name is not None and p.name not in _OF_ONE]
    given = {n: rest[n] for n in names if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}
    rules = [n for n in ("rule", "keep", "rules") if given.pop(n, None)]
    return {**given, "rule": given_rules()} if rules else given


# While it runs


@contextmanager
def _listening(made: Batch, log_file: str | None, *, quiet: bool, verbose: bool) -> Iterator[Listener]:
    """What tells people: the log, failures on stderr as they come, one bar on a terminal."""
    with _log(log_file) as write, _bar(len(made.jobs), quiet=quiet) as (show, speak):

        def event(happened: log.LogEvent) -> None:
            write(log.line(happened))
            if happened.event == "failed":
                speak(f"error: {happened.source}: {_without(happened.fields['message'], happened.source)}")
                if happened.fields["hint"]:
                    speak(f"hint: {happened.fields['hint']}")
            elif verbose and not quiet:
                speak(log.line(happened))

        yield Listener(event, show)


def _without(message: str, source: str) -> str:
    """A message that does not begin with the source's name a second time."""
    for name in (os.path.abspath(source), source):  # noqa: PTH100
        message = message.removeprefix(f"{name}: ")
    return message


@contextmanager
def _log(path: str | None) -> Iterator[Callable[[str], None]]:
    """Add lines to a file; raises OutputError where it cannot be opened.  Later failures to write do not stop work."""
    if path is None:
        yield lambda _: None
        return
    try:
        stream = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  a failure to open it is told apart
    except OSError as e:
        raise OutputError(f"cannot be written: {reason(e)}", path=path) from e

    def write(line: str) -> None:
        with suppress(OSError):
            stream.write(f"{line}\n")

    with suppress(OSError), stream:
        yield write


@contextmanager
def _bar(jobs: int, *, quiet: bool) -> Iterator[tuple[Callable[[Standing], None], Callable[[str], None]]]:
    """One bar for all on a terminal, and a way to talk beside it; elsewhere only the latter."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield (lambda _: None), (lambda line: say(text.printable(line)))
        return
    from tqdm import tqdm

    size = shutil.get_terminal_size()  # tqdm shows nothing on a terminal that says it has none
    with tqdm(total=jobs, unit="model", leave=False, file=sys.stderr, ncols=size.columns, nrows=size.lines) as bar:

        def show(now: Standing) -> None:
            if now.total_bytes:
                sizes = f"{text.size(now.done_bytes)} of {text.size(now.total_bytes)} in {now.running}"
                bar.set_postfix_str(sizes, refresh=False)
            bar.update(now.ended - bar.n)
            bar.refresh()

        def speak(line: str) -> None:
            bar.clear()
            say(text.printable(line))
            bar.refresh()

        yield show, speak
