"""Seconds to plan the conversion of a checkpoint with very many tensors.

    python benchmarks/planning.py [--tensors N] [--rounds N]

The files have a header and a hole for data: ``precconv.plan`` reads nothing else.  Names as models have them
repeat from layer to layer, and what was recognised once is looked up; the worst names never repeat.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import precconv
from benchmarks.inputs import ITEM, Shapes, header

#: Seconds that planning 100,000 tensors may take.
LIMIT = 2.0
TENSORS = 100_000
VECTOR, MATRIX = (256,), (64, 256)

Named = tuple[str, tuple[int, ...]]


def experts() -> Iterator[Named]:
    """A mixture of experts: a router, two norms, four projections and 256 experts a layer."""
    layer = 0
    while True:
        prefix = f"model.layers.{layer}."
        yield from ((f"{prefix}{norm}.weight", VECTOR) for norm in ("input_layernorm", "post_attention_layernorm"))
        yield from ((f"{prefix}self_attn.{p}_proj.weight", MATRIX) for p in "qkvo")
        yield f"{prefix}mlp.gate.weight", MATRIX
        for expert in range(256):
            for p in ("gate", "up", "down"):
                yield f"{prefix}mlp.experts.{expert}.{p}_proj.weight", MATRIX
        layer += 1


def flat() -> Iterator[Named]:
    """No modules at all: ``w00001``."""
    return ((f"w{i:05}", VECTOR) for i in range(sys.maxsize))


def numbered() -> Iterator[Named]:
    """A module for each tensor: ``block00001.norm00001.weight``."""
    return ((f"block{i:05}.norm{i:05}.weight", VECTOR) for i in range(sys.maxsize))


def random_words() -> Iterator[Named]:
    """A module for each tensor, and nothing in one's name that another has."""
    rng = random.Random(4)
    return (("".join(rng.choices(string.ascii_lowercase + "_", k=12)) + ".weight", VECTOR) for _ in iter(int, 1))


CASES: dict[str, Callable[[], Iterable[Named]]] = {
    "mixture of experts": experts,
    "flat names": flat,
    "numbered modules": numbered,
    "random words": random_words,
}


def write(shapes: Shapes, path: Path) -> Path:
    """A safetensors file of FP32 tensors, all zero."""
    head = header(shapes)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(prod(s) * ITEM for s in shapes.values()))
    return path


def measure(path: Path, rounds: int) -> float:
    """Median of the processor's seconds that a plan takes, from opening the file on; it waits for nothing."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        precconv.plan(path, to="bf16")
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main(argv: list[str] | None = None) -> int:
    """A row for each kind of names; 1 where one is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    slowest = 0.0
    print(f"planning {options.tensors:,} tensors, median of {options.rounds}; at most {LIMIT:g} s")
    with tempfile.TemporaryDirectory() as folder:
        for name, names in CASES.items():
            path = write(dict(islice(names(), options.tensors)), Path(folder) / "model.safetensors")
            seconds = measure(path, options.rounds)
            slowest = max(slowest, seconds)
            print(f"{name:<20} {seconds:6.2f} s  {seconds / options.tensors * 1e6:5.1f} us a tensor")
    return int(slowest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
