"""Compares the kernel with torch and with integer arithmetic over all patterns of FP32, FP16 and BF16.

``python benchmarks/exhaustive.py`` takes minutes and ends with a line to quote; ``--sample`` checks every
exponent in seconds.  Values must equal those of torch's ``.to()`` bit for bit, NaN included, and those of the
reference apart from the bits of NaN; the counts in ``Stats`` must be the reference's.  FP64 to 16 bits has
the reference alone: torch rounds it twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks import patterns as walk
from benchmarks.machine import cores
from benchmarks.reference import FORMATS, Layout, Patterns, counts, is_nan, magnitudes, round_patterns
from precconv.cast import Lane, cast_chunk, pair
from precconv.dtypes import DType, dtype
from precconv.stats import Stats

Kernel = Callable[[torch.Tensor, DType], tuple[torch.Tensor, Stats]]

STEP = 1 << 24  # patterns a task
VECTOR = 64  # elements; torch's code for the end of an array makes other NaN than that for the rest
INT = {16: (np.int16, torch.int16), 32: (np.int32, torch.int32), 64: (np.int64, torch.int64)}
#: Appending zeros to the mantissa is all that torch does here, so a signalling NaN goes through.
SIGNALLING_KEPT = {("bf16", "fp32")}


@dataclass(frozen=True, slots=True)
class Task:
    """Some patterns of one type, to be cast to another."""

    src: str
    dst: str
    kind: str  #: ``span``, ``exponents``, ``weights`` or ``hard``
    start: int = 0
    end: int = 0  #: of a span; of the others, how much


@dataclass(frozen=True, slots=True)
class Tally:
    """How many patterns were compared and how many went wrong; ``example`` is the first of those."""

    patterns: int = 0
    torch: int = 0  #: results that are not torch's
    reference: int = 0  #: results that are not the reference's, NaN that are not NaN or not quiet
    counts: int = 0  #: chunks whose statistics are wrong
    example: str = ""

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.patterns + other.patterns,
            self.torch + other.torch,
            self.reference + other.reference,
            self.counts + other.counts,
            self.example or other.example,
        )

    @property
    def is_clean(self) -> bool:
        return not (self.torch or self.reference or self.counts)


def lane_kernel() -> Kernel:
    """The streamed conversion's path through the kernel: kept buffers, one look at the result."""
    lane = Lane(walk.SLICE * 8)

    def kernel(x: torch.Tensor, to: DType) -> tuple[torch.Tensor, Stats]:
        p, n = pair(dtype(x.dtype), to), x.numel()
        lane.source(n * x.element_size())[:] = memoryview(x.view(torch.uint8).numpy().tobytes())
        y = torch.frombuffer(lane.cast(p, n), dtype=p.dst_torch)
        found = lane.survey(p, n, [(0, 0, n)])
        return y, found[0][1] if found else Stats(n)

    return kernel


