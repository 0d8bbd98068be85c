"""Which files a local model directory holds."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from precconv.errors import InputError
from precconv.repo import list_directory, survey
from precconv.repo import listing as listing_module


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")


def test_every_file_is_listed_but_for_what_is_no_part_of_a_model(tmp_path: Path) -> None:
    touch(tmp_path, "b.bin", "a/c/d.txt", "a/.gitattributes", "é x.md", ".gitattributes")
    touch(tmp_path, ".git/config", "a/.cache/x", ".huggingface/y", "__pycache__/z.pyc", ".ipynb_checkpoints/n.ipynb")
    touch(tmp_path, ".DS_Store", "a/.DS_Store", ".model.safetensors.0a1b2c3d.precconv-part", "x.precconv-part/a")
    (tmp_path / "empty").mkdir()
    assert list_directory(tmp_path) == [".gitattributes", "a/.gitattributes", "a/c/d.txt", "b.bin", "é x.md"]


def test_what_is_to_be_skipped_is_not_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a/x", "a/y", "out/x", "z")
    assert list_directory(tmp_path, skip=[tmp_path / "out", tmp_path / "a" / ".." / "a" / "y"]) == ["a/x", "z"]


@needs_links
def test_a_snapshot_of_the_hubs_cache_is_listed_through_its_links(tmp_path: Path) -> None:
    touch(tmp_path, "blobs/0a", "blobs/0b")
    snapshot = tmp_path / "snapshots" / "c0ffee"
    (snapshot / "unet").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a")
    (snapshot / "unet" / "config.json").symlink_to("../../../blobs/0b")
    assert list_directory(snapshot) == ["model.safetensors", "unet/config.json"]
    (tmp_path / "link").symlink_to(snapshot)
    assert list_directory(tmp_path / "link") == ["model.safetensors", "unet/config.json"]


@needs_links
def test_links_to_directories_are_followed_and_those_that_lead_back_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "vae/x", "a/y")
    (tmp_path / "vae_2").symlink_to("vae")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "self").symlink_to(".")
    assert list_directory(tmp_path) == ["a/y", "vae/x", "vae_2/x"]


@needs_links
def test_links_that_multiply_end_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "MAX_FILES", 1000)
    for n in range(30):  # 2^30 ways down
        (tmp_path / f"d{n}").mkdir()
        for link in "ab":
            (tmp_path / f"d{n}" / link).symlink_to(f"../d{n + 1}")
    touch(tmp_path, "d30/x")
    with pytest.raises(InputError) as e:
        list_directory(tmp_path / "d0")
    assert str(e.value) == f"{tmp_path / 'd0'}: holds more than 1,000 files"
    assert e.value.hint == "give the model's own directory"


@needs_links
@pytest.mark.parametrize("skip", [False, True])
def test_a_link_to_nothing_is_refused_by_name(tmp_path: Path, skip: bool) -> None:
    touch(tmp_path, "a/x", "out/x")
    (tmp_path / "a" / "model.safetensors").symlink_to("../../blobs/0a")
    with pytest.raises(InputError) as e:
        list_directory(tmp_path, skip=[tmp_path / "out"] if skip else [])
    assert e.value.path == tmp_path / "a" / "model.safetensors"
    assert e.value.message == "is a link to '../../blobs/0a', which is not there"
    assert e.value.hint == "remove the link, or download the file again"


@needs_links
def test_a_link_to_itself_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("x")
    with pytest.raises(InputError, match="x: too many levels of symbolic links"):
        list_directory(tmp_path, skip=[tmp_path / "out"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in directories")
def test_a_pipe_and_a_socket_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError) as e:
        list_directory(tmp_path)
    assert str(e.value) == f"{tmp_path / 'pipe'}: is neither a file nor a directory"
    assert e.value.hint == "remove it, or copy the model elsewhere"
    (tmp_path / "pipe").unlink()
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("s")
        with pytest.raises(InputError, match="s: is neither a file nor a directory"):
            list_directory(tmp_path)


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: no such file or directory"):
        list_directory(tmp_path / "nowhere")
    touch(tmp_path, "file")
    with pytest.raises(InputError, match=r"file: (not a directory|the directory name is invalid)"):
        list_directory(tmp_path / "file")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="no such names there")
def test_a_name_that_is_not_unicode_is_listed_and_refused_by_the_survey(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))).touch()
    files = list_directory(tmp_path)
    assert files == ["\udcff"]
    with pytest.raises(InputError) as e:
        survey(files, lambda _: b"", root="m")
    assert str(e.value) == "m: the path '\\udcff' holds a control character"
