"""Full disks, killed processes, signals: whatever ends a conversion early, the output's name is as it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import precconv
from fixtures import build, make
from precconv import fileio, paths

from .processes import HANG, assert_refused, posix, run, start, tree, wait_until

LLAMA = make.ROOT / "good/tiny-llama.safetensors"
PARTS = f".*{fileio.PART_SUFFIX}"
convert_module = sys.modules["precconv.convert"]

pytestmark = posix


def megabytes(path: Path, count: int, value: float = 1.0) -> Path:
    """A source of so many megabytes of one FP32 value."""
    size = count << 20
    path.write_bytes(build.file_of([("w", "F32", (size // 4,), build.f32(value) * (size // 4))]))
    return path


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A source of half a gigabyte, all of it zeros that need no place on the disk."""
    size = 1 << 29
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    header = f'{{"w":{{"dtype":"F32","shape":[{size // 4}],"data_offsets":[0,{size}]}}}}'
    path.write_bytes(build.raw(header))
    os.truncate(path, 8 + len(header) + size)
    yield path
    path.unlink()


def parts(directory: Path) -> list[Path]:
    return list(directory.glob(PARTS))


def is_being_written(directory: Path) -> bool:
    """Whether a conversion into this directory has begun to write."""
    return any(p.stat().st_size for p in parts(directory))


# Signals


