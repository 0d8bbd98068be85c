"""``precconv presets``: the architecture tables."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from .. import text
from ..presets import list_presets, load
from .base import reported

__all__ = ["presets"]


@click.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the tables as JSON.")
def presets(name: str | None, *, as_json: bool) -> None:
    """List the architecture tables, or show what one of them keeps in FP32, and why."""
    with reported():
        tables = list_presets() if name is None else (load(name),)
        if as_json:
            click.echo(json.dumps([asdict(t) for t in tables], ensure_ascii=False))
        else:
            click.echo(text.presets(tables) if name is None else text.preset(tables[0]))
