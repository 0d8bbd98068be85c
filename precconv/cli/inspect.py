"""``precconv inspect``: what is inside, from headers alone."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from .. import text
from ..api import inspect as run_inspect
from ..api import plan as run_plan
from ..weights import Weights
from .base import reported
from .convert import print_plan
from .options import CHOICE, POLICY, POLICY_NAMES, Ordered, add_options, policy_options

__all__ = ["inspect"]


@click.command(cls=Ordered)
@click.argument("src", metavar="SRC", type=click.Path())
@add_options(*CHOICE)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print the totals only, not the tensors.")
@click.option("--to", metavar="DTYPE", help="Show what a conversion would do, by reason and dtypes.")
@add_options(*POLICY)
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
    with reported():
        if to is not None and to.lower() == "auto":
            raise click.UsageError("inspect reads headers alone, auto depends on the values: see 'convert --dry-run'")
        if to is not None:
            made = run_plan(src, weights=weights, select=select, **policy_options({"to": to, **options}))
            print_plan(src, made, as_json=as_json, quiet=False, verbose=verbose)
            return
        context = click.get_current_context()
        for name in POLICY_NAMES:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--{name.replace('_', '-')} is about a conversion: say --to which dtype", context
                )
        found = run_inspect(src, weights=weights, select=select)
        click.echo(json.dumps(found.to_dict()) if as_json else text.inspection(found, tensors=not quiet))