@pytest.mark.parametrize(
    ("number", "there"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)]
)
def test_a_signal_in_the_middle_ends_with_130_and_leaves_everything_as_it_was(
    large: Path, tmp_path: Path, number: signal.Signals, there: bool
) -> None:
    out = tmp_path / "out.safetensors"
    if there:
        out.write_bytes(b"old")
    before, status = tree(tmp_path), large.stat()
    slowly = ("--verify", "full", "--workers", "1")
    process = start(large, "--to", "bf16", "-o", out, "--force", *slowly, cwd=tmp_path)
    try:
        wait_until(lambda: is_being_written(tmp_path), process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (130, "", "interrupted; nothing was written\n")
    assert tree(tmp_path) == before
    now = large.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (status.st_size, status.st_mtime_ns, status.st_ino)


def test_a_hangup_that_nohup_has_set_to_be_ignored_does_not_end_a_conversion(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    process = start(large, "--to", "bf16", "-o", out, cwd=tmp_path, ignored="SIGHUP")
    try:
        wait_until(lambda: is_being_written(tmp_path), process)
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (0, "")
    assert out.stat().st_size > 1 << 28
    out.unlink()


def test_an_interruption_after_the_end_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from precconv.cli import main

    monkeypatch.setattr(sys, "argv", ["precconv", "inspect", str(LLAMA)])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 0


# Killed processes


def test_what_a_killed_process_left_is_removed_by_the_next_run(large: Path, tmp_path: Path) -> None:
    process = start(large, "--to", "bf16", "-o", tmp_path / "out.safetensors", cwd=tmp_path)
    try:
        wait_until(lambda: is_being_written(tmp_path), process)
    finally:
        process.kill()
        process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGKILL
    assert len(parts(tmp_path)) == 1
    assert not (tmp_path / "out.safetensors").exists()
    precconv.convert(LLAMA, to="bf16", output=tmp_path / "other.safetensors")
    assert tree(tmp_path).keys() == {"other.safetensors"}


def test_what_a_running_process_writes_is_left_alone_by_other_runs(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    process = start(large, "--to", "bf16", "-o", out, cwd=tmp_path)
    try:
        wait_until(lambda: is_being_written(tmp_path), process)
        process.send_signal(signal.SIGSTOP)
        (part,) = parts(tmp_path)
        precconv.convert(LLAMA, to="bf16", output=tmp_path / "other.safetensors")
        assert parts(tmp_path) == [part]
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (0, "")
    assert tree(tmp_path).keys() == {"other.safetensors", "out.safetensors"}
    out.unlink()


# Full disks


def test_a_file_that_may_not_grow_so_large_is_one_sentence_and_exit_1(tmp_path: Path) -> None:
    megabytes(tmp_path / "m.safetensors", 3)
    before = tree(tmp_path)
    done = run("m.safetensors", "--to", "bf16", cwd=tmp_path, limits="FSIZE=1000000")
    assert_refused(done, 1, "error: m.bf16.safetensors: cannot be written: file too large")
    assert tree(tmp_path) == before


def mount(path: Path, options: str) -> None:
    path.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs to fill")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small tmpfs to fill cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    mount(path, "size=1m,nr_inodes=8")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_disk_with_too_little_space_is_refused_before_the_first_byte(small_disk: Path, tmp_path: Path) -> None:
    source = megabytes(tmp_path / "m.safetensors", 3)
    done = run(source, "--to", "bf16", "-o", small_disk / "out.safetensors", cwd=tmp_path)
    assert_refused(done, 1, f"{small_disk}/out.safetensors: needs 1573")
    assert "the disk has 1048576 free" in done.stderr
    assert tree(small_disk) == {}


def test_a_disk_that_fills_up_while_its_space_is_reserved_leaves_nothing(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = megabytes(tmp_path / "m.safetensors", 3)
    monkeypatch.setattr(paths, "free_bytes", lambda _directory: 1 << 30)  # as it was a moment ago
    with pytest.raises(precconv.OutputError, match="cannot be written: no space left on device"):
        precconv.convert(source, to="bf16", output=small_disk / "out.safetensors")
    assert tree(small_disk) == {}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_between_two_writes_leaves_nothing(
    small_disk: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = megabytes(tmp_path / "m.safetensors", 3)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(paths, "free_bytes", lambda _directory: 1 << 30)
    with pytest.raises(precconv.OutputError, match="cannot be written: no space left on device"):
        precconv.convert(source, to="bf16", output=small_disk / "out.safetensors", workers=workers)
    assert tree(small_disk) == {}


def test_a_disk_without_room_for_another_file_is_refused(small_disk: Path, tmp_path: Path) -> None:
    source = megabytes(tmp_path / "m.safetensors", 1)
    for n in range(7):  # its root is the eighth
        (small_disk / str(n)).touch()
    before = tree(small_disk)
    done = run(source, "--to", "bf16", "-o", small_disk / "out.safetensors", cwd=tmp_path)
    assert_refused(done, 1, "cannot be written: no space left on device")
    assert tree(small_disk) == before


def test_space_is_checked_before_anything_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = megabytes(tmp_path / "m.safetensors", 1)
    created: list[Path] = []
    monkeypatch.setattr(convert_module, "part_file", created.append)
    monkeypatch.setattr(paths, "free_bytes", lambda _directory: 1 << 19)
    with pytest.raises(precconv.OutputError, match=r"needs 524\d\d\d bytes, the disk has 524288 free"):
        precconv.convert(source, to="bf16")
    assert created == []


def test_space_that_the_run_itself_holds_counts_when_a_plan_is_amended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "m.safetensors"
    ones, large_ones = build.f32(1) * 100_000, build.f32(1e6) * 10_000
    source.write_bytes(build.file_of([("a", "F32", (100_000,), ones), ("b", "F32", (10_000,), large_ones)]))

    def free(directory: Path) -> int:
        return 250_000 - sum(p.stat().st_size for p in parts(directory))

    monkeypatch.setattr(paths, "free_bytes", free)
    report = precconv.convert(source, to="fp16", on_overflow="fp32")  # 220 kB, then 240 kB
    assert report.output_bytes > 240_000
    monkeypatch.setattr(paths, "free_bytes", lambda directory: free(directory) - 20_000)
    with pytest.raises(precconv.OutputError, match=r"needs \d{5} bytes, the disk has \d{4} free"):
        precconv.convert(source, to="fp16", on_overflow="fp32", output=tmp_path / "again.safetensors")
    assert tree(tmp_path).keys() == {"m.safetensors", "m.fp16.safetensors"}
