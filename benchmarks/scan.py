"""Seconds to scan a checkpoint, and to convert it: in turn, in one run.

    python benchmarks/scan.py FILE ... [--rounds N] [--to DTYPE]

Both start with torch imported and the file in the page cache.  The output of the conversion goes to a temporary
directory beside the file, and is removed before the next round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: F401 -- loaded before the clock starts

import precconv

#: How many times as long as a conversion a scan may take.
LIMIT = 3.0


class Taken(NamedTuple):
    """Seconds by the clock, and of the processors: what others do at the same time hardly shows in those."""

    wall: float
    cpu: float


def seconds(work: Callable[[], object]) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def compare(path: Path, to: str, rounds: int) -> list[tuple[Taken, Taken]]:
    """What a conversion and a scan take, for each round but a first one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            output = Path(folder) / "out.safetensors"
            converted = seconds(lambda: precconv.convert(path, to=to, output=output))  # noqa: B023 -- called here
        taken.append((converted, seconds(lambda: precconv.scan(path))))
    return taken[1:]


def main(argv: list[str] | None = None) -> int:
    """A row for each file; 1 where a scan takes too long beside the conversion.

    The fastest of each is compared: whatever else the machine does only ever adds to it.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to", default="bf16")
    options = parser.parse_args(argv)
    worst = 0.0
    print(f"fastest of {options.rounds} rounds; a scan may take {LIMIT:g} x the conversion")
    for path in options.files:
        converted, scanned = zip(*compare(path, options.to, options.rounds), strict=True)
        wall, cpu = zip(*(map(min, zip(*times, strict=True)) for times in (converted, scanned)), strict=True)
        worst = max(worst, wall[1] / wall[0])
        for label, (one, other) in (("wall", wall), ("processors", cpu)):
            print(f"{path.name:<28} {label:<10}  convert {one:6.2f} s  scan {other:6.2f} s  ratio {other / one:.2f}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
