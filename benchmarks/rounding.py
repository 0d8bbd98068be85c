"""What stochastic rounding costs: conversions of one file with it and to nearest, in turns, in one process.

``python benchmarks/rounding.py SOURCE [--rounds N] [--to DTYPE]`` prints the seconds of each and the median of the
ratios within the rounds, and ends with 1 where that is more than 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import precconv
from precconv.request import Rounding

LIMIT = 3.0


def seconds(source: Path, to: str, output: Path, rounding: Rounding) -> float:
    start = time.perf_counter()
    precconv.convert(source, to=to, output=output, rounding=rounding, on_overflow="ieee", force=True)
    return time.perf_counter() - start


def ratios(source: Path, to: str, output: Path, rounds: int) -> list[float]:
    """Stochastic over nearest, round by round; the first, which warms the page cache, is not counted."""
    found = []
    for n in range(rounds + 1):
        nearest, stochastic = (seconds(source, to, output, r) for r in ("nearest", "stochastic"))
        if n:
            print(f"{to}: nearest {nearest:.3f} s, stochastic {stochastic:.3f} s, {stochastic / nearest:.2f} x")
            found.append(stochastic / nearest)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--to", choices=["bf16", "fp16"], action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output-dir", type=Path, help="for the outputs, removed at the end; default: beside the source"
    )
    args = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=args.output_dir or args.source.parent) as folder:
        for to in args.to or ["bf16", "fp16"]:
            median = statistics.median(ratios(args.source, to, Path(folder) / "out.safetensors", args.rounds))
            print(f"{to}: median {median:.2f} x of nearest, at most {LIMIT:g} wanted (torch {torch.__version__})")
            worst = max(worst, median)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
