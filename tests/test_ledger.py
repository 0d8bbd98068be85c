"""The ledger of a batch: what is in it survives whatever ends the run, and nobody else writes to it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from precconv import OutputError
from precconv.batch import ledger as module
from precconv.batch.ledger import SCHEMA, Event, open_ledger, read_ledger

from .processes import posix


def fill(path: Path, *events: Event) -> bytes:
    with open_ledger(path) as ledger:
        for event in events:
            ledger.add(event, key="k", source="s", output="/o")
    return path.read_bytes()


def test_every_record_is_one_line_of_json_with_the_schema_and_what_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    with open_ledger(path) as ledger:
        ledger.add("started", key="k", source="a \udc80\n", output="/o")
        ledger.add("failed", key="k", source="a \udc80\n", output="/o", error={"kind": "InputError"})
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    records = [json.loads(line) for line in lines]
    assert [(r["schema"], r["event"], r["key"], r["output"]) for r in records] == [
        (SCHEMA, "started", "k", "/o"),
        (SCHEMA, "failed", "k", "/o"),
    ]
    assert records[1]["source"] == "a \udc80\n"
    assert records[1]["error"] == {"kind": "InputError"}
    assert records[1]["time"].endswith("Z")


def test_the_last_record_of_a_job_counts_and_that_of_another_output_does_not(tmp_path: Path) -> None:
    fill(tmp_path / "l", "started", "failed", "started", "done")
    ledger = read_ledger(tmp_path / "l")
    found = ledger.last("k", "/o")
    assert found is not None
    assert found["event"] == "done"
    assert ledger.last("k", "/elsewhere") is None
    assert ledger.last("other", "/o") is None
    assert ledger.knows("/o")
    assert not ledger.knows("/elsewhere")


def test_a_run_adds_to_what_is_there(tmp_path: Path) -> None:
    first = fill(tmp_path / "l", "started")
    second = fill(tmp_path / "l", "done")
    assert second.startswith(first)
    assert second.count(b"\n") == 2


def test_wherever_a_crash_cuts_the_last_line_the_records_before_it_count_and_the_next_follow(tmp_path: Path) -> None:
    path = tmp_path / "l"
    whole = fill(path, "started", "done")
    first = whole.index(b"\n") + 1
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        complete = 2 if length == len(whole) - 1 else 1 if length >= first - 1 else 0
        found = read_ledger(path).last("k", "/o")
        assert (found or {}).get("event") == (None, "started", "done")[complete]
        assert path.read_bytes() == whole[:length], "reading changes nothing"
        repaired = fill(path, "interrupted")
        assert repaired.startswith(whole[:length])
        last = json.loads(repaired.splitlines()[-1])
        assert last["event"] == "interrupted"


@pytest.mark.parametrize("junk", [b"", b"[1]", b"{}", b'{"schema": 1}', b"\xff\xfe", b"[" * 100_000, b'{"key": 1}'])
def test_lines_that_are_no_records_are_passed_over(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "l"
    path.write_bytes(fill(path, "started") + junk + b"\n")
    found = read_ledger(path).last("k", "/o")
    assert found is not None
    assert found["event"] == "started"


@pytest.mark.parametrize("data", [b"model weights", b"\0" * 64, b"{}\n", b"# sources\na\n"])
def test_another_file_is_refused_and_stays_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "l"
    path.write_bytes(data)
    with pytest.raises(OutputError, match="is not the ledger of a batch") as refused, open_ledger(path):
        pass
    assert refused.value.hint is not None
    assert path.read_bytes() == data


def test_the_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l"
    path.write_bytes(fill(path, "done").replace(b'"schema": 1', b'"schema": 2'))
    with pytest.raises(OutputError, match="newer version"), open_ledger(path):
        pass


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with open_ledger(path):
        with pytest.raises(OutputError, match="another run is at work on this batch") as refused, open_ledger(path):
            pass
        assert refused.value.path == path
        assert refused.value.hint is not None
    fill(path, "started")


class FakeWindows:
    """``msvcrt.locking`` between two descriptors."""

    LK_NBLCK = 2

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[int, int]] = []

    def locking(self, fd: int, mode: int, count: int) -> None:
        assert mode == self.LK_NBLCK
        self.calls.append((os.lseek(fd, 0, os.SEEK_CUR), count))
        if len(self.calls) > 1:
            raise OSError(self.code, "locked")


@pytest.mark.parametrize(("code", "free"), [(errno.EACCES, False), (errno.EDEADLK, False), (errno.EINVAL, True)])
def test_on_windows_a_byte_beyond_the_end_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, free: bool
) -> None:
    fake = FakeWindows(code)
    monkeypatch.setattr(module, "msvcrt", fake)
    whole = fill(tmp_path / "l", "started")
    if free:
        fill(tmp_path / "l", "done")
    else:
        with pytest.raises(OutputError, match="another run"), open_ledger(tmp_path / "l"):
            pass
        assert (tmp_path / "l").read_bytes() == whole
    assert {count for _, count in fake.calls} == {1}
    assert all(at > len(whole) for at, _ in fake.calls)


def test_a_record_is_one_write_and_synced_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write, fsync = os.write, os.fsync

    def writes(fd: int, data: bytes) -> int:
        calls.append("write")
        return write(fd, data)

    def syncs(fd: int) -> None:
        calls.append("fsync")
        fsync(fd)

    with open_ledger(tmp_path / "l") as ledger:
        monkeypatch.setattr(os, "write", writes)
        monkeypatch.setattr(os, "fsync", syncs)
        ledger.add("started", key="k", source="s", output="/o")
        assert calls == ["write", "fsync"]
        assert list(ledger.under_way.values()) == [{"key": "k", "source": "s", "output": "/o"}]
        ledger.add("done", key="k", source="s", output="/o")
        assert ledger.under_way == {}


def test_a_full_disk_is_an_error_and_what_was_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l"
    real = os.write
    with open_ledger(path) as ledger:
        ledger.add("started", key="k", source="s", output="/o")
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        with pytest.raises(OutputError, match="no room for a whole record"):
            ledger.add("done", key="k", source="s", output="/o")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="no space left on device"):
            ledger.add("done", key="k", source="s", output="/o")
    found = read_ledger(path).last("k", "/o")
    assert found is not None
    assert found["event"] == "started"


def fail(_fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@posix
def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "l", tmp_path):
        with pytest.raises(OutputError, match="cannot be"), open_ledger(path):
            pass


def test_there_is_nothing_in_a_ledger_that_does_not_exist(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "l").last("k", "/o") is None
    assert list(tmp_path.iterdir()) == []
