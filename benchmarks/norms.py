"""Precision and recall of the norm finder on models whose module classes tell the truth.

    python benchmarks/norms.py TRUTH.jsonl.gz [--misses N]
    python benchmarks/norms.py TRUTH.jsonl.gz --sample OUT.jsonl.gz

The truth file has one model a line: ``{"model", "library", "split", "tensors": {name: {"shape", "is_norm",
"dtype", "kind"}}}``; ``dtype`` is FP32 where it is missing.  Kind "affine" marks what only scales and shifts
under a norm's name (MobileBERT's NoNorm, ResMLP's Affine, DynamicTanh): not scored, counted beside the score.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from precconv.dtypes import dtype
from precconv.norms import find_norms
from precconv.tensors import TensorInfo

Model = dict[str, Any]
#: Compressed size up to which a sample grows.
SAMPLE_BYTES = 140_000


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of tensors; adds up over models."""

    hits: int = 0
    false_positives: int = 0
    misses: int = 0
    correct_rejections: int = 0
    affine: int = 0  #: not scored, found as norms
    affine_rejected: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def precision(self) -> float:
        found = self.hits + self.false_positives
        return self.hits / found if found else 1.0

    @property
    def recall(self) -> float:
        norms = self.hits + self.misses
        return self.hits / norms if norms else 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One tensor on which the finder and the truth are compared."""

    model: Model
    name: str
    found: bool

    @property
    def truth(self) -> dict[str, Any]:
        truth: dict[str, Any] = self.model["tensors"][self.name]
        return truth

    @property
    def kind(self) -> str:
        """The truth's own word; else a norm's leaf, or the rank of what is no norm."""
        if "kind" in self.truth:
            return str(self.truth["kind"])
        if self.truth["is_norm"]:
            return f"norm {self.name.rpartition('.')[2]}"
        return "vector" if sum(n != 1 for n in self.truth["shape"]) < 2 else "matrix"

    @property
    def outcome(self) -> str:
        """The field of ``Score`` that counts it."""
        if self.kind == "affine":
            return "affine" if self.found else "affine_rejected"
        if self.truth["is_norm"]:
            return "hits" if self.found else "misses"
        return "false_positives" if self.found else "correct_rejections"

    @property
    def pattern(self) -> str:
        """The tensor's last three components, numbers as ``N``, and its rank."""
        tail = ".".join(self.name.split(".")[-3:])
        return f"{re.sub(r'[0-9]+', 'N', tail)} {len(self.truth['shape'])}-d"


def read(path: Path) -> Iterator[Model]:
    """The models of a truth file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def infos(model: Model) -> list[TensorInfo]:
    """A model's tensors as a reader gives them, without places in a file."""
    return [
        TensorInfo(name, dtype(truth.get("dtype", "fp32")), tuple(truth["shape"]), 0, 0)
        for name, truth in model["tensors"].items()
    ]


def judge(models: Iterable[Model]) -> Iterator[Verdict]:
    """Every floating-point tensor of every model."""
    for model in models:
        tensors = infos(model)
        found = find_norms(tensors)
        yield from (Verdict(model, i.name, i.name in found) for i in tensors if i.dtype.is_castable)


def score(verdicts: Iterable[Verdict]) -> Score:
    """The sum over tensors."""
    return Score(**Counter(verdict.outcome for verdict in verdicts))


def print_scores(title: str, groups: dict[str, list[Verdict]]) -> None:
    """A table row a group, the worst first."""
    print(f"\n{title:<24} {'norms':>7} {'others':>7}  precision    recall  FP  FN")
    rows = sorted(((name, score(group)) for name, group in groups.items()), key=lambda row: row[1].recall)
    for name, s in rows:
        norms, others = s.hits + s.misses, s.correct_rejections + s.false_positives
        unscored = f"  affine: {s.affine} of {s.affine + s.affine_rejected} found" if norms + others == 0 else ""
        print(
            f"{name:<24} {norms:>7} {others:>7} {s.precision:>9.3%} {s.recall:>9.3%} "
            f"{s.false_positives:>3} {s.misses:>3}{unscored}"
        )


def print_report(path: Path, misses: int) -> None:
    """Scores overall and by group, then the patterns that are most often wrong, with an example each."""
    start = time.perf_counter()
    verdicts = list(judge(read(path)))
    seconds = time.perf_counter() - start
    models = len({id(v.model) for v in verdicts})
    print(f"{models} models, {len(verdicts)} floating-point tensors, {seconds:.1f} s with reading")
    keys: dict[str, Callable[[Verdict], str]] = {
        "all": lambda _: "all",
        "split": lambda v: str(v.model["split"]),
        "library": lambda v: str(v.model["library"]),
        "kind": lambda v: v.kind,
    }
    for title, key in keys.items():
        groups: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            groups[key(verdict)].append(verdict)
        print_scores(title, groups)
    wrong: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.outcome in ("false_positives", "misses"):
            wrong[verdict.outcome, verdict.pattern].append(verdict)
    print(f"\n{sum(map(len, wrong.values()))} wrong")
    for (outcome, pattern), group in sorted(wrong.items(), key=lambda item: -len(item[1]))[:misses]:
        name, truth = group[0].name, group[0].truth
        print(f"{len(group):>5} {outcome}: {pattern}; {group[0].model['model']}: {name} {truth['shape']}")


def sample(models: Iterable[Model], limit: int = SAMPLE_BYTES) -> list[Model]:
    """Few models with many layouts: greedily the one with the most new patterns a byte.

    A pattern new to a library counts, so that every library and kind is there.  Models stay whole: what
    the finder knows it knows from siblings.
    """
    left = [(m, len(gzip.compress(_line(m))), _layouts(m)) for m in models]
    covered: set[tuple[str, str, str]] = set()
    chosen: list[Model] = []
    size = 0
    while left:
        left.sort(key=lambda item: -len(item[2] - covered) / (item[1] + 300))
        model, cost, layouts = left.pop(0)
        if layouts <= covered:
            break
        if size + cost <= limit:
            size, covered = size + cost, covered | layouts
            chosen.append(model)
    return sorted(chosen, key=lambda model: (model["library"], model["model"]))


def _layouts(model: Model) -> set[tuple[str, str, str]]:
    castable = (Verdict(model, name, found=False) for name in model["tensors"])
    return {(model["library"], v.kind, v.pattern if v.kind != "matrix" else "") for v in castable}


def _line(model: Model) -> bytes:
    return json.dumps(model, separators=(",", ":")).encode() + b"\n"


def write_sample(truth: Path, out: Path) -> None:
    """The same bytes each time: no time stamp, no file name in the gzip header."""
    out.write_bytes(gzip.compress(b"".join(map(_line, sample(read(truth)))), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truth", type=Path)
    parser.add_argument("--misses", type=int, default=20, help="how many patterns of wrong answers to show")
    parser.add_argument("--sample", type=Path, metavar="OUT", help="write a compact sample instead")
    options = parser.parse_args()
    if options.sample is not None:
        write_sample(options.truth, options.sample)
    else:
        print_report(options.truth, options.misses)


if __name__ == "__main__":
    main()
