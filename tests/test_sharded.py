"""Shards read as one file: across the files' ends, with few of them open, into one file or other shards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import precconv
from precconv.checkpoint import open_checkpoint
from precconv.fileio import InputFile
from precconv.formats import Place, Source
from precconv.formats.sharded import JoinedFile, join
from precconv.runs import RunReader, all_chunks, make_runs

from .processes import environment, posix
from .repos import INDEX, files, layers, load, shard, sharded, weight
from .samples import PROPERTY, write_checkpoint
from .torch_files import raw as raw_bytes


def joined(root: Path, *contents: bytes) -> JoinedFile:
    for n, data in enumerate(contents):
        (root / str(n)).write_bytes(data)
    return JoinedFile(root / "index", [InputFile(root / str(n)) for n in range(len(contents))])


# Bytes


@PROPERTY
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_any_stretch_is_that_of_the_files_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    contents = [bytes(10 * n + i for i in range(size)) for n, size in enumerate(sizes)]
    whole = b"".join(contents)
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    file = joined(tmp_path_factory.mktemp("joined"), *contents)
    try:
        assert file.size == len(whole)
        assert file.read(start, length) == whole[start : start + length]
    finally:
        file.close()


def test_empty_files_at_the_ends_and_between_are_passed_over(tmp_path: Path) -> None:
    file = joined(tmp_path, b"", b"ab", b"", b"", b"cd", b"")
    assert file.starts == [0, 0, 2, 2, 2, 4, 4]
    assert [file.read(at, 2) for at in range(3)] == [b"ab", b"bc", b"cd"]
    file.close()


def test_a_file_that_shrank_is_named_itself(tmp_path: Path) -> None:
    file = joined(tmp_path, b"abcd", b"efgh")
    (tmp_path / "1").write_bytes(b"ef")
    with pytest.raises(precconv.SourceChangedError, match="^" + str(tmp_path / "1") + ": "):
        file.read(2, 6)
    file.close()


def test_a_change_of_any_file_is_seen_also_while_it_is_closed(tmp_path: Path) -> None:
    for late in (False, True):
        file = joined(tmp_path, b"abcd", b"efgh")
        file.require_unchanged()
        if late:
            for part in file.files:
                assert isinstance(part, InputFile)
                part.park()
        (tmp_path / "1").write_bytes(b"EFGHI")
        with pytest.raises(precconv.SourceChangedError, match="1: changed while it was read"):
            file.require_unchanged()
        file.close()


# Descriptors


def is_open(file: object) -> bool:
    return isinstance(file, InputFile) and file._file is not None


def open_files(file: JoinedFile) -> int:
    return sum(map(is_open, file.files))


def test_few_files_are_open_while_many_are_read_and_none_after(tmp_path: Path) -> None:
    file = joined(tmp_path, *(bytes([n]) for n in range(40)))
    for part in file.files:
        assert isinstance(part, InputFile)
        part.park()
    with file.held():
        for n in [*range(40), 3, 39, 0]:
            assert file.read(n, 1) == bytes([n])
            assert 1 <= open_files(file) <= 8
        assert open_files(file) > 1
        file.require_unchanged()
        assert open_files(file) <= 8
    assert open_files(file) == 0
    assert file.read(38, 2) == b"\x26\x27"
    file.close()
    assert open_files(file) == 0


def test_a_parked_file_opens_itself_again_and_a_held_one_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    file = InputFile(path)
    file.park()
    assert not is_open(file)
    with file.held():
        assert file.read(1, 2) == b"bc"
        with file.held():
            file.park()
        assert is_open(file), "given back while it is in use"
    assert not is_open(file)
    file.close()
    with pytest.raises(precconv.InputError, match="was closed already"):
        file.read(0, 1)


@pytest.mark.parametrize("change", ["rewritten", "replaced", "removed"])
def test_a_parked_file_that_is_another_when_it_is_opened_again_is_an_error(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with InputFile(path) as file:
        file.park()
        if change == "rewritten":
            path.write_bytes(b"abcd")
        else:
            path.rename(tmp_path / "old")
        if change == "replaced":
            path.write_bytes(b"abc")
        kind = precconv.InputError if change == "removed" else precconv.SourceChangedError
        with pytest.raises(kind):
            file.read(0, 1)


_MANY = """
import resource, sys, precconv
precconv.convert(sys.argv[1], to="bf16", output=sys.argv[2], workers=1)  # torch opens files of its own
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for n, (source, options) in enumerate((s, o) for s in sys.argv[3:] for o in (
    {}, {"shard_size": 2000}, {"output": s + ".one.safetensors"}, {"output": s + ".one.pt"}
)):
    precconv.convert(source, to="bf16", workers=2, **{"output": f"{source}-{n}", **options})
