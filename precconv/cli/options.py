"""Options that commands share, and what the library gets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ..rules import Rule, read_rules

__all__ = [
    "CHOICE",
    "COMPONENT",
    "FROM_VARIANT",
    "POLICY",
    "POLICY_NAMES",
    "PUSH",
    "PUSH_NAMES",
    "REPO",
    "REPO_NAMES",
    "Ordered",
    "add_options",
    "given_rules",
    "policy_options",
]

F = TypeVar("F", bound=Callable[..., Any])


class Ordered(click.Command):
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


def given_rules() -> list[Rule]:
    """The rules of the command line, in the order in which they stand there."""
    given = click.get_current_context().meta["rules"]
    return [rule for name, value in given for rule in _RULE_OPTIONS[name](value)]


def add_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options of a command, in the order ``--help`` shows them."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


#: Which weights of a file are meant.
CHOICE: tuple[Callable[[F], F], ...] = (
    click.option("--weights", type=click.Choice(["auto", "model", "ema", "all"]), default="auto", show_default=True,
                 help="Which weights of a training checkpoint; with auto, an LDM model keeps its EMA twins."),
    click.option("--select", metavar="KEY.PATH", help="The weights at this place of a torch checkpoint."),
)  # fmt: skip

#: What a plan depends on, beside ``--to``: the same for ``convert`` and for ``inspect --to``.
POLICY: tuple[Callable[[F], F], ...] = (
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
POLICY_NAMES = ("strip_wrappers", "preset", "norms", "mixed", *_RULE_OPTIONS)


COMPONENT = click.option(
    "--component",
    multiple=True,
    metavar="NAME=DTYPE[,...]",
    help="Another target for a component of a model directory, or keep: unet=fp16,vae=keep.",
)
FROM_VARIANT = click.option("--from-variant", metavar="NAME", help="Read the weights of this variant.")
#: What a plan for a model directory depends on besides.
REPO: tuple[Callable[[F], F], ...] = (
    COMPONENT,
    click.option("--shard-size", metavar="SIZE", help="Cut into shards of at most this size, e.g. 5GB."),
    click.option("--variant", metavar="NAME", help="Write model.NAME.safetensors, as the Hub's variants are named."),
    FROM_VARIANT,
    click.option("--copy-all", is_flag=True,
                 help="Carry over also weights in other formats and variants, and training state."),
)  # fmt: skip
#: Where a model is published, and how.
PUSH: tuple[Callable[[F], F], ...] = (
    click.option("--push", metavar="REPO", help="Publish on the Hub, in one commit; kept here only where -o says so."),
    click.option("--private", is_flag=True, help="With --push: a repo that does not exist yet becomes private."),
    click.option("--branch", metavar="NAME", help="With --push: to this branch."),
    click.option("--pr", is_flag=True, help="With --push: as a pull request; an open one of the same is found again."),
    click.option("--low-disk", is_flag=True,
                 help="With --push: fetch, convert, send and remove one file of weights at a time."),
    click.option("--engine", type=click.Choice(["local", "ray"]),
                 help="With --push: shards are converted and sent by processes, or by tasks of a Ray cluster."),
    click.option("--address", metavar="auto|ray://...", help="With --engine ray: the cluster."),
)  # fmt: skip
PUSH_NAMES = ("push", "private", "branch", "pr", "low_disk", "engine", "address")
REPO_NAMES = ("component", "shard_size", "variant", "from_variant", "copy_all")


def policy_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take what a plan depends on out of a command's options; the rules in the order they were given."""
    taken = {name: options.pop(name) for name in ("to", *POLICY_NAMES)}
    return {name: value for name, value in taken.items() if name not in _RULE_OPTIONS} | {"rule": given_rules()}
