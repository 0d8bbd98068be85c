"""``precconv scan``: read the values, write nothing, say what a cast would do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from .. import html, scan_text, text
from ..scanning import SAMPLE
from ..scanning import scan as run_scan
from .base import progress_bar, reported, say
from .options import CHOICE, COMPONENT, FROM_VARIANT, POLICY, Ordered, add_options, policy_options

__all__ = ["scan"]

_TOP = 20


@click.command(cls=Ordered)
@click.argument("src", metavar="SRC", type=click.Path())
@click.option("--to", metavar="DTYPE", help="The target that the verdict is about; default: fp16 and bf16.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Show the N tensors most at risk, 0 for all; default: {_TOP}, with --json all.",
)
@click.option("--sample", is_flag=True, help="Read part of every large tensor; of a model on the Hub, fetch no more.")
@click.option(
    "--sample-size", metavar="SIZE", help=f"What a sample has of a tensor at most; default: {text.size(SAMPLE)}."
)
@add_options(*CHOICE, COMPONENT, FROM_VARIANT, *POLICY)
@click.option("--workers", type=int, metavar="N", help="Threads; default: the number of cores.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write the result as a page.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict only.")
@click.option("-v", "--verbose", is_flag=True, help="Draw a histogram of each tensor's binary exponents.")
def scan(
    src: str,
    *,
    top: int | None,
    sample: bool,
    sample_size: str | None,
    page: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Read every value of a file or a model, write nothing: ranges, NaN, and what a cast would lose."""
    with reported():
        part = sample_size or (SAMPLE if sample else None)
        policy = policy_options(options)
        if page is not None:
            html.check_page_path(page, [Path(src)])
        with progress_bar(quiet=quiet) as progress:
            found = run_scan(src, sample=part, progress=progress, **policy, **options)
        if page is not None:
            html.write(found, page)
        if not quiet:
            for line in found.warnings:
                say(text.printable(f"warning: {src}: {line}"))
        shown = (None if as_json else _TOP) if top is None else top or None
        if as_json:
            click.echo(json.dumps(found.to_dict(shown), allow_nan=False))
            return
        blocks = scan_text.BLOCKS if _can_draw() else scan_text.ASCII
        click.echo(scan_text.scan(found, top=shown, histograms=verbose, quiet=quiet, blocks=blocks))


def _can_draw() -> bool:
    """Whether stdout's encoding has block characters."""
    try:
        scan_text.BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