"""


@posix
def test_a_model_may_have_more_shards_than_a_process_may_have_open_files(tmp_path: Path) -> None:
    parts = layers(100)
    small = sharded(tmp_path / "small", layers(1))
    safe = sharded(tmp_path / "safe", parts)
    torch_one = torch_repo(tmp_path / "torch", [{key: x.t() for key, x in p.items()} for p in parts])
    done = subprocess.run(
        [sys.executable, "-c", _MANY, small, tmp_path / "small-out", safe, torch_one],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    want = {name: x.to(torch.bfloat16) for p in parts for name, x in p.items()}
    for found in (load(tmp_path / "safe-0"), load(tmp_path / "safe-1"), load_file(tmp_path / "safe.one.safetensors")):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], x) for name, x in want.items())
    turned = torch.load(tmp_path / "torch.one.pt", weights_only=True)
    assert all(torch.equal(turned[name], x.t()) for name, x in want.items())


# Tensors


def torch_repo(root: Path, parts: list[dict[str, torch.Tensor]]) -> Path:
    """A directory of ``.bin`` shards with their index."""
    root.mkdir()
    weight_map: dict[str, str] = {}
    for n, tensors in enumerate(parts, 1):
        name = shard(n, len(parts), ".bin")
        torch.save(tensors, root / name)
        weight_map |= dict.fromkeys(tensors, name)
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def strided(count: int) -> list[dict[str, torch.Tensor]]:
    """Shards with views of all sorts: turned, with steps, widened, part of a larger storage, an integer."""
    found = []
    for n in range(count):
        base = weight(n, (6, 10))
        found.append({
            f"{n}.turned": base.t(), f"{n}.stepped": base[::2, 1::3], f"{n}.widened": base[:1].expand(4, 10),
            f"{n}.part": base[2:4], f"{n}.plain": weight(100 + n), f"{n}.ids": torch.arange(5) + n,
        })  # fmt: skip
    return found


def tensor_bytes(source: Source) -> dict[str, bytes]:
    """Each tensor's bytes, read as a conversion reads them."""
    found = {}
    for info in source.infos:
        runs = make_runs([Place(info, info.dtype, 0, (0,), source.elements(info))])
        reader = RunReader(source.file)
        data = bytearray()
        for chunk in all_chunks(runs):
            piece = bytearray(chunk.src_bytes)
            reader.read(chunk, memoryview(piece))
            data += piece
        found[info.name] = bytes(data)
    return found


@pytest.mark.parametrize("write", [sharded, torch_repo], ids=["safetensors", "torch"])
def test_joined_shards_hold_the_tensors_of_all_of_them(
    tmp_path: Path, write: Callable[[Path, list[dict[str, torch.Tensor]]], Path]
) -> None:
    parts = strided(3)
    root = write(tmp_path / "m", parts)
    paths = sorted([*root.glob("*-of-*.safetensors"), *root.glob("*-of-*.bin")])
    with ExitStack() as stack:
        shards = [stack.enter_context(open_checkpoint(p)) for p in paths]
        whole = join(root / INDEX, [s.source for s in shards])
        stack.callback(whole.file.close)
        want = {name: raw_bytes(x) for p in parts for name, x in p.items()}
        assert tensor_bytes(whole) == want
        assert [t.name for t in whole.infos] == [t.name for s in shards for t in s.infos]
        assert whole.file.size == sum(p.stat().st_size for p in paths)
        ends = [(t.offset, t.offset + t.nbytes) for t in sorted(whole.infos, key=lambda t: t.offset) if t.offset >= 0]
        if write is sharded:
            assert len(ends) == len(want)
            assert all(a[1] <= b[0] for a, b in pairwise(ends))


def test_metadata_that_two_shards_say_differently_is_the_first_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "1.safetensors", {"a": weight(1)}, {"format": "pt", "by": "one"})
    write_checkpoint(tmp_path / "2.safetensors", {"b": weight(2)}, {"by": "two", "more": "x"})
    with (
        open_checkpoint(tmp_path / "1.safetensors") as a,
        open_checkpoint(tmp_path / "2.safetensors") as b,
    ):
        found = join(tmp_path, [a.source, b.source]).reader
        assert found.metadata == {"format": "pt", "by": "one", "more": "x"}
        assert found.format is a.format


# Into one file


@pytest.mark.parametrize("source", ["safetensors", "torch"])
@pytest.mark.parametrize("output", ["one.safetensors", "one.pt", "one.bin"])
@pytest.mark.parametrize("workers", [1, 3])
def test_shards_become_one_file_with_every_tensor_cast(tmp_path: Path, source: str, output: str, workers: int) -> None:
    parts = strided(3)
    root = (sharded if source == "safetensors" else torch_repo)(tmp_path / "m", parts)
    before = files(root)
    report = precconv.convert(root, to="fp16", output=tmp_path / output, workers=workers, verify="full")
    path = tmp_path / output
    got = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    want = {name: x.half() if x.is_floating_point() else x for p in parts for name, x in p.items()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], x) and got[name].dtype == x.dtype for name, x in want.items())
    assert (report.output, report.output_bytes) == (str(path), path.stat().st_size)
    assert report.verified_bytes == sum(x.nbytes for x in want.values())
    assert report.source_bytes == sum(len(data) for name, data in before.items() if "-of-" in name)
    assert files(root) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["m", output])


def test_merging_and_cutting_anew_give_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    root = torch_repo(tmp_path / "m", strided(4))
    made = []
    for n in (1, 2, 5):
        precconv.convert(root, to="bf16", output=tmp_path / f"{n}.safetensors", workers=n)
        precconv.convert(root, to="bf16", output=tmp_path / f"{n}", shard_size=200, format="safetensors", workers=n)
        made.append(((tmp_path / f"{n}.safetensors").read_bytes(), files(tmp_path / f"{n}")))
    assert made[0] == made[1] == made[2]
    assert len(made[0][1]) > 4
    merged = load_file(tmp_path / "1.safetensors")
    cut = load(tmp_path / "1")
    assert merged.keys() == cut.keys()
    assert all(torch.equal(merged[name], cut[name]) for name in cut)
