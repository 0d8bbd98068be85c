"""The command line: parses, calls the library, prints.  Results go to stdout, talk and progress to stderr.

A module here that defines a command is one: ``cli`` names them all.
"""

from __future__ import annotations

import difflib
import signal
import sys
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from .._version import __version__
from .batch import batch
from .convert import convert
from .diff import diff
from .inspect import inspect
from .presets import presets
from .scan import scan
from .verify import verify

__all__ = ["cli", "main"]


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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="precconv")
def cli() -> None:
    """Change the precision of model checkpoints: streamed, checked, verified.

    \b
    precconv model.safetensors --to bf16          writes model.bf16.safetensors
    precconv inspect model.safetensors            shows what is inside
    precconv diff a.safetensors b.safetensors     shows what sets them apart
    precconv scan model.safetensors               shows what a cast would lose
    precconv verify out.safetensors --against model.safetensors
                                                  proves that it is its cast

    A first argument that is no command is a checkpoint to convert.
    """


for command in (convert, batch, diff, inspect, presets, scan, verify):
    cli.add_command(command)


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
