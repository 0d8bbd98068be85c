"""Tiny models of every layout on the tests' Hub, and what a publication of one must hold.

Nothing but torch makes them; a shard is larger than what is read of a file for its header.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save

from precconv.hub.source import BLOCK

from .hub.server import HubServer
from .repos import files, pipeline, sharded, weight

__all__ = [
    "HEADER", "batch_of", "config", "is_half_of", "keyed", "llama", "model", "object_of", "published", "tensors",
    "weights",
]  # fmt: skip

#: Bytes that are read of a file before it is fetched.
HEADER = BLOCK
ROWS = 3 * HEADER // 4 // 32
CARD = b"---\nlicense: mit\n---\n# A model\n"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """More than a header's block of FP32."""
    return {"layer.weight": weight(seed, (ROWS, 32)), "layer.norm.weight": torch.ones(32)}


def model(seed: int = 0, **more: torch.Tensor) -> dict[str, bytes]:
    """A model in one file."""
    held = save({**tensors(seed), **more}, {"format": "pt"})
    return {"model.safetensors": held, "config.json": config(), "README.md": CARD}


def config(**more: object) -> bytes:
    return json.dumps({"model_type": "toy", "torch_dtype": "float32", **more}, indent=2).encode()


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": ROWS, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": ROWS // 2, "tie_word_embeddings": False,
}  # fmt: skip


def llama(shards: int, *, large: int | None = None) -> dict[str, bytes]:
    """A model that transformers loads: a shard for each layer, one before them and one after them.

    In shard ``large`` there is a value that does not fit FP16.
    """
    around = [{"model.embed_tokens.weight": weight(1, (ROWS, 32))}], [{"lm_head.weight": weight(2, (ROWS, 32))}]
    around[1][0]["model.norm.weight"] = torch.ones(32)
    parts = [*around[0], *(_layer(n) for n in range(shards - 2)), *around[1]]
    if large is not None:
        next(iter(parts[large - 1].values()))[0, 0] = 1e6
    with tempfile.TemporaryDirectory() as place:
        made = files(sharded(Path(place), parts, config=config(**LLAMA, num_hidden_layers=shards - 2).decode()))
    return {**made, "tokenizer.json": b"{}", "README.md": CARD}


def _layer(n: int) -> dict[str, torch.Tensor]:
    shapes = {f"self_attn.{p}_proj": (32, 32) for p in "qkvo"} | {"mlp.down_proj": (32, ROWS // 2)}
    shapes |= {f"mlp.{p}_proj": (ROWS // 2, 32) for p in ("gate", "up")}
    made = {f"model.layers.{n}.{name}.weight": weight(100 * n + i, s) for i, (name, s) in enumerate(shapes.items())}
    norms = ("input_layernorm", "post_attention_layernorm")
    return made | {f"model.layers.{n}.{name}.weight": torch.ones(32) for name in norms}


def _pickled(seed: int) -> dict[str, bytes]:
    stream = io.BytesIO()
    torch.save(tensors(seed), stream)
    return {"pytorch_model.bin": stream.getvalue(), "config.json": config()}


def _pipeline(seed: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        return files(pipeline(Path(place, "p"), unet=tensors(seed), vae=tensors(seed + 1)))


def _adapter(seed: int) -> dict[str, bytes]:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    held = {f"{name}.lora_A.weight": weight(seed, (4, 32)), f"{name}.lora_B.weight": weight(seed + 1, (32, 4))}
    said = {"peft_type": "LORA", "base_model_name_or_path": "acme/base", "r": 4}
    return {"adapter_model.safetensors": save(held, {"format": "pt"}), "adapter_config.json": json.dumps(said).encode()}


def batch_of(hub: HubServer) -> list[str]:
    """Fill the Hub with a batch that has one of everything; what a list of it says, in order."""
    made: Mapping[str, Mapping[str, bytes]] = {
        "acme/sharded": llama(3),
        "acme/pickled": _pickled(10),
        "acme/pipeline": _pipeline(20),
        "acme/lone": {"lone.safetensors": save(tensors(30))},
        "acme/variant": {"model.fp32.safetensors": save(tensors(40), {"format": "pt"}), "config.json": config()},
        "acme/adapter": _adapter(50),
        "acme/large": model(60, **{"layer.bias": torch.full((8,), 1e6)}),
        "acme/cut-once": model(70),
        "acme/cut-always": model(80),
        "acme/new-name": model(90),
    }
    for name, content in made.items():
        hub.create(name, content)
    hub.rename("acme/new-name", "acme/newest-name")
    hub.create("closed/gated", model(100), gated=True)
    hub.create("closed/private", model(110), private=True)
    return [
        *(name for name in made if name != "acme/new-name"), "acme/new-name", "closed/gated", "closed/private",
        "acme/missing",
    ]  # fmt: skip


def object_of(hub: HubServer, repo: str, path: str = "model.safetensors") -> str:
    """The path of a large file's object in the server's log."""
    return f"^/objects/{hashlib.sha256(hub.read(repo, path)).hexdigest()}"


def published(hub: HubServer, repo: str, revision: str = "main") -> dict[str, bytes]:
    """What a repo holds, but for the file that every repo begins with."""
    found = {name: hub.read(repo, name, revision) for name in hub.files(repo, revision)}
    found.pop(".gitattributes")
    return found


def keyed(hub: HubServer, repo: str) -> list[str]:
    """The titles of the commits that publications made, the newest first."""
    return [c.title for c in hub.commits(repo) if "precconv-key: " in c.description]


def weights(content: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors and torch files among these, by file and name."""
    found: dict[str, torch.Tensor] = {}
    for path, data in content.items():
        if path.endswith(".safetensors"):
            found |= {f"{path}:{name}": x for name, x in load(data).items()}
        elif path.endswith(".bin"):
            held = torch.load(io.BytesIO(data), weights_only=True)
            found |= {f"{path}:{name}": x for name, x in held.items()}
    return found


def is_half_of(made: Mapping[str, bytes], source: Mapping[str, bytes]) -> bool:
    """Whether these are the same files, their weights the FP16 cast of the source's, norms excepted.

    What the source has as a variant for FP32 alone is no variant any more.
    """
    source = {name.replace(".fp32.", "."): data for name, data in source.items()}
    got, want = weights(made), weights(source)
    cast = {name: x if "norm" in name else x.half() for name, x in want.items()}
    same = all(name in cast and x.dtype == cast[name].dtype and torch.equal(x, cast[name]) for name, x in got.items())
    return same and set(got) == set(want) and set(made) == set(source)
