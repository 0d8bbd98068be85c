"""The model card of a converted repo: the source's own, with where it comes from and what became of its weights.

A source's card and the names in it are anybody's words: they are kept, and quoted so that they stay words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..dtypes import DType
from ..text import count, printable, size
from .front_matter import line_break, with_keys

__all__ = ["Card", "CardFacts", "Kept", "card"]

#: Each on a line of its own; what lies between is generated, and replaced by the next conversion.
_BEGIN, _END = "<!-- precconv:begin -->", "<!-- precconv:end -->"
_MARK = re.compile(r"(?<![^\r\n])[ \t]*<!--[ \t]*precconv:(begin|end)[ \t]*-->[ \t]*(?![^\r\n])")

#: How the Hub relates a model in another precision to its source; its other words are finetune, adapter and merge
#: (Hub documentation, "Model Cards", specifying a base model).
_RELATION = "quantized"

_ROWS = 30  #: of the table
_WIDEST = 500  #: characters of one quoted text

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", re.ASCII)
#: What Markdown reads in a line, or at its start; tables are cut at bars before anything else is read.
_SPECIAL = re.compile(r"[\\`*_\[\]~$]|:(?=//)|\A[-+=#]")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"})


class Kept(NamedTuple):
    """Tensors that did not become the target, by reason; all of them where there is no one target."""

    why: str
    dtype: DType  #: what they are in the output
    tensors: int
    nbytes: int  #: in the output


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a conversion has to say about itself."""

    source: str  #: ``org/name``, or a directory's bare name
    target: DType | None  #: None where it was chosen for each tensor
    version: str  #: of precconv
    tensors: int  #: converted to the target, or to any other dtype than they had
    bytes_before: int  #: of those
    bytes_after: int
    base_model: str | None = None  #: a repo id
    commit: str | None = None  #: of the source
    options: str = ""  #: of the command, those that shaped the result
    kept: Sequence[Kept] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """A README.md and what could not be done for it."""

    text: str
    warnings: tuple[str, ...] = ()


def card(readme: str | None, facts: CardFacts) -> Card:
    """The card for a conversion's result, made from the source's, line ends as they are there; None: there is none.

    ``base_model`` and ``base_model_relation`` are set where the base is known; else the front matter is not looked at.
    """
    text = _with_section(readme or "", facts)
    if facts.base_model is None:
        return Card(text)
    stated = with_keys(text, {"base_model": facts.base_model, "base_model_relation": _RELATION})
    if stated is None:
        return Card(text, ("README.md: its front matter cannot be read as YAML, so it does not name the base model",))
    return Card(stated)


def _with_section(readme: str, facts: CardFacts) -> str:
    """The section in place of the one there is, wherever that is now, or at the end.

    Copies of it are replaced as well.  A marker without its partner means nothing and stays.
    """
    eol = line_break(readme)
    section = eol.join(_section(facts))
    marks = [*_MARK.finditer(readme)]
    old = [(a.start(), b.end()) for a, b in pairwise(marks) if (a[1], b[1]) == ("begin", "end")]
    if not old:
        return f"{readme}{_gap(readme, eol)}{section}{eol}"
    pieces, done = [], 0
    for start, end in old:
        pieces += [readme[done:start], section]
        done = end
    return "".join([*pieces, readme[done:]])


def _gap(text: str, eol: str) -> str:
    """What makes a blank line after the text."""
    if not text or text.endswith(eol * 2):
        return ""
    return eol if text.endswith(eol) else eol * 2


def _section(facts: CardFacts) -> Iterator[str]:
    heading = "without loss" if facts.target is None else f"to {facts.target.name}"
    yield from (_BEGIN, f"## Converted {heading}", "", _paragraph(facts))
    if facts.kept:
        yield from ("", "| reason | dtype | tensors | size |", "| --- | --- | ---: | ---: |")
        yield from (f"| {' | '.join(row)} |" for row in _rows(facts.kept))
    if facts.notes:
        yield from ("", *(f"- {_plain(note)}" for note in facts.notes))
    yield from ("", _END)


def _paragraph(facts: CardFacts) -> str:
    base = facts.base_model if facts.base_model is not None else facts.source
    link = facts.base_model is not None and _REPO_ID.fullmatch(base)
    source = f"[{_plain(base)}](https://huggingface.co/{base})" if link else _plain(base)
    at = f" at commit {_code(facts.commit)}" if facts.commit else ""
    options = f" ({_code(facts.options)})" if facts.options else ""
    to = "each tensor to the smallest dtype that holds its values" if facts.target is None else facts.target.torch
    converted = f"converted, {to}," if facts.target is None else f"converted to {to}"
    words = [
        f"The weights of {source}{at}, {converted} by precconv {_plain(facts.version)}{options}:",
        f"{count(facts.tensors, 'tensor')}, {size(facts.bytes_before)} before and {size(facts.bytes_after)} after.",
    ]
    if facts.kept and facts.target is not None:
        others = count(sum(k.tensors for k in facts.kept), "other tensor")
        words.append(f"Not {facts.target.torch}: {others}, {size(_total(facts.kept))}.")
    return " ".join(words)


def _rows(kept: Sequence[Kept]) -> Iterator[list[str]]:
    shown = kept if len(kept) <= _ROWS else kept[: _ROWS - 1]
    for k in shown:
        yield [_plain(k.why), k.dtype.name, f"{k.tensors:,}", size(k.nbytes)]
    if rest := kept[len(shown) :]:
        yield [count(len(rest), "more reason"), "", f"{sum(k.tensors for k in rest):,}", size(_total(rest))]


def _total(kept: Sequence[Kept]) -> int:
    return sum(k.nbytes for k in kept)


def _code(text: str) -> str:
    """As code; between backticks nothing can be escaped, not a backtick and not a marker of ours."""
    text = _clipped(printable(text))
    if not set("`<\\") & set(text):
        return f"`{text}`"
    return f"<code>{_escaped(text)}</code>"


def _plain(text: str) -> str:
    """As words: no Markdown, no HTML, no other line."""
    return _escaped(_clipped(printable(text)))


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text.translate(_ENTITIES))


def _clipped(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST // 2]}…{text[-_WIDEST // 2 + 1 :]}"