def slices(task: Task) -> Iterator[Patterns]:
    """The task's patterns, in arrays of whole vectors, each at most a chunk of a conversion."""
    src, dst = FORMATS[task.src], FORMATS[task.dst]
    if task.kind == "span":
        found: Iterable[Patterns] = walk.span(task.start, task.end)
    elif task.kind == "exponents":
        found = walk.every_exponent(src, task.end)
    elif task.kind == "weights":
        found = walk.near_weights(src)
    else:
        step = max(1, dst.inf // task.end)
        found = walk.fp64_hard(dst, np.arange(0, dst.inf, step, dtype=np.int64))
    for array in found:
        for start in range(0, len(array), walk.SLICE):
            part = array[start : start + walk.SLICE]
            yield np.pad(part, (0, -len(part) % VECTOR))


def compare(x: Patterns, src: str, dst: str, kernels: Iterable[Kernel]) -> Tally:
    """Cast ``x`` with every kernel and count what is wrong."""
    tensor = as_tensor(x, src)
    expected = round_patterns(x, FORMATS[src], FORMATS[dst])
    wanted = counts(x, expected, FORMATS[src], FORMATS[dst])
    theirs = None
    if not (src == "fp64" and FORMATS[dst].bits == 16):
        theirs = as_patterns(tensor.to(_torch(dst)), dst)
    total = Tally(len(x))
    for kernel in kernels:
        y, stats = kernel(tensor, dtype(dst))
        got = as_patterns(y, dst)
        wrong = _differs(got, expected, src, dst)
        odd = got != theirs if theirs is not None else np.zeros(len(x), bool)
        told = {name: getattr(stats, name) for name in wanted}
        example = ""
        if odd.any() or wrong.any() or told != wanted:
            example = _example(x, got, expected, np.flatnonzero(odd | wrong), src, dst, f"{told} not {wanted}")
        total += Tally(0, int(odd.sum()), int(wrong.sum()), int(told != wanted), example)
    return total


def _differs(got: Patterns, expected: Patterns, src: str, dst: str) -> np.ndarray:
    layout = FORMATS[dst]
    nan = is_nan(expected, layout)
    quiet = magnitudes(got, layout) & (1 << (layout.mantissa - 1)) != 0
    bad_nan = ~is_nan(got, layout) | (~quiet & ((src, dst) not in SIGNALLING_KEPT))
    return np.asarray(np.where(nan, bad_nan, got != expected))


def _example(x: Patterns, got: Patterns, expected: Patterns, at: np.ndarray, src: str, dst: str, told: str) -> str:
    if not len(at):
        return f"{src} to {dst}, {len(x)} patterns from {_hex(x[0], src)}: counts are {told}"
    i = at[0]
    return f"{src} {_hex(x[i], src)} gave {dst} {_hex(got[i], dst)}, not {_hex(expected[i], dst)}"


def _hex(pattern: int, name: str) -> str:
    layout: Layout = FORMATS[name]
    return f"{int(pattern) & ((1 << layout.bits) - 1):#0{layout.bits // 4 + 2}x}"


def _torch(name: str) -> torch.dtype:
    found = getattr(torch, dtype(name).torch)
    assert isinstance(found, torch.dtype)
    return found


def as_tensor(x: Patterns, name: str) -> torch.Tensor:
    return torch.from_numpy(x.astype(INT[FORMATS[name].bits][0])).view(_torch(name))


def as_patterns(y: torch.Tensor, name: str) -> Patterns:
    bits = FORMATS[name].bits
    signed = y.view(INT[bits][1]).numpy().astype(np.int64)
    return signed if bits == 64 else signed & ((1 << bits) - 1)


_KERNELS: list[Kernel] = []


def work(task: Task) -> tuple[Task, Tally]:
    """One task, in a process of its own."""
    if not _KERNELS:
        torch.set_num_threads(1)
        _KERNELS.extend([cast_chunk, lane_kernel()])
    total = Tally()
    for x in slices(task):
        total += compare(x, task.src, task.dst, _KERNELS)
    return task, total


def tasks(*, sample: bool) -> list[Task]:
    """Everything to compare: with ``sample`` every exponent, without it every pattern of up to 32 bits."""
    found = []
    for dst in ("bf16", "fp16"):
        found += [Task("fp32", dst, "exponents", end=512), Task("fp32", dst, "weights")]
        if not sample:
            found += [Task("fp32", dst, "span", at, at + STEP) for at in range(0, 1 << 32, STEP)]
    for src, dst in (("fp16", "fp32"), ("fp16", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")):
        found += [Task(src, dst, "span", 0, 1 << 16), Task(src, dst, "weights")]
    for dst in ("fp32", "bf16", "fp16"):
        found += [Task("fp64", dst, "exponents", end=4 if sample else 4096), Task("fp64", dst, "weights")]
        found += [Task("fp64", dst, "hard", end=1 << (10 if sample else 20))]
    return found


def run(todo: list[Task], jobs: int) -> dict[tuple[str, str], Tally]:
    """Results by pair of types; progress on stderr."""
    results: dict[tuple[str, str], Tally] = {}
    for limit in ("MMAP", "TRIM"):  # glibc: keep freed arrays, or each new one is paged in again
        os.environ.setdefault(f"MALLOC_{limit}_THRESHOLD_", str(1 << 28))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for i, (task, tally) in enumerate(pool.imap_unordered(work, todo)):
            key = task.src, task.dst
            results[key] = results.get(key, Tally()) + tally
            if i % 16 == 0:
                print(f"{i + 1} of {len(todo)}", file=sys.stderr, flush=True)
    return results


def summary(results: dict[tuple[str, str], Tally], seconds: float, *, sample: bool) -> str:
    total = sum(results.values(), Tally())
    what = "every exponent of FP32" if sample else "all 2^32 FP32 patterns to bf16 and to fp16"
    return (
        f"{what}, all 2^16 of fp16 and of bf16 to each other type, hard cases, {total.patterns:,} in all: "
        f"{total.torch} differ from torch {torch.__version__} (NaN bits included), {total.reference} from "
        f"round-to-nearest-even in integers, {total.counts} statistics are wrong ({seconds:.0f} s)"
    )


def main(argv: list[str] | None = None) -> int:
    """0 when everything is equal, else 1."""
    parser = argparse.ArgumentParser(description="compare the kernel with torch and with integer arithmetic")
    parser.add_argument("--sample", action="store_true", help="every exponent instead of every pattern")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    results = run(tasks(sample=options.sample), options.jobs)
    for (src, dst), tally in sorted(results.items()):
        print(f"{src} to {dst}: {tally}")
    print(summary(results, time.perf_counter() - start, sample=options.sample))
    return 0 if all(tally.is_clean for tally in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
