"""``precconv verify``: an output held against what its source and options make."""

from __future__ import annotations

import copy
from typing import Any

import click
from click.core import ParameterSource

from .. import text
from ..errors import VerificationError
from ..verification import SHAPING
from ..verification import verify as run_verify
from .base import progress_bar, reported
from .convert import convert
from .options import Ordered, given_rules

__all__ = ["verify"]

_RULES = ("keep", "rule", "rules")
#: The options of ``convert`` that shape an output.
_OPTIONS = {*SHAPING, *_RULES}


@click.command(cls=Ordered)
@click.argument("out", metavar="OUT", type=click.Path())
@click.option("--against", required=True, metavar="SRC", type=click.Path(), help="What it was made from.")
@click.option(
    "--report",
    type=click.Path(),
    metavar="FILE",
    help="The JSON report of the conversion; without one, the record in OUT says how it was made.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="GLOB",
    help="Files of a directory that do not matter, e.g. README.md; repeatable.",
)
@click.option(
    "--top", type=click.IntRange(min=0), default=20, show_default=True, metavar="N", help="Show so many mismatches."
)
@click.option("--workers", type=int, metavar="N", help="Threads; default: the number of cores.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, every mismatch in it.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors: the exit code says it.")
def verify(out: str, *, top: int, as_json: bool, quiet: bool, **options: Any) -> None:
    """Prove that OUT is what a conversion makes of SRC, every byte of it.

    The options of the conversion come from --report, or from the record in OUT; those that are given here come
    before them.  Exit code 0 where it is proven, 4 where it is not.
    """
    with reported():
        context = click.get_current_context()
        for name in _OPTIONS:
            value = options.pop(name)
            if name not in _RULES and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                options[name] = value
        with progress_bar(quiet=quiet) as progress:
            found = run_verify(out, rule=given_rules(), progress=progress, **options)
        if as_json:
            click.echo(found.to_json())
        elif not quiet:
            click.echo(text.proof(found, top=top))
        if not found.proven:
            context.exit(VerificationError.exit_code)


for _option in convert.params:  # the very same, but that none is needed and none has a default
    if _option.name in _OPTIONS:
        _shared = copy.copy(_option)
        assert isinstance(_shared, click.Option)
        _shared.required, _shared.show_default = False, False
        verify.params.append(_shared)
