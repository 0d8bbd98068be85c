"""The committed fixtures are what ``fixtures/make.py`` makes, and what their manifest says."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import precconv
from fixtures import make
from precconv.errors import PrecconvError

ROWS: list[dict[str, Any]] = json.loads((make.ROOT / make.MANIFEST).read_text("utf-8"))
FOLDERS = sorted({row["path"].partition("/")[0] for row in ROWS})


def files_below(root: Path) -> dict[str, bytes]:
    """Every file of the folders that hold fixtures, and the manifest."""
    found = [p for folder in FOLDERS for p in (root / folder).rglob("*") if p.is_file()]
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in (*found, root / make.MANIFEST)}


def test_the_committed_files_are_exactly_those_that_make_writes(tmp_path: Path) -> None:
    make.main(tmp_path)
    made, committed = files_below(tmp_path), files_below(make.ROOT)
    assert sorted(made) == sorted(committed)
    assert [name for name in made if made[name] != committed[name]] == []


def test_make_removes_what_it_no_longer_makes_and_nothing_else(tmp_path: Path) -> None:
    make.main(tmp_path)
    (tmp_path / "hostile/old.safetensors").write_bytes(b"")
    (tmp_path / "mine.txt").write_bytes(b"")
    make.main(tmp_path)
    assert not (tmp_path / "hostile/old.safetensors").exists()
    assert (tmp_path / "mine.txt").exists()


def test_the_manifest_lists_every_file_with_its_size_and_digest() -> None:
    files = files_below(make.ROOT)
    del files[make.MANIFEST]
    assert [row["path"] for row in ROWS] == sorted(files)
    for row in ROWS:
        data = files[row["path"]]
        assert (row["path"], row["bytes"]) == (row["path"], len(data))
        assert (row["path"], row["sha256"]) == (row["path"], hashlib.sha256(data).hexdigest())


def test_every_hostile_file_states_a_known_error_and_a_pattern_and_no_other_file_does() -> None:
    for row in ROWS:
        assert ("error" in row) == ("message" in row) == row["path"].startswith("hostile/"), row["path"]
        if "error" in row:
            assert issubclass(getattr(precconv, row["error"]), PrecconvError), row["path"]
            assert re.compile(row["message"]).search("") is None, f"{row['path']}: its pattern fits anything"


def test_every_file_says_what_it_is_in_words_and_fits_in_a_repository() -> None:
    for row in ROWS:
        assert len(row["what"]) > 5, row["path"]
        assert row["bytes"] < 200_000, row["path"]


@pytest.mark.parametrize("row", [r for r in ROWS if "error" not in r], ids=lambda r: r["path"])
def test_a_file_that_is_not_hostile_opens(row: dict[str, Any]) -> None:
    assert precconv.inspect(make.ROOT / row["path"]).file_bytes == row["bytes"]
