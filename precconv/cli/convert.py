"""``precconv convert``, which is what ``precconv SRC`` means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from .. import text
from ..api import convert as run_convert
from ..api import plan as run_plan
from ..errors import PrecconvError
from ..plan import Plan
from ..report import Report, plan_dict
from .base import progress_bar, reported, say, undisturbed, unread
from .options import CHOICE, POLICY, PUSH, REPO, REPO_NAMES, F, Ordered, add_options, policy_options

__all__ = ["convert", "print_plan"]

#: What a plan depends on besides, and ``inspect`` has otherwise.
_PLAN_ONLY = ("lossless_only", "output", "format", "weights", "select", "shared", "provenance", *REPO_NAMES)


_CONVERSION: tuple[Callable[[F], F], ...] = (
    click.option("--to", required=True, metavar="DTYPE",
                 help="fp32, fp16 or bf16, or one of their usual aliases; auto: for each tensor the smallest of them "
                 "that holds all its values."),
    click.option("--lossless-only", is_flag=True, help="Keep the dtype of what would lose a value by the cast."),
    click.option("-o", "--output", type=click.Path(), metavar="PATH",
                 help="File or directory; default: NAME.DTYPE.SUFFIX beside a file, DIR-DTYPE beside a directory."),
    click.option("--format", type=click.Choice(["same", "safetensors", "pt"]), default="same", show_default=True,
                 help="The output's format, where -o does not say it."),
    *CHOICE,
    click.option("--shared", type=click.Choice(["clone", "drop"]),
                 help="Tied tensors in safetensors: each with the data (default for a file), or one, and the metadata "
                 "names the others (default for a transformers model)."),
    *REPO,
    *PUSH,
    *POLICY,
    click.option("--on-overflow", type=click.Choice(["error", "keep", "fp32", "bf16", "clamp", "ieee"]),
                 default="error", show_default=True,
                 help="Finite values too large for the target: refuse, give their tensor its source dtype, FP32 or "
                 "BF16, clamp them to the largest finite value, or let them become Inf."),
    click.option("--on-nonfinite", type=click.Choice(["warn", "error"]), default="warn", show_default=True,
                 help="NaN and Inf that the source already holds."),
    click.option("--max-underflow", type=float, metavar="SHARE",
                 help="Refuse when more than this share of a tensor's nonzero values becomes 0."),
    click.option("--rounding", type=click.Choice(["nearest", "stochastic"]), default="nearest", show_default=True,
                 help="From FP32 and FP64 to 16 bits: to the nearest value, ties to even, or up with the probability "
                 "that the remainder is."),
    click.option("--seed", type=int, metavar="N", help="Of stochastic rounding; default: 0."),
    click.option("--verify", type=click.Choice(["sample", "full", "none"]), default="sample", show_default=True,
                 help="How much of the output is read back and compared with a fresh cast."),
    click.option("--no-provenance", "provenance", is_flag=True, flag_value=False, default=True,
                 help="Do not record in a safetensors output how it was made."),
    click.option("--workers", type=int, metavar="N", help="Threads; default: the number of cores."),
    click.option("--dry-run", is_flag=True, help="Print the plan, write nothing; read no tensor data, "
                 "unless --to auto or --lossless-only needs it."),
    click.option("--report", type=click.Path(), metavar="FILE",
                 help="Write a JSON report, with every tensor's errors measured."),
    click.option("--html", type=click.Path(), metavar="FILE",
                 help="The same as a page for a browser, with a map of how large the source's values are."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option("--durable", is_flag=True, help="Wait until the output is on the disk before it gets its name."),
    click.option("--force", is_flag=True, help="Replace an existing output."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
    click.option("-v", "--verbose", is_flag=True, help="List every tensor."),
)  # fmt: skip


@click.command(cls=Ordered)
@click.argument("src", metavar="SRC", type=click.Path())
@add_options(*_CONVERSION)
def convert(src: str, *, dry_run: bool, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:
    """Convert a checkpoint file, a model directory or a model on the Hub to another precision."""
    with reported():
        policy = policy_options(options) | {name: options.pop(name) for name in _PLAN_ONLY}
        for name in ("report", "html"):
            if dry_run and options[name] is not None:
                raise click.UsageError(f"--dry-run writes nothing, --{name} neither: --json prints the plan")
        if dry_run:
            with progress_bar(quiet=quiet) as progress:
                made = run_plan(src, progress=progress, **policy)
            print_plan(src, made, as_json=as_json, quiet=quiet, verbose=verbose)
            return
        try:
            with progress_bar(quiet=quiet) as progress:
                report = run_convert(src, progress=progress, **policy, **options)
        except PrecconvError as e:
            if as_json and e.report is not None:
                with unread():
                    click.echo(e.report.to_json())
            raise
        with undisturbed(), unread():
            _print_report(report, as_json=as_json, quiet=quiet, verbose=verbose)


def print_plan(src: str, made: Plan, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    if not quiet:
        for line in made.warnings:
            say(text.printable(f"warning: {src}: {line}"))
    if as_json:
        click.echo(json.dumps(plan_dict(made)))
    elif not quiet:
        click.echo(text.plan(made, verbose=verbose))


def _print_report(report: Report, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    if not quiet:
        for line in text.warnings(report):
            say(f"warning: {line}")
    if as_json:
        click.echo(report.to_json())
    elif not quiet:
        click.echo(text.report(report, verbose=verbose))
