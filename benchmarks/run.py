"""Measures precconv beside its competitors: ``benchmarks/run.py --dir DIR --write docs/benchmarks.md``.

A full run takes most of an hour and 50 GB of disk; ``--quick`` tries the harness in a few minutes.
The numbers are kept in ``DIR/results.json``; ``--from`` writes the page from there, after a change of
``reasons.toml`` for instance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, jobs, machine, record, render
from benchmarks.measure import Group, run_group, size_of

GB = 1 << 30
QUICK = 1 / 64
PARTS = ("tensor", "small", "startup", "sharded")


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when a job failed: the page then has rows without numbers."""
    options = _options(argv)
    if options.results:
        run = record.load(options.results)
    else:
        options.dir.mkdir(parents=True, exist_ok=True)
        run = measure(options)
        record.save(run, options.dir / "results.json")
    text = render.page(run)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    for failure in run.failures:
        log(f"failed: {failure}")
    return 1 if run.failures else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure precconv beside its competitors")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "precconv-benchmarks")
    parser.add_argument("--sizes", default="1,4,16", help="GB of the llama-shaped inputs; bars are at 1, 4, 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds on inputs 64 times smaller")
    parser.add_argument("--scale", type=float, default=1.0, help="make the inputs this much smaller")
    parser.add_argument("--ckpt", action="store_true", help="also a 4 GB zip .ckpt")
    parser.add_argument("--without", default="", help=f"leave out some of {','.join(PARTS)}")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page goes there instead of stdout")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="results", help="results.json of an earlier run")
    options = parser.parse_args(argv)
    if options.quick:
        options.scale, options.rounds = QUICK, min(options.rounds, 2)
    options.sizes = [size for size in options.sizes.split(",") if size]
    options.without = [part for part in options.without.split(",") if part]
    if unknown := set(options.without) - set(PARTS):
        parser.error(f"--without {','.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    return options


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> record.Run:
    """Make what is missing of the inputs, then all groups."""
    notes = (
        []
        if machine.compile_imported()
        else ["byte code, which could not be compiled: imports take longer than they should"]
    )
    small = max(1, int(100_000 * options.scale))
    run = record.Run(options.scale, small, machine.facts(options.dir), notes=notes)
    for make in _plan(options, small):
        try:
            group = make()
            for source in {job.source for job in group.jobs if job.source}:
                inputs.require_room(options.dir, size_of(source), f"the copy of {source.name}")
        except inputs.NoRoomError as e:
            run.notes.append(str(e))
            log(f"skipped {e}")
            continue
        if not group.warm:
            run.notes.append(f"{group.title}: the five lines, and a warm page cache; both need more memory")
        run.titles[group.key] = group.title
        run.groups[group.key] = run_group(group, options.dir, log)
    return run


def _plan(options: argparse.Namespace, small: int) -> list[Callable[[], Group]]:
    """One function a group: makes the input, then the group's jobs."""
    parts: dict[str, Callable[[], Group]] = {
        "small": partial(_many, options, small),
        "startup": partial(_startup, options),
        "tensor": partial(_tensor, options),
        "sharded": partial(_sharded, options),
    }
    return [
        *(partial(_llama, options, size) for size in options.sizes),
        *([partial(_ckpt, options)] if options.ckpt else []),
        *(make for part, make in parts.items() if part not in options.without),
    ]


def _nbytes(options: argparse.Namespace, size: str) -> int:
    return int(float(size) * options.scale * GB)


def _llama(options: argparse.Namespace, size: str) -> Group:
    source = inputs.ensure(inputs.llama(_nbytes(options, size)), options.dir)
    title = f"{size} GB, shaped like a llama, fp32 to bf16"
    return jobs.conversion(size, title, source, rounds=options.rounds, memory=machine.memory())


def _ckpt(options: argparse.Namespace) -> Group:
    source = inputs.ensure_ckpt(_nbytes(options, "4"), options.dir)
    title = "4 GB zip `.ckpt`, fp32, to bf16 safetensors"
    return jobs.conversion("ckpt", title, source, rounds=options.rounds, memory=machine.memory())


def _tensor(options: argparse.Namespace) -> Group:
    source = inputs.ensure(inputs.single(_nbytes(options, "8")), options.dir)
    title = "one 8 GB tensor, fp32 to bf16"
    return jobs.peak("tensor", title, source, rounds=options.rounds, memory=machine.memory())


def _sharded(options: argparse.Namespace) -> Group:
    source = inputs.ensure_sharded(_nbytes(options, "16"), options.dir)
    title = "a directory of four 4 GB shards, fp32 to bf16"
    return jobs.sharded(title, source, rounds=options.rounds, memory=machine.memory())


def _many(options: argparse.Namespace, count: int) -> Group:
    small, single = (inputs.ensure(what(count), options.dir) for what in (inputs.small, inputs.single_as_small))
    return jobs.many(f"{count:,} tensors of 1 KB, fp32 to bf16", small, single, rounds=options.rounds)


def _startup(options: argparse.Namespace) -> Group:
    size = "4" if "4" in options.sizes else (options.sizes or ["1"])[0]
    source = inputs.ensure(inputs.llama(_nbytes(options, size)), options.dir)
    return jobs.startup(source, rounds=options.rounds)


if __name__ == "__main__":
    sys.exit(main())
