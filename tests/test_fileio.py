"""The seam to the operating system: what each platform lacks makes no difference, and nothing of others is touched."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precconv
from fixtures import build, make
from precconv import fileio
from precconv.fileio import InputFile, PartFile, part_file, remove_stale_parts
from precconv.readback import VerifyMode

from .processes import posix, tree

LLAMA = make.ROOT / "good/tiny-llama.safetensors"
#: What some platform does without, by where it is looked up.
CALLS = ("preadv", "pread", "pwrite", "posix_fallocate", "posix_fadvise", "link", "O_DIRECTORY", "O_NONBLOCK", "fcntl")
LACKING = {
    "nothing": (),
    **{call: (call,) for call in CALLS},
    "pread and preadv": ("pread", "preadv"),
    "everything": CALLS,
}


def take_away(monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]) -> None:
    for call in calls:
        if call == "fcntl":
            monkeypatch.setattr(fileio, "fcntl", None)
        elif call == "O_NONBLOCK":
            monkeypatch.setattr(fileio, "_NONBLOCK", 0)
        else:
            monkeypatch.delattr(os, call, raising=False)


@pytest.fixture(params=[*LACKING.values()], ids=[*LACKING])
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """The same test on a platform without some calls."""
    with monkeypatch.context() as patch:
        take_away(patch, request.param)
        yield request.param


@pytest.mark.usefixtures("lacking")
def test_bytes_are_read_at_any_place_and_only_the_end_reads_short(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "f").write_bytes(data)
    with InputFile(tmp_path / "f") as file:
        assert file.size == len(data)
        for offset, length in ((0, 10), (5000, 5240), (10239, 1), (10240, 0), (3, 256)):
            assert file.read(offset, length) == data[offset : offset + length]
        buffer = bytearray(100)
        assert file._reading.read_full(memoryview(buffer), 10200) == 40
        assert buffer == data[10200:] + bytes(60)


@pytest.mark.usefixtures("lacking")
def test_bytes_are_written_at_any_place_in_any_order(tmp_path: Path) -> None:
    data = os.urandom(10_000)
    with part_file(tmp_path / "f") as part:
        part.preallocate(len(data))
        assert part.path.stat().st_size == len(data)
        for start in (7000, 0, 3500):
            part.write(memoryview(data)[start : start + 3500], start)
        back = bytearray(len(data))
        part.read_into(memoryview(back), 0)
        part.publish(replace=False, durable=True)
    assert back == data
    assert tree(tmp_path).keys() == {"f"}
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.usefixtures("lacking")
def test_threads_that_read_and_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    block, count = 4096, 400
    data = os.urandom(block * count)
    (tmp_path / "f").write_bytes(data)
    with InputFile(tmp_path / "f") as source, part_file(tmp_path / "g") as part:
        part.preallocate(len(data))

        def copy(n: int) -> None:
            part.write(memoryview(source.read(n * block, block)), n * block)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(copy, range(count)))
        part.publish(replace=False, durable=False)
    assert (tmp_path / "g").read_bytes() == data


def test_without_positional_calls_a_seek_and_its_transfer_are_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch, CALLS)
    steps: list[tuple[str, bool]] = []
    with part_file(tmp_path / "f") as part:

        def watch(name: str) -> None:
            call = getattr(os, name)

            def watched(*args: object) -> object:
                steps.append((name, part._file._lock.locked()))
                return call(*args)

            monkeypatch.setattr(os, name, watched)

        for name in ("lseek", "read", "write"):
            watch(name)
        part.write(memoryview(b"abc"), 5)
        part.read_into(memoryview(bytearray(3)), 5)
    assert steps == [("lseek", True), ("write", True), ("lseek", True), ("read", True)]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The small model in BF16, with everything this platform has."""
    out = tmp_path_factory.mktemp("wanted") / "out.safetensors"
    precconv.convert(LLAMA, to="bf16", output=out)
    return out.read_bytes()


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("force", [False, True])
def test_a_conversion_gives_the_same_bytes_on_every_platform(tmp_path: Path, wanted: bytes, force: bool) -> None:
    out = tmp_path / "out.safetensors"
    if force:
        out.write_bytes(b"old")
    precconv.convert(LLAMA, to="bf16", output=out, force=force, durable=True, verify="full", workers=2)
    assert out.read_bytes() == wanted
    assert tree(tmp_path).keys() == {"out.safetensors"}


