"""The first levels of a pickled object, for people: one line an entry, from the inert tree alone."""

from __future__ import annotations

from dataclasses import dataclass

from .tree import Tally, Tree

__all__ = ["Entry", "outline"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One place in the tree: its key path (empty for the root), what it is, and the tensors under it."""

    path: str
    kind: str
    tensors: Tally

    def __str__(self) -> str:
        line = f"{self.path or '(root)'}: {self.kind}"
        if self.tensors.count > 1:
            line += f", {self.tensors.count} tensors"
        return f"{line}, {self.tensors.nbytes:,} bytes" if self.tensors.count else line


def outline(root: object, *, depth: int = 2, width: int = 40) -> list[Entry]:
    """``depth`` levels, at most ``width`` entries of each container; state dicts inside stay closed."""
    tree = Tree(root)
    lines = [Entry("", tree.describe(root), tree.tally(root))]
    level = [("", root)]
    for _ in range(depth):
        below: list[tuple[str, object]] = []
        for path, node in level:
            inner = [] if tree.tensor(node) is not None else tree.entries(node)
            if path and inner and all(tree.tensor(value) is not None for _, value in inner):
                continue
            for key, value in inner[:width]:
                where = f"{path}.{key}" if path else key
                lines.append(Entry(where, tree.describe(value), tree.tally(value)))
                below.append((where, value))
            if len(inner) > width:
                lines.append(Entry(path, f"and {len(inner) - width} more", Tally()))
        level = below
    return lines
