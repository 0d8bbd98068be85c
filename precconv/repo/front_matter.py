"""Setting keys in a model card's YAML front matter.

The text is edited and read again, so that a card keeps its comments, quotes and line ends; only where that does not
give what was meant is the block written anew, by the library that the Hub's own tools use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

__all__ = ["line_break", "with_keys"]

#: Characters; the largest cards, of embedding models with all their results, have some hundred thousand.
_LIMIT = 1 << 20


def with_keys(text: str, keys: Mapping[str, str]) -> str | None:
    """The card with these top-level keys; None where there is front matter that cannot be read as YAML.

    Keys that are there keep their place, others come last.  A card without front matter gets it.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK  # here, because it takes 0.3 s

    bare = text.removeprefix("\ufeff")
    mark = text[: len(text) - len(bare)]
    found = REGEX_YAML_BLOCK.search(bare)
    if found is None:
        eol = line_break(bare)
        return f"{mark}---{eol}{_dump(keys, eol)}---{eol}{bare}"
    try:
        block = _with_keys(found[2], keys, line_break(found[1]))
    except (RecursionError, ValueError):  # deeper, or with longer integers, than Python reads or writes
        block = None
    return None if block is None else f"{mark}{bare[: found.start(2)]}{block}{bare[found.end(2) :]}"


def line_break(text: str) -> str:
    """The first line's end; that of Unix where there is but one line."""
    found = re.search(r"\r?\n", text)
    return found[0] if found else "\n"


def _with_keys(block: str, keys: Mapping[str, str], eol: str) -> str | None:
    read = _read(block + eol)  # with its last line's end, which literal text takes in
    if read is None:
        return None
    root, data = read
    wanted = _dump({**data, **keys}, eol)
    edited = _edited(block, root, {k: v for k, v in keys.items() if data.get(k) != v}, eol)
    again = _read(edited + eol)
    # Compared as text, where NaN is NaN and what is shared is seen once, however often it is named.
    return edited if again is not None and _dump(again[1], eol) == wanted else wanted.removesuffix(eol)


def _read(block: str) -> tuple[yaml.MappingNode | None, dict[Any, Any]] | None:
    """Nodes, with their places in the text, and data; None for what is no mapping, or not to be read."""
    import yaml

    if len(block) > _LIMIT:
        return None
    try:
        loader = yaml.SafeLoader(block)
        root = loader.get_single_node()
        if root is None:
            return None, {}
        if not isinstance(root, yaml.MappingNode) or _merges(root):
            return None
        data = loader.construct_document(root)
    # The library lets through what its constructors stumble over: a month 13, an integer without digits.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError):
        return None
    return (root, data) if isinstance(data, dict) else None  # a set is a mapping too


def _merges(root: yaml.Node) -> bool:
    """Whether a mapping takes in others (``<<``): a few lines of those can ask for more keys than memory holds."""
    seen: set[int] = set()
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.tag == "tag:yaml.org,2002:merge":
            return True
        if isinstance(node.value, list):  # of nodes, or of pairs of them
            nodes += (n for child in node.value for n in (child if isinstance(child, tuple) else (child,)))
    return False


def _edited(block: str, root: yaml.MappingNode | None, keys: Mapping[str, str], eol: str) -> str:
    """The block with a line for each key, in place of its own where there is one; not yet proved."""
    present = {key.value: (key, value) for key, value in (root.value if root else ())}
    cuts = []
    for key, value in keys.items():
        line = _dump({key: value}, eol).removesuffix(eol)
        if key in present:
            start, end = present[key][0].start_mark.index, _end(present[key][1])
            cuts.append((start, start + len(block[start:end].rstrip()), line))
        else:
            cuts.append((len(block), len(block), eol + line if block else line))
    pieces, done = [], 0
    for start, end, line in sorted(cuts, key=lambda cut: cut[0]):
        pieces += [block[done:start], line]
        done = end
    return "".join([*pieces, block[done:]])


def _end(node: yaml.Node) -> int:
    """Where a value ends; a block of lines is said to end where the next key begins, after any comments."""
    if isinstance(node.value, list) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _dump(data: Mapping[Any, Any], eol: str) -> str:
    import yaml

    return str(yaml.dump(dict(data), sort_keys=False, allow_unicode=True, line_break=eol))
