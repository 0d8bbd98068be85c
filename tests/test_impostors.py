"""Files that are no checkpoints: one sentence that says what they are, and what to do."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precconv.errors import CorruptCheckpointError, InputError, PrecconvError, UnknownFormatError
from precconv.fileio import InputFile
from precconv.formats.impostors import directory_impostor
from precconv.formats.torch_open import is_torch, open_torch

from .real import real_file
from .torch_files import opened, rezipped, saved


def zipped(**records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in records.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), data)
    return buffer.getvalue()


def tarred(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 438006864\n"
IMPOSTORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "LFS pointer": (LFS, "a Git LFS pointer to 438006864 bytes"),
    "LFS pointer, Windows": (LFS.replace(b"\n", b"\r\n"), "a Git LFS pointer to 438006864 bytes"),
    "HTML": (b"\n <!DOCTYPE html>\n<html><body>401</body></html>", "an HTML page"),
    "HTML with a mark": (b"\xef\xbb\xbf<html>", "an HTML page"),
    "XML": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML document"),
    "JSON": (b'{"error": "not found"}', "a JSON file"),
    "index": (json.dumps({"metadata": {}, "weight_map": {}}).encode(), "the index of a sharded checkpoint"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(50), "a GGUF file"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(50), "an HDF5 file"),
    "npy": (npy(), r"a numpy array \(.npy\)"),
    "npz": (npz(), r"a numpy archive \(.npz\)"),
    "gzip": (gzip.compress(b"x"), "a gzip file"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(50), "a zstd file"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(50), "a 7-Zip archive"),
    "rar": (b"Rar!\x1a\x07\x01\0" + bytes(50), "a RAR archive"),
    "tar": (tarred("model.ckpt"), r"a tar archive \('model.ckpt' is first in it\)"),
    "msgpack": (b"\x81\xa6params\x82\xa4Dens", "a msgpack file"),
    "ONNX": (b"\x08\x09\x12\x07pytorch\x1a\x052.0.0\x3a\x05", "an ONNX model"),
    "TFLite": (b"\x1c\0\0\0TFL3" + bytes(50), "a TensorFlow Lite model"),
    "SavedModel": (b"\x08\x01\x12\xf4\x8a\x01\x0a\x07", "a TensorFlow SavedModel"),
    "TF index": (bytes(100) + bytes.fromhex("57fb808b247547db"), "the index of a TensorFlow checkpoint"),
    "zip of a checkpoint": (
        zipped(model_dot_safetensors=b"x"),
        "a zip archive with 'model.safetensors' in it",
    ),
    "zip of anything": (zipped(readme=b"x"), "a zip archive without a checkpoint in it"),
    "empty zip": (zipped(), "an empty zip archive"),
    "office": (zipped(**{"[Content_Types].xml": b""}), "an office document"),
    "Keras": (zipped(model_dot_weights_dot_h5=b"", config_dot_json=b""), "a Keras model"),
    "torch.package": (
        zipped(**{"p/.data/extern_modules": b"", "p/.data/version": b"6"}),
        "a torch.package archive",
    ),
    "pt2": (zipped(m__archive_format=b"pt2", m__models__model_dot_json=b""), "a torch.export program"),
    "plain pickle": (pickle.dumps({"a": 1}), "a pickled dict, not a torch.save file"),
    "plain object": (pickle.dumps(Path("x")), "a pickled object of class pathlib"),
    "anything": (b"\x00\x01\x02\x03 hello", "no checkpoint that is known: it starts with 00 01 02 03"),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_impostors_are_named_in_one_sentence(name: str, tmp_path: Path) -> None:
    data, message = IMPOSTORS[name]
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with pytest.raises(UnknownFormatError, match=message) as caught:
        opened(path, open_torch).__enter__()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_torchscript_archive_is_named() -> None:
    path = real_file("silero-vad==6.2.3", "silero_vad/data/silero_vad.jit")
    with pytest.raises(UnknownFormatError, match="a TorchScript archive") as caught:
        opened(path, open_torch).__enter__()
    assert "torch.jit.load" in str(caught.value.hint)


def test_an_archive_of_torch_package_is_named() -> None:
    path = real_file("silero-stress==1.5", "silero_stress/data/accentor-bel.pt")
    with pytest.raises(UnknownFormatError, match=r"a torch\.package archive"):
        opened(path, open_torch).__enter__()


def test_a_truncated_zip_says_what_is_there_and_what_is_due(tmp_path: Path) -> None:
    path = saved({"a": torch.randn(1000), "b": torch.randn(1000)}, tmp_path / "x.pt")
    whole = path.read_bytes()
    for cut in (len(whole) - 100, 5000, 2000):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptCheckpointError, match=rf"truncated zip archive: {cut} bytes") as caught:
            opened(path, open_torch).__enter__()
        if cut < 8000:
            assert "of at least 8" in str(caught.value)
    path.write_bytes(whole[:60])
    with pytest.raises(CorruptCheckpointError, match="truncated zip archive: 60 bytes are present"):
        opened(path, open_torch).__enter__()


def dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.state_dict_saver.save({"w": torch.ones(4)}, checkpoint_id=folder / "step", no_dist=True)
    return folder / "step"


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_are_named_as_directory_shard_and_metadata(tmp_path: Path) -> None:
    folder = dcp(tmp_path)
    found = directory_impostor(folder)
    assert found is not None
    assert "distributed checkpoint (DCP)" in found.what
    assert directory_impostor(tmp_path) is None
    assert directory_impostor(folder / ".metadata") is None
    for path in [folder / ".metadata", *folder.glob("*.distcp")]:
        with pytest.raises(InputError, match=r"distributed checkpoint \(DCP\)"):
            opened(path, open_torch).__enter__()


class Sharded:
    def __reduce__(self) -> Any:
        return dict, ()


def test_a_rank_file_of_fsdp_is_named(tmp_path: Path) -> None:
    path = saved({"model": {"w": Sharded(), "n": torch.ones(2)}}, tmp_path / "x.pt")
    old = b"c__builtin__\ndict\n"

    def sharded(name: str, data: bytes) -> bytes:
        new = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
        return data.replace(old, new) if name.endswith("data.pkl") else data

    with pytest.raises(UnknownFormatError, match=r"a sharded \(FSDP\) checkpoint: its tensors are ShardedTensor"):
        opened(rezipped(path, sharded), open_torch).__enter__()


FORMS: dict[str, Callable[[Path], Path]] = {
    "zip": lambda p: saved({"a": torch.ones(2)}, p / "x.safetensors"),
    "legacy": lambda p: saved({"a": torch.ones(2)}, p / "x.bin", use_zip=False),
    "legacy protocol 4": lambda p: saved({"a": torch.ones(2)}, p / "x", use_zip=False, protocol=4),
}


@pytest.mark.parametrize("form", FORMS)
def test_content_decides_and_never_the_suffix(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path)
    assert is_torch(path.read_bytes()[:1024])
    with opened(path, open_torch) as file:
        assert isinstance(file.root, dict)


def test_safetensors_are_not_torch() -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    assert not is_torch(struct.pack("<Q", len(header)) + header)


@given(st.sampled_from(sorted(IMPOSTORS)), st.binary(max_size=300), st.integers(0, 300))
def test_whatever_follows_only_our_errors_come_out(
    tmp_path_factory: pytest.TempPathFactory, name: str, more: bytes, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz-impostor"
    path.write_bytes(IMPOSTORS[name][0][:cut] + more)
    source = InputFile(path)
    try:
        open_torch(source)
    except PrecconvError:
        pass
    finally:
        source.close()
