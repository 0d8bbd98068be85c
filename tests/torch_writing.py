"""Fills planned torch outputs with torch's own casts, and compares what loads with what the source loads as."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from precconv.dtypes import BF16, DType
from precconv.dtypes import dtype as dtype_named
from precconv.fileio import InputFile
from precconv.formats.elements import ElementReader
from precconv.formats.pickled import Placeholder, mapping, sequence, text
from precconv.formats.torch_file import TorchFile
from precconv.formats.torch_legacy import is_legacy, open_legacy
from precconv.formats.torch_out import Choice, TorchOutput, torch_output
from precconv.formats.torch_tar import is_tar, open_tar
from precconv.formats.torch_tensors import TensorRef, tensor_of
from precconv.formats.torch_zip import open_zip


def open_any(source: InputFile) -> TorchFile:
    head = bytearray(min(512, source.size))
    source.read_into(memoryview(head), 0)
    opener = open_zip if head[:2] == b"PK" else open_tar if is_tar(bytes(head)) else open_legacy
    assert opener is not open_legacy or is_legacy(bytes(head))
    return opener(source)


def tensors(root: object) -> Iterable[tuple[str, TensorRef]]:
    """Every dense tensor in dicts, lists and attributes, under its path; those in cycles once."""
    seen: set[int] = set()

    def visit(node: object, name: str) -> Iterable[tuple[str, TensorRef]]:
        found = tensor_of(node)
        if isinstance(found, TensorRef):
            yield name, found
            return
        if id(node) in seen and not isinstance(node, str | int):
            return
        seen.add(id(node))
        inner = mapping(node)
        if inner is not None:
            for key, value in inner.items():
                yield from visit(value, f"{name}.{text(key) or key}")
        elif sequence(node) is not None:
            for i, value in enumerate(sequence(node) or ()):
                yield from visit(value, f"{name}.{i}")
        if isinstance(node, Placeholder) and isinstance(node.state, dict):
            yield from visit(node.state, name)

    return visit(root, "")


def all_floats(name: str, ref: TensorRef) -> bool:  # noqa: ARG001
    return ref.dtype.is_castable


def fill(file: TorchFile, out: TorchOutput, path: Path, *, seed: int = 0) -> None:
    """Write a planned output, chunk by chunk in a random order."""
    with path.open("wb") as f:
        f.truncate(out.size)
        for offset, data in out.start:
            f.seek(offset)
            f.write(data)
        step = max(1000, out.size // 1000 + 1)
        tasks = [(p, at, min(step, p.numel - at)) for p in out.pieces for at in range(0, p.numel, step)]
        random.Random(seed).shuffle(tasks)
        chunks = []
        for piece, at, count in tasks:
            data = _cast(file, piece, at, count)
            offset = piece.offset + at * piece.nbytes // piece.numel
            f.seek(offset)
            f.write(data)
            chunks.append((offset, len(data), zlib.crc32(data)))
        for offset, data in out.finish(out.crcs(chunks)):
            f.seek(offset)
            f.write(data)
        f.seek(0, 2)
        assert f.tell() == out.size


def _cast(file: TorchFile, piece: Any, at: int, count: int) -> bytes:
    raw = bytearray(count * piece.src.itemsize)
    if piece.src_offset is not None:
        file.source.read_into(memoryview(raw), piece.src_offset + at * piece.src.itemsize)
    else:
        ElementReader(file, piece.src).read(memoryview(raw), at)
    if not piece.is_cast:
        return bytes(raw)
    values = torch.frombuffer(raw, dtype=getattr(torch, piece.src.dtype.torch))
    if piece.has_gaps:
        values[~torch.frombuffer(piece.shown(at, count), dtype=torch.bool)] = 0
    cast = values.to(getattr(torch, piece.to.torch))
    return bytes(cast.view(torch.uint8).numpy().tobytes())


def written(
    path: Path,
    *,
    to: DType | str = BF16,
    choose: Callable[[str, TensorRef], bool] = all_floats,
    target: Path | None = None,
    amended: int | None = 0,
) -> Path:
    """The file with the chosen tensors cast."""
    target = target or path.with_name(f"{path.stem}-out.pt")
    source = InputFile(path)
    try:
        file = open_any(source)
        kind = dtype_named(to)
        choices = [Choice(n, ref, kind if choose(n, ref) else ref.dtype) for n, ref in tensors(file.root)]
        out = torch_output(file, choices, folder=target.stem)
        assert amended is None or len(out.amended) == amended, out.amended
        fill(file, out, target)
    finally:
        source.close()
    check_archive(target)
    return target


def check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED


def load(path: Path, **options: Any) -> Any:
    options = {"map_location": "cpu", "weights_only": False, **options}
    return torch.load(path, **options)


def structure(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """All of a loaded object but its tensors' data, comparable; and its tensors."""
    found: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if type(obj) in (torch.Tensor, torch.nn.Parameter):
                number = numbers.setdefault(id(obj), len(found))
                if number == len(found):
                    found.append(obj)
                extra = {k: v for k, v in vars(obj).items() if isinstance(v, int | str)} if vars(obj) else {}
                shape = (type(obj).__name__, tuple(obj.shape), obj.requires_grad, str(obj.layout), extra)
                return (number, *shape, obj.is_conj(), obj.is_neg())
            if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
                untyped = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
                return ("storage", type(obj).__name__, bytes(list(untyped)))
            return None

    buffer = io.BytesIO()
    Pickler(buffer, 4).dump(value)
    return pickletools.optimize(buffer.getvalue()), found


