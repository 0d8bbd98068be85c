"""Planned torch outputs: values, structure, aliases and archives against torch itself."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from precconv.dtypes import BF16, FP16, FP32, FP64
from precconv.errors import InputError, UsageError
from precconv.fileio import InputFile
from precconv.formats.torch_out import Choice, torch_output
from precconv.formats.torch_tensors import TensorRef

from .torch_files import rezipped, saved
from .torch_writing import (
    check_same,
    load,
    net,
    open_any,
    planned,
    tensors,
    trained,
    values,
    written,
)

FORMS = [pytest.param(True, id="zip"), pytest.param(False, id="legacy")]


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


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
@pytest.mark.parametrize("use_zip", FORMS)
@pytest.mark.parametrize("name", OBJECTS)
def test_weights_only_loads_what_it_loaded(tmp_path: Path, name: str, use_zip: bool) -> None:
    path = saved(OBJECTS[name](), tmp_path / "a.pt", use_zip=use_zip)
    out = written(path)
    try:
        load(path, weights_only=True)
    except (pickle.UnpicklingError, AttributeError):
        return
    check_same(path, out, cast=is_castable, weights_only=True)


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
    with pytest.raises(InputError, match=r"2\.pt: tensor '\.a': is not in this file"):
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
