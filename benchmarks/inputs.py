"""Makes the checkpoints that the benchmarks convert, in constant memory and without torch.

Weights are normal with a standard deviation of 0.02, norms lie around 1, as in trained models.  GB is 2**30
bytes.  The same size gives the same bytes (for one numpy version); what is there already is reused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

GB = 1 << 30
ITEM = 4  # bytes of an fp32 element
CHUNK = 1 << 20  # elements made at a time
SMALL_SHAPE = (16, 16)  # 1 KB; two dimensions, so that nothing takes it for a norm

Shapes = Mapping[str, tuple[int, ...]]


class NoRoomError(Exception):
    """The disk has no room for this input; the text says how much it needs."""


@dataclass(frozen=True, slots=True)
class Input:
    """A checkpoint to be made: its file name, and its tensors in the order of the file."""

    file: str
    shapes: Shapes

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(prod(s) * ITEM for s in self.shapes.values())


def label(nbytes: int) -> str:
    return f"{nbytes / GB:.4g}GB"


def llama(nbytes: int) -> Input:
    """A decoder of about ``nbytes``: the widest that still has 16 layers, embeddings fill the rest."""
    widths = [1 << k for k in range(12, 5, -1)]
    hidden = next((h for h in widths if 16 * _layer_bytes(h) <= 0.9 * nbytes), widths[-1])
    layers = max(1, int(0.9 * nbytes / _layer_bytes(hidden)))
    vocab = max(8, (nbytes - layers * _layer_bytes(hidden)) // (2 * hidden * ITEM))
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, hidden),
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        shapes.update({f"model.layers.{i}.{name}": s for name, s in _layer(hidden).items()})
    return Input(f"llama-{label(nbytes)}.safetensors", dict(sorted(shapes.items())))


def single(nbytes: int, file: str = "") -> Input:
    """One tensor."""
    shape = (nbytes // ITEM // 16, 16)
    return Input(file or f"tensor-{label(nbytes)}.safetensors", {"model.embed_tokens.weight": shape})


def small(count: int) -> Input:
    """``count`` tensors of 1 KB."""
    names = (f"model.layers.{i // 100}.experts.{i % 100}.proj.weight" for i in range(count))
    return Input(f"small-{count}.safetensors", dict.fromkeys(sorted(names), SMALL_SHAPE))


def single_as_small(count: int) -> Input:
    """One tensor with as many bytes as ``small(count)``."""
    return single(count * prod(SMALL_SHAPE) * ITEM, f"single-{count}.safetensors")


def _layer(hidden: int) -> dict[str, tuple[int, ...]]:
    inner, kv = hidden * 11 // 4, hidden // 4
    return {
        "input_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
    }


def _layer_bytes(hidden: int) -> int:
    return sum(prod(s) * ITEM for s in _layer(hidden).values())


def header(shapes: Shapes) -> bytes:
    """The start of the file: eight bytes of length, then the JSON."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * ITEM
        fields[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def ensure(what: Input, directory: Path) -> Path:
    """The input's file, made unless it is there already; raises NoRoomError."""
    path, head = directory / what.file, header(what.shapes)
    if _is_whole(path, head, what.nbytes):
        return path
    require_room(directory, len(head) + what.nbytes, what.file)
    part = path.with_name(path.name + ".part")
    rng = np.random.Generator(np.random.SFC64(len(what.shapes)))
    buffer = np.empty(CHUNK, np.float32)
    with part.open("wb") as out:
        out.write(head)
        for name, shape in what.shapes.items():
            _write_values(out.write, rng, buffer, prod(shape), norm="norm" in name)
    part.replace(path)
    return path


def ensure_sharded(nbytes: int, directory: Path, *, shards: int = 4) -> Path:
    """The llama of ``nbytes`` as a directory: shards of about the same size, their index, a config."""
    whole = llama(nbytes)
    root = directory / f"llama-{label(nbytes)}-sharded"
    if (root / "config.json").is_file():
        return root
    require_room(directory, whole.nbytes, root.name)
    root.mkdir(exist_ok=True)
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shards)]
    held = 0
    for name, shape in whole.shapes.items():
        parts[min(shards - 1, held * shards // whole.nbytes)][name] = shape
        held += prod(shape) * ITEM
    weight_map: dict[str, str] = {}
    for n, shapes in enumerate(parts, 1):
        name = f"model-{n:05d}-of-{shards:05d}.safetensors"
        ensure(Input(name, shapes), root)
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": whole.nbytes}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (root / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}', encoding="utf-8")
    return root


def _write_values(
    write: Callable[[memoryview], int],
    rng: np.random.Generator,
    buffer: np.ndarray,
    count: int,
    *,
    norm: bool,
) -> None:
    for start in range(0, count, len(buffer)):
        values = buffer[: min(len(buffer), count - start)]
        rng.standard_normal(dtype=np.float32, out=values)
        values *= 0.1 if norm else 0.02
        values += 1 if norm else 0
        write(values.data)


def _is_whole(path: Path, head: bytes, nbytes: int) -> bool:
    if not path.is_file() or path.stat().st_size != len(head) + nbytes:
        return False
    with path.open("rb") as file:
        return file.read(len(head)) == head


def require_room(directory: Path, nbytes: int, file: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < 1.02 * nbytes:
        raise NoRoomError(f"{file}: needs {nbytes / GB:.2f} GB of disk, {free / GB:.2f} GB are free")


def ensure_ckpt(nbytes: int, directory: Path) -> Path:
    """The llama of ``nbytes`` as a Lightning-like zip ``.ckpt``, made by torch from the safetensors file."""
    source = ensure(llama(nbytes), directory)
    path = source.with_suffix(".ckpt")
    if path.is_file() and path.stat().st_size > llama(nbytes).nbytes:
        return path
    require_room(directory, source.stat().st_size, path.name)
    part = path.with_name(path.name + ".part")
    script = Path(__file__).with_name("make_ckpt.py")
    subprocess.run([sys.executable, script, source, part], check=True)
    part.replace(path)
    return path


def main(argv: list[str] | None = None) -> int:
    """Make inputs and print their names; what does not fit on the disk is said and skipped."""
    parser = argparse.ArgumentParser(description="make the inputs of the benchmarks")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--sizes", default="1,4,16", help="GB of the llama-shaped checkpoints")
    parser.add_argument("--tensor", type=float, default=8, help="GB of the one tensor; 0 for none")
    parser.add_argument("--small", type=int, default=100_000, help="number of 1 KB tensors; 0 for none")
    parser.add_argument("--ckpt", type=float, default=0, help="GB of a Lightning-like .ckpt; 0 for none")
    options = parser.parse_args(argv)
    directory: Path = options.dir
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [llama(int(float(size) * GB)) for size in options.sizes.split(",") if size]
    wanted += [single(int(options.tensor * GB))] if options.tensor else []
    wanted += [small(options.small), single_as_small(options.small)] if options.small else []
    makers: list[Callable[[], Path]] = [lambda what=what: ensure(what, directory) for what in wanted]  # type: ignore[misc]
    if options.ckpt:
        makers.append(lambda: ensure_ckpt(int(options.ckpt * GB), directory))
    for make in makers:
        try:
            print(make().name)
        except NoRoomError as e:
            print(f"skipped {e}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
