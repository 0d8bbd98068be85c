"""The archive of a torch output, byte for byte, and its checksums."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precconv.dtypes import BF16
from precconv.formats.torch_out import top_folder
from precconv.formats.zip_out import crc32_combine, zip_layout

from .torch_files import saved
from .torch_writing import (
    check_same,
    fill,
    load,
    planned,
    trained,
    values,
    written,
)


def test_weights_only_and_mapped_loads_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    path = saved(
        {**trained(torch.optim.Adam), "e": torch.zeros(0), "u": torch.arange(3).to(torch.uint16)}, tmp_path / "a.pt"
    )
    out = written(path)
    check_same(path, out, weights_only=True)
    check_same(path, out, weights_only=True, mmap=True)
    from torch.utils.serialization import config

    settings: Any = config  # a module that torch gives a method of its own; pytest cannot undo such a setting
    with settings.patch({"load.calculate_storage_offsets": True}):
        check_same(path, out, weights_only=True, mmap=True)
    with torch.serialization.skip_data():
        load(out)
    assert load(out, map_location="meta")["u"].is_meta


def test_the_archive_is_byte_for_byte_what_torch_writes() -> None:
    rng = random.Random(0)
    records = [(f"data/{i}", rng.randbytes(rng.choice([0, 1, 63, 64, 65, 1000]))) for i in range(40)]
    records = [("data.pkl", rng.randbytes(300)), ("byteorder", b"little"), *records]
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer, True, 64)
    for name, data in records:
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    with zipfile.ZipFile(buffer) as archive:
        contents = [(info.filename, archive.read(info)) for info in archive.infolist()]
    layout = zip_layout((name, len(data)) for name, data in contents)
    crcs = {i: zlib.crc32(data) for i, (_, data) in enumerate(contents)}
    out = bytearray(layout.size)
    data_pieces = zip(layout.offsets, (data for _, data in contents), strict=True)
    for offset, data in [*layout.headers(), *data_pieces, *layout.finish(crcs)]:
        out[offset : offset + len(data)] = data
    assert bytes(out) == buffer.getvalue()


def test_records_are_those_of_torch_save(tmp_path: Path) -> None:
    path = saved({"a": values(3), "b": values(4)}, tmp_path / "a.pt")
    out = written(path, target=tmp_path / "a b.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out) as new:
        assert [n.split("/", 1)[1] for n in old.namelist()] == [n.split("/", 1)[1] for n in new.namelist()]
        assert {n.split("/")[0] for n in new.namelist()} == {"a b"}
        for name in (".format_version", ".storage_alignment", "byteorder", "version"):
            assert old.read(f"a/{name}") == new.read(f"a b/{name}")


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    path = saved(trained(torch.optim.Adam), tmp_path / "a.pt")
    made = []
    for seed in (1, 2):
        with planned(path, {".model.0.weight": BF16}) as (file, out):
            fill(file, out, tmp_path / "out.pt", seed=seed)
            made.append((tmp_path / "out.pt").read_bytes())
    assert made[0] == made[1]


def test_records_beyond_4_gb_are_where_torch_puts_them(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = tmp_path / "big.pt"
    with FakeTensorMode():
        shapes = [3 << 30, (5 << 30) + 7, 0, 16, 0xFFFFFFFF, 0]
        value = [torch.empty(n, dtype=torch.uint8) for n in shapes]
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as f:
        infos = archive.infolist()
        layout = zip_layout((info.filename, info.file_size) for info in infos)
        assert layout.size == path.stat().st_size
        pieces = [*layout.headers(), *layout.finish({i: info.CRC for i, info in enumerate(infos)})]
        for offset, data in pieces:
            f.seek(offset)
            assert f.read(len(data)) == data


@given(a=st.binary(max_size=200), b=st.binary(max_size=70_000))
def test_checksums_of_parts_combine(a: bytes, b: bytes) -> None:
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_checksums_of_very_long_parts_combine() -> None:
    assert crc32_combine(zlib.crc32(b"a"), zlib.crc32(bytes(1 << 24)), 1 << 24) == zlib.crc32(b"a" + bytes(1 << 24))
    zeros, size = zlib.crc32(bytes(1 << 20)), 1 << 20
    for _ in range(10):
        zeros, size = crc32_combine(zeros, zeros, size), 2 * size
    assert (zeros, size) == (0x5B64C2B0, 1 << 30)


def test_chunks_that_are_not_all_of_the_data_are_noticed(tmp_path: Path) -> None:
    path = saved({"a": values(10), "b": values(5)}, tmp_path / "a.pt")
    with planned(path, {}) as (_, out):
        first, second = ((p.offset, p.nbytes, 0) for p in out.pieces)
        out.crcs([second, first])
        for wrong in ([first], [first, first, second], [first, (second[0] + 4, 16, 0)], [(0, 5, 0), first, second]):
            with pytest.raises(ValueError, match=r"a chunk at byte|bytes of"):
                out.crcs(wrong)


@pytest.mark.parametrize("name", ["model.pt", "b.tar.gz", "x", "a b.ckpt", ".hidden.pt", "mod\xe8le.pt"])
def test_the_folder_is_the_one_torch_uses(tmp_path: Path, name: str) -> None:
    torch.save(1, tmp_path / name)
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert archive.namelist()[0] == f"{top_folder(name)}/data.pkl"
    assert top_folder(str(tmp_path / name)) == top_folder(name)


def test_names_that_torch_refuses_have_a_folder_too() -> None:
    assert [top_folder(name) for name in (".pt", "", "a/")] == ["archive"] * 3


def test_unzip_finds_nothing_wrong(tmp_path: Path) -> None:
    unzip = shutil.which("unzip")
    if unzip is None:
        pytest.skip("unzip is not installed")
    out = written(saved(trained(torch.optim.Adam), tmp_path / "a.pt"))
    done = subprocess.run([unzip, "-t", str(out)], capture_output=True, text=True, check=True)
    assert "No errors detected" in done.stdout
