"""The command line: parses, calls the library, prints.  Results go to stdout, talk and progress to stderr."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from . import text
from ._version import __version__
from .convert import convert as run_convert
from .convert import plan as run_plan
from .errors import PrecconvError
from .inspection import inspect as run_inspect
from .plan import Plan
from .report import Report, plan_dict
from .rules import Rule, read_rules
from .weights import Weights

__all__ = ["main"]

F = TypeVar("F", bound=Callable[..., Any])
INTERRUPTED = 130


class _Commands(click.Group):
    """A group whose first argument may be a checkpoint: ``precconv SRC`` is ``precconv convert SRC``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            if not ctx.resilient_parsing:  # a shell asks what could come next
                self._catch_typo(ctx, args)
            args = ["convert", *args]
        return super().parse_args(ctx, args)

    def _catch_typo(self, ctx: click.Context, args: list[str]) -> None:
        close = difflib.get_close_matches(args[0], self.commands, 1, 0.75)
        if close and not Path(args[0]).exists():
            raise click.UsageError(f"there is no command or file {args[0]!r}; did you mean {close[0]!r}?", ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands, and files where no command begins like that."""
        files = [] if incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]
        return [*files, *super().shell_complete(ctx, incomplete)]


class _Ordered(click.Command):
    """A command that keeps the order in which ``--rule``, ``--keep`` and ``--rules`` were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, _, order = self.make_parser(ctx).parse_args(list(args))
        taken = {name: iter(values.get(name, ())) for name in _RULE_OPTIONS}
        ctx.meta["rules"] = [(p.name, next(taken[p.name])) for p in order if p.name in taken]
        return super().parse_args(ctx, args)


_RULE_OPTIONS: dict[str, Callable[[str], Sequence[Rule]]] = {
    "rule": lambda value: [Rule.parse(value)],
    "keep": lambda value: [Rule.keep(value)],
    "rules": lambda value: read_rules(Path(value)),
}


#: What a plan depends on besides, and ``inspect`` has otherwise.
_PLAN_ONLY = ("output", "format", "weights", "select", "shared")


def _rules() -> list[Rule]:
    given = click.get_current_context().meta["rules"]
    return [rule for name, value in given for rule in _RULE_OPTIONS[name](value)]


@contextmanager
def _reported() -> Iterator[None]:
    """Deliberate failures as one sentence, a hint and their exit code; signals as an interruption."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup has the right to stay
            signal.signal(number, _interrupt)
    try:
        yield
    except PrecconvError as e:
        for line in text.failure(e):
            _say(line)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        sys.exit(INTERRUPTED)
    except OSError:  # nobody reads our results, or they cannot be written where they go
        _forget_stdout()
        sys.exit(1)


def _say(line: str) -> None:
    """Talk, on stderr; nothing depends on whether anybody listens."""
    with suppress(OSError, ValueError, AttributeError):
        click.echo(line, err=True)


@contextmanager
def _unread() -> Iterator[None]:
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
def _undisturbed() -> Iterator[None]:
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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="precconv")
def cli() -> None:
    """Change the precision of model checkpoints: streamed, checked, verified.

    \b
    precconv model.safetensors --to bf16          writes model.bf16.safetensors
    precconv inspect model.safetensors            shows what is inside

    A first argument that is no command is a checkpoint to convert.
    """


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options of a command, in the order ``--help`` shows them."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: Which weights of a file are meant.
_CHOICE: tuple[Callable[[F], F], ...] = (
    click.option("--weights", type=click.Choice(["auto", "model", "ema", "all"]), default="auto", show_default=True,
                 help="Which weights of a training checkpoint; with auto, an LDM model keeps its EMA twins."),
    click.option("--select", metavar="KEY.PATH", help="The weights at this place of a torch checkpoint."),
)  # fmt: skip

#: What a plan depends on, beside ``--to``: the same for ``convert`` and for ``inspect --to``.
_POLICY: tuple[Callable[[F], F], ...] = (
    click.option("--strip-wrappers", is_flag=True, help="Take 'module.', '_orig_mod.' and the like out of names."),
    click.option("--preset", default="auto", show_default=True, metavar="auto|none|NAME",
                 help="What the architecture needs in FP32: by config.json or tensor names, nothing, or a named table "
                 "(see 'precconv presets')."),
    click.option("--norms", type=click.Choice(["fp32", "cast"]), default="fp32", show_default=True,
                 help="Keep normalisation layers in FP32, or cast them like the rest."),
    click.option("--mixed", type=click.Choice(["keep", "cast"]), default="keep", show_default=True,
                 help="FP32 tensors of a source that is mostly 16-bit: left so on purpose, or cast."),
    click.option("--keep", multiple=True, metavar="GLOB", help="Tensors that keep their dtype; repeatable."),
    click.option("--rule", multiple=True, metavar="GLOB=ACTION",
                 help="ACTION: a dtype, keep or drop; repeatable, the first match wins."),
    click.option("--rules", type=click.Path(), multiple=True, metavar="FILE.toml", help="The same, from a file."),
)  # fmt: skip
_POLICY_NAMES = ("strip_wrappers", "preset", "norms", "mixed", *_RULE_OPTIONS)

_CONVERSION: tuple[Callable[[F], F], ...] = (
    click.option("--to", required=True, metavar="DTYPE", help="fp32, fp16 or bf16, or one of their usual aliases."),
    click.option("-o", "--output", type=click.Path(), metavar="PATH",
                 help="File or directory; default: NAME.DTYPE.SUFFIX beside SRC."),
    click.option("--format", type=click.Choice(["same", "safetensors", "pt"]), default="same", show_default=True,
                 help="The output's format, where -o does not say it."),
    *_CHOICE,
    click.option("--shared", type=click.Choice(["clone", "drop"]), default="clone", show_default=True,
                 help="Tied tensors in safetensors: each with the data, or one, the others named in the metadata."),
    *_POLICY,
    click.option("--on-overflow", type=click.Choice(["error", "keep", "fp32", "bf16", "clamp", "ieee"]),
                 default="error", show_default=True,
                 help="Finite values too large for the target: refuse, give their tensor its source dtype, FP32 or "
                 "BF16, clamp them to the largest finite value, or let them become Inf."),
    click.option("--on-nonfinite", type=click.Choice(["warn", "error"]), default="warn", show_default=True,
                 help="NaN and Inf that the source already holds."),
    click.option("--max-underflow", type=float, metavar="SHARE",
                 help="Refuse when more than this share of a tensor's nonzero values becomes 0."),
    click.option("--verify", type=click.Choice(["sample", "full", "none"]), default="sample", show_default=True,
                 help="How much of the output is read back and compared with a fresh cast."),
    click.option("--workers", type=int, metavar="N", help="Threads; default: the number of cores."),
    click.option("--dry-run", is_flag=True, help="Print the plan; read no tensor data, write nothing."),
    click.option("--report", type=click.Path(), metavar="FILE",
                 help="Write a JSON report, with every tensor's errors measured."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option("--durable", is_flag=True, help="Wait until the output is on the disk before it gets its name."),
    click.option("--force", is_flag=True, help="Replace an existing output."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
    click.option("-v", "--verbose", is_flag=True, help="List every tensor."),
)  # fmt: skip


def _policy(options: dict[str, Any]) -> dict[str, Any]:
    """Take what a plan depends on out of a command's options; the rules in the order they were given."""
    taken = {name: options.pop(name) for name in ("to", *_POLICY_NAMES)}
    return {name: value for name, value in taken.items() if name not in _RULE_OPTIONS} | {"rule": _rules()}


@cli.command(cls=_Ordered)
@click.argument("src", metavar="SRC", type=click.Path())
@_options(*_CONVERSION)
def convert(src: str, *, dry_run: bool, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:
    """Convert one checkpoint file to another precision."""
    with _reported():
        policy = _policy(options) | {name: options.pop(name) for name in _PLAN_ONLY}
        if dry_run and options["report"] is not None:
            raise click.UsageError("--dry-run writes nothing, --report neither: --json prints the plan")
        if dry_run:
            _print_plan(src, run_plan(src, **policy), as_json=as_json, quiet=quiet, verbose=verbose)
            return
        try:
            with _progress(quiet=quiet) as progress:
                report = run_convert(src, progress=progress, **policy, **options)
        except PrecconvError as e:
            if as_json and e.report is not None:
                with _unread():
                    click.echo(e.report.to_json())
            raise
        with _undisturbed(), _unread():
            _print_report(report, as_json=as_json, quiet=quiet, verbose=verbose)


def _print_plan(src: str, made: Plan, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    if not quiet:
        for line in made.warnings:
            _say(text.printable(f"warning: {src}: {line}"))
    if as_json:
        click.echo(json.dumps(plan_dict(made)))
    elif not quiet:
        click.echo(text.plan(made, verbose=verbose))


def _print_report(report: Report, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    if not quiet:
        for line in text.warnings(report):
            _say(f"warning: {line}")
    if as_json:
        click.echo(report.to_json())
    elif not quiet:
        click.echo(text.report(report, verbose=verbose))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar in bytes on a terminal, nothing elsewhere."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    columns = shutil.get_terminal_size().columns  # tqdm shows nothing on a terminal that says it has none
    with tqdm(unit="B", unit_scale=True, leave=False, file=sys.stderr, ncols=columns) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@cli.command(cls=_Ordered)
@click.argument("src", metavar="SRC", type=click.Path())
@_options(*_CHOICE)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print the totals only, not the tensors.")
@click.option("--to", metavar="DTYPE", help="Show what a conversion would do, by reason and dtypes.")
@_options(*_POLICY)
@click.option("-v", "--verbose", is_flag=True, help="With --to, list every tensor.")
def inspect(
    src: str,
    *,
    weights: Weights,
    select: str | None,
    as_json: bool,
    quiet: bool,
    to: str | None,
    verbose: bool,
    **options: Any,
) -> None:
    """Show what is inside a checkpoint, from its header alone."""
    with _reported():
        if to is not None:
            made = run_plan(src, weights=weights, select=select, **_policy({"to": to, **options}))
            _print_plan(src, made, as_json=as_json, quiet=False, verbose=verbose)
            return
        context = click.get_current_context()
        for name in _POLICY_NAMES:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--{name.replace('_', '-')} is about a conversion: say --to which dtype", context
                )
        found = run_inspect(src, weights=weights, select=select)
        click.echo(json.dumps(found.to_dict()) if as_json else text.inspection(found, tensors=not quiet))


@cli.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the tables as JSON.")
def presets(name: str | None, *, as_json: bool) -> None:
    """List the architecture tables, or show what one of them keeps in FP32, and why."""
    from .presets import list_presets, load

    with _reported():
        tables = list_presets() if name is None else (load(name),)
        if as_json:
            click.echo(json.dumps([asdict(t) for t in tables], ensure_ascii=False))
        else:
            click.echo(text.presets(tables) if name is None else text.preset(tables[0]))


def main() -> None:
    """The ``precconv`` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a tensor's name may not fit the terminal's encoding
    try:
        cli(prog_name="precconv")
    finally:
        # torch takes a while to unload; what was printed and published by now is no longer interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