def shorten(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """Make a call move a few bytes at a time: allowed everywhere, seen on network drives, not to be had at will."""
    call: Callable[..., object] = getattr(os, name)

    def short(fd: int, what: object, *rest: int) -> object:
        if name == "preadv":
            assert isinstance(what, list)
            return call(fd, [what[0][:most]], *rest)
        if isinstance(what, int):
            return call(fd, min(what, most), *rest)
        assert isinstance(what, memoryview)
        return call(fd, what[:most], *rest)

    monkeypatch.setattr(os, name, short)


@pytest.mark.parametrize(("present", "absent"), [
    (("preadv", "pwrite"), ()), (("pread",), ("preadv",)), (("read", "write"), ("preadv", "pread", "pwrite")),
])  # fmt: skip
def test_reads_and_writes_that_stop_short_are_continued(
    present: tuple[str, ...], absent: tuple[str, ...], tmp_path: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # before os.read is slow  # noqa: F401

    out = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        take_away(patch, absent)
        for name in present:
            shorten(patch, name, 777)
        precconv.convert(LLAMA, to="bf16", output=out, verify="full", workers=1)
    assert out.read_bytes() == wanted


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), offset=st.integers(0, 250), length=st.integers(0, 250), most=st.integers(1, 9))
def test_a_read_in_small_steps_ends_exactly_at_the_end_of_the_file(
    data: bytes, offset: int, length: int, most: int, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(data)
    with InputFile(tmp_path / "f") as file, pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "preadv"):
            shorten(patch, "preadv", most)
        buffer = bytearray(length)
        got = file._reading.read_full(memoryview(buffer), offset)
    assert buffer[:got] == data[offset : offset + length]


# Sources that change


def three_chunks(path: Path) -> Path:
    """A source of three megabytes, last written long ago."""
    path.write_bytes(build.file_of([("w", "F32", (3 << 18,), build.f32(*(n % 7 for n in range(3 << 18))))]))
    os.utime(path, (1e9, 1e9))
    return path


