"""``precconv diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

import json
from typing import Any

import click

from .. import text
from ..diff import diff as run_diff
from ..errors import NumericError
from .base import progress_bar, reported

__all__ = ["diff"]

_WEIGHTS = click.Choice(["auto", "model", "ema", "all"])


@click.command()
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--atol", type=float, metavar="X", help="Elements are equal where |a - b| <= atol + rtol * |a|.")
@click.option(
    "--rtol", type=float, metavar="X", help="Default without either: bit for bit, by value where the dtypes differ."
)
@click.option("--strip-wrappers", is_flag=True, help="Match names without 'module.', '_orig_mod.' and the like.")
@click.option(
    "--weights-a",
    type=_WEIGHTS,
    default="auto",
    show_default=True,
    help="Which weights, where A is a training checkpoint.",
)
@click.option(
    "--weights-b",
    type=_WEIGHTS,
    default="auto",
    show_default=True,
    help="Which weights, where B is a training checkpoint.",
)
@click.option("--select-a", metavar="KEY.PATH", help="The weights at this place of A, a torch checkpoint.")
@click.option("--select-b", metavar="KEY.PATH", help="The weights at this place of B, a torch checkpoint.")
@click.option("--workers", type=int, metavar="N", help="Threads; default: the number of cores.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="Show so many of the tensors that differ, the worst first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, every tensor in it.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors: the exit code says it.")
def diff(a: str, b: str, *, top: int, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare two checkpoints tensor by tensor; A is the reference.

    Exit code 0 where they are equal, 3 where they are not.
    """
    with reported():
        with progress_bar(quiet=quiet) as progress:
            found = run_diff(a, b, progress=progress, **options)
        if as_json:
            click.echo(json.dumps(found.to_dict(), allow_nan=False))
        elif not quiet:
            click.echo(text.diff(found, top=top))
        if not found.equal:
            click.get_current_context().exit(NumericError.exit_code)