def check_same(
    source: Path,
    out: Path,
    *,
    to: DType | str = BF16,
    cast: Callable[[torch.Tensor], bool] | None = None,
    **options: Any,
) -> None:
    """What loads from ``out`` is what loads from ``source``, floats (or those that ``cast`` says) in another dtype."""
    kind = getattr(torch, dtype_named(to).torch)
    floats = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    before, old = structure(load(source, **options))
    after, new = structure(load(out, **options))
    assert after == before
    for a, b in zip(old, new, strict=True):
        is_cast = a.dtype in floats if cast is None else cast(a)
        assert b.dtype == (kind if is_cast else a.dtype)
        if a.layout != torch.strided:
            a, b = a.coalesce(), b.coalesce()
            assert torch.equal(a.indices(), b.indices())
            a, b = a.values(), b.values()
        assert same_bits(a.detach().to(b.dtype), b.detach())
        assert b.stride() == a.stride()
    check_sharing(old, new)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_quantized:
        return torch.equal(a.int_repr(), b.int_repr()) and a.qscheme() == b.qscheme()
    flat = [x.resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b)]
    return torch.equal(*(x.view(torch.uint8) if x.numel() else x.to(torch.uint8) for x in flat))


def check_sharing(old: list[torch.Tensor], new: list[torch.Tensor]) -> None:
    """Tensors of one dtype that shared a storage do so, and overlap as they did."""

    def place(t: torch.Tensor) -> int:
        return t.untyped_storage().data_ptr()

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for a, b in zip(old, new, strict=True):
        if a.layout != torch.strided or not a.numel():
            continue
        first, twin = seen.setdefault(place(a), (a, b))
        assert a.dtype == first.dtype
        if b.dtype == twin.dtype:
            assert place(b) == place(twin)


# Things to save ---------------------------------------------------------------------------------------------


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


def trained(optimizer: Any) -> dict[str, Any]:
    model = net()
    made = optimizer(model.parameters())
    for _ in range(2):
        x = model[1](model[0](values(2, 3, 6, 6)))
        model[2](x.flatten(2).mean(2)[None])[0].sum().backward()
        made.step()
    return {"epoch": 3, "model": model.state_dict(), "optimizer": made.state_dict(), "rng": torch.get_rng_state()}