@pytest.mark.parametrize("verify", ["sample", "full", "none"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_shrinks_is_named_and_nothing_is_left(tmp_path: Path, workers: int, verify: VerifyMode) -> None:
    source = three_chunks(tmp_path / "m.safetensors")

    def shrink(_done: int, _total: int) -> None:
        os.truncate(source, 1 << 20)

    with pytest.raises(precconv.SourceChangedError) as caught:
        precconv.convert(source, to="bf16", workers=workers, verify=verify, progress=shrink)
    assert caught.value.exit_code == 1
    assert caught.value.path == source
    assert tree(tmp_path).keys() == {"m.safetensors"}


def test_a_source_that_shrinks_is_described_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    with InputFile(path) as file:
        os.truncate(path, 60)
        assert file.read(0, 60) == bytes(60)
        with pytest.raises(
            precconv.SourceChangedError, match="shrank while it was read: 100 bytes when opened, 60 now"
        ):
            file.read(0, 61)


@pytest.mark.parametrize("verify", ["sample", "full", "none"])
@pytest.mark.parametrize("at", [303, -1], ids=["before", "behind"])  # the exponents of two values
def test_a_source_that_is_written_to_is_no_damaged_output_and_nothing_is_left(
    tmp_path: Path, at: int, verify: VerifyMode
) -> None:
    source = three_chunks(tmp_path / "m.safetensors")

    def write(_done: int, _total: int) -> None:
        with open(source, "r+b") as file:
            file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            file.write(b"\x41")

    with pytest.raises(precconv.SourceChangedError, match="changed while it was read"):
        precconv.convert(source, to="bf16", workers=1, verify=verify, progress=write)
    assert tree(tmp_path).keys() == {"m.safetensors"}


@posix
def test_a_source_that_is_removed_or_replaced_is_converted_as_it_was_opened(tmp_path: Path, wanted: bytes) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(LLAMA.read_bytes())
    other = tmp_path / "other"

    def replace(_done: int, _total: int) -> None:
        other.write_bytes(b"new")
        other.replace(source)

    precconv.convert(source, to="bf16", output=out, workers=1, progress=replace)
    assert out.read_bytes() == wanted
    assert source.read_bytes() == b"new"


# Part files and their names


def test_a_part_file_is_hidden_beside_its_output_and_gone_after_any_exception(tmp_path: Path) -> None:
    def fail(part: PartFile) -> None:
        (name,) = tree(tmp_path)
        assert part.path == tmp_path / name
        assert re.fullmatch(r"\.out\.safetensors\.[0-9a-f]{8}\.precconv-part", name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), part_file(tmp_path / "out.safetensors") as part:
        fail(part)
    assert tree(tmp_path) == {}


@posix
def test_a_name_as_long_as_the_system_takes_can_be_written(tmp_path: Path) -> None:
    for stem in ("n" * 243, "é" * 121):
        out = tmp_path / f"{stem}.safetensors"
        precconv.convert(LLAMA, to="bf16", output=out)
        assert tree(tmp_path).keys() == {out.name}
        out.unlink()


def interrupt(_done: int, _total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interruption_in_the_middle_leaves_nothing(tmp_path: Path, workers: int) -> None:
    source = three_chunks(tmp_path / "m.safetensors")
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        precconv.convert(source, to="bf16", workers=workers, progress=interrupt)
    assert tree(tmp_path) == before
    assert not any("ThreadPoolExecutor" in t.name for t in threading.enumerate())


@posix
def test_a_stale_part_file_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    stale = tmp_path / ".old.safetensors.0123abcd.precconv-part"
    stale.write_bytes(b"x")
    with part_file(tmp_path / "new.safetensors") as part:
        assert not stale.exists()
        assert remove_stale_parts(tmp_path) == []
        assert part.path.exists()


@posix
def test_only_regular_files_with_exactly_such_a_name_are_taken_for_stale(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / ".a.0123abcd.precconv-part").symlink_to(tmp_path / "target")
    (tmp_path / ".b.0123abcd.precconv-part").mkdir()
    os.mkfifo(tmp_path / ".c.0123abcd.precconv-part")
    for name in ("notes.precconv-part", ".notes.precconv-part", ".a.0123ABCD.precconv-part",
                 ".a.0123abcd.precconv-part.gz", "a.0123abcd.precconv-part", ".0123abcd.precconv-part"):  # fmt: skip
        (tmp_path / name).write_bytes(b"mine")
    before = tree(tmp_path)
    assert remove_stale_parts(tmp_path) == []
    assert tree(tmp_path) == before


@posix
def test_another_run_cannot_take_a_whole_part_file_for_stale_while_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = fileio._rename

    def meanwhile(path: Path, final: Path, *, replace: bool) -> None:
        assert remove_stale_parts(tmp_path) == []
        rename(path, final, replace=replace)

    monkeypatch.setattr(fileio, "_rename", meanwhile)
    for force in (False, True):
        precconv.convert(LLAMA, to="bf16", output=tmp_path / "out.safetensors", force=force)
    assert tree(tmp_path).keys() == {"out.safetensors"}


@posix
def test_a_stale_file_is_removed_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".old.0123abcd.precconv-part").write_bytes(b"x")
    unlink, locked = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        fd = os.open(path, os.O_RDWR)
        locked.append(not fileio._lock_is_free(fd))
        os.close(fd)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    assert len(remove_stale_parts(tmp_path)) == 1
    assert locked == [True]


@posix
def test_a_part_file_that_another_run_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fileio.try_lock, list[Path]()

    def late(fd: int) -> bool:
        if not removed:
            removed.extend(remove_stale_parts(tmp_path))
        return lock(fd)

    monkeypatch.setattr(fileio, "try_lock", late)
    with part_file(tmp_path / "out") as part:
        assert len(removed) == 1
        assert part.path.exists()
        assert part.path not in removed


# Publishing


def appear(path: Path) -> Callable[[int, int], None]:
    """A progress callback that makes a file."""

    def write(_done: int, _total: int) -> None:
        path.write_bytes(b"theirs")

    return write


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_appears_during_the_run_is_replaced_only_by_force(
    tmp_path: Path, force: bool, wanted: bytes
) -> None:
    out = tmp_path / "out.safetensors"
    if force:
        precconv.convert(LLAMA, to="bf16", output=out, force=True, progress=appear(out))
        assert out.read_bytes() == wanted
    else:
        with pytest.raises(precconv.OutputError, match="exists"):
            precconv.convert(LLAMA, to="bf16", output=out, progress=appear(out))
        assert out.read_bytes() == b"theirs"
    assert tree(tmp_path).keys() == {"out.safetensors"}


@pytest.mark.parametrize("there", [False, True])
def test_a_file_system_without_hard_links_publishes_by_renaming(
    tmp_path: Path, there: bool, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(_source: object, _target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    out = tmp_path / "out.safetensors"
    if there:
        with pytest.raises(precconv.OutputError, match="exists"):
            precconv.convert(LLAMA, to="bf16", output=out, progress=appear(out))
        assert out.read_bytes() == b"theirs"
    else:
        precconv.convert(LLAMA, to="bf16", output=out)
        assert out.read_bytes() == wanted
    assert tree(tmp_path).keys() == {"out.safetensors"}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the disk, in order: fsync of a file or directory, the rename."""
    if fileio.fcntl is not None:
        monkeypatch.delattr(fileio.fcntl, "F_FULLFSYNC", raising=False)
    seen: list[str] = []
    fsync, rename = os.fsync, fileio._rename

    def counted(fd: int) -> None:
        seen.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def named(path: Path, final: Path, *, replace: bool) -> None:
        rename(path, final, replace=replace)
        seen.append("rename")

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(fileio, "_rename", named)
    return seen


@posix
@pytest.mark.parametrize("force", [False, True])
def test_durable_waits_for_the_file_before_its_name_and_for_the_directory_after(
    tmp_path: Path, events: list[str], force: bool
) -> None:
    precconv.convert(LLAMA, to="bf16", output=tmp_path / "out.safetensors", durable=True, force=force)
    assert events == ["file", "rename", "directory"]


def test_without_durable_nothing_waits_for_the_disk(tmp_path: Path, events: list[str]) -> None:
    precconv.convert(LLAMA, to="bf16", output=tmp_path / "out.safetensors")
    assert events == ["rename"]


@posix
def test_a_drive_that_does_not_know_full_fsync_gets_an_ordinary_one(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fileio.fcntl, "F_FULLFSYNC", 0x7FFF, raising=False)  # no system's number
    precconv.convert(LLAMA, to="bf16", output=tmp_path / "out.safetensors", durable=True)
    assert events == ["file", "rename", "directory"]


@posix
def test_full_fsync_is_used_where_the_system_has_it(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fileio.fcntl, "F_FULLFSYNC", fileio.fcntl.F_GETFD, raising=False)  # any that succeeds
    precconv.convert(LLAMA, to="bf16", output=tmp_path / "out.safetensors", durable=True)
    assert events == ["rename", "directory"]


@posix
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o000])
def test_the_outputs_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    out = tmp_path / "out.safetensors"
    before = os.umask(umask)
    try:
        precconv.convert(LLAMA, to="bf16", output=out, report=tmp_path / "report.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o666 & ~umask


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count open files")
def test_no_file_stays_open_after_success_or_failure(tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def work() -> None:
        precconv.convert(LLAMA, to="bf16", output=tmp_path / "out.safetensors", force=True)
        for path in (make.ROOT / "hostile").iterdir():
            with pytest.raises(precconv.InputError):
                precconv.inspect(path)
        with pytest.raises(precconv.NumericError):
            precconv.convert(
                make.ROOT / "numeric/overflow-fp16.safetensors", to="fp16", output=tmp_path / "no.safetensors"
            )
        with pytest.raises(precconv.InputError):
            InputFile(os.devnull)

    work()
    before = count()
    work()
    assert count() == before


def test_a_part_file_closes_once(tmp_path: Path) -> None:
    with part_file(tmp_path / "f") as part:
        assert isinstance(part, PartFile)
        part.close()
        part.close()
    assert tree(tmp_path) == {}
