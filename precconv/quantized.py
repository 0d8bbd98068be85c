"""Tensors that belong to a quantized module, found by what stands beside them.

A dtype does not say what a tensor is: packed 4-bit weights are stored as BF16, scales as F16 or F32, and
a cast destroys either.  So a module (everything directly under one prefix) is recognised as a whole, from
the names and dtypes in it, and all of it is left alone: weight, scales, zeros and bias.  A config or the
file's metadata can name a format or add a module; they alone never make a plain float tensor quantized.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from .tensors import TensorInfo

__all__ = ["find_quantized"]

_BYTES = frozenset({"uint8", "int8"})
_WORDS = frozenset({"int16", "uint16", "int32", "uint32"})
_FP8 = frozenset({"fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"})
_FP4 = frozenset({"fp4", "fp6_e2m3", "fp6_e3m2"})
#: What a signature may ask of a tensor's type: ``leaf/class``; without one, any type will do.
_CLASSES: dict[str, frozenset[str]] = {
    "": frozenset(),
    "int": _BYTES | _WORDS | {"int64"},
    "byte": _BYTES,
    "fp8": _FP8,
    "narrow": _FP8 | _FP4,
    "packed": _BYTES | _WORDS | _FP8 | _FP4,
    "e8m0": frozenset({"uint8", "fp8_e8m0"}),
    "u32": frozenset({"uint32"}),
    "int8": frozenset({"int8"}),
}

#: Format, leaves that stand together, leaves of which one is enough.  The first leaf is the one looked for;
#: ``*`` is any beginning, the same in every leaf of the row.  First match wins: layouts that share leaves
#: stand after those that add to them.  From the state dicts of bitsandbytes 0.50, compressed-tensors 0.20,
#: torchao 0.18, hqq 0.2.8, gptqmodel 7.7, autoawq 0.2.9, exllamav2 0.3, exllamav3 1.6, aqlm 1.1.7, vptq
#: 0.0.5, optimum-quanto 0.2.7, modelopt 0.47, transformers 5.24 (quantizers/), ComfyUI, nunchaku, MLX.
_TABLE = (
    ("comfyui", "comfy_quant", ""),
    ("svdquant", "wscales qweight", ""),
    ("fp_quant", "forward_hadamard_matrix", "qweight dqweight backward_hadamard_matrix"),
    ("exl2", "q_weight/int", "q_groups q_scale q_scale_max q_invperm q_perm"),
    ("exl3", "trellis/int", "suh svh su sv mcg mul1"),
    ("gptq", "g_idx/int qweight/int", ""),
    ("awq", "qzeros qweight/int scales", ""),
    ("gptq", "qweight/int scales", ""),
    ("marlin", "B/int s", ""),
    ("marlin", "B_24/int s", ""),
    ("spqr", "dense_weights", "row_offsets col_vals"),
    ("aqlm", "codes/int codebooks", ""),
    ("vptq", "indices/int centroids.weight", ""),
    ("vptq", "res_indices/int res_centroids.weight", ""),
    ("higgs", "tables2 scales weight/int", ""),
    ("higgs", "tables scales weight/int", ""),
    ("sinq", "W_q meta", ""),
    ("hqq", "W_q scale", "zero nbits group_size axis packing zero_q shape view_as_float"),
    ("hqq", "W_q", "encoded_state_dict stores_quant_config scale_q zero_q offload_meta view_as_float"),
    ("bitsandbytes 4-bit", "absmax", "quant_map quant_state.bitsandbytes__nf4 quant_state.bitsandbytes__fp4"),
    ("bitsandbytes 8-bit", "SCB", ""),
    ("bitsandbytes 8-bit", "weight_format weight/byte", ""),
    ("eetq", "weight_scales weight/byte", ""),
    ("compressed-tensors", "weight_packed/int", ""),
    ("compressed-tensors", "bitmask compressed", ""),
    ("quanto", "_data _scale", ""),
    ("torchao", "*_qdata", "*_scale *_scale_and_zero *_group_scale"),
    ("torchao", "*:qdata", ""),
    ("gemma", "embedding_quantized embedding_scale", ""),
    ("gemma", "input_activation_scale weight_scale weight/packed", ""),
    ("mxfp4", "*_blocks/byte *_scales/e8m0", ""),
    ("mxfp4", "blocks/byte scales/e8m0", ""),
    ("nvfp4", "*_scale_2 */packed", ""),
    ("nvfp4", "weight_sf", "weight_global_scale weight_sf_rowmajor weight/packed"),
    ("nvfp4", "*_scale/fp8 */packed", ""),
    ("mlx", "scales weight/u32", ""),
    ("comfyui scaled fp8", "scale_weight weight/fp8", ""),
    ("fp8", "qscale_weight weight/fp8", ""),
    ("fp8", "*_scale_inv */narrow", ""),
    ("mxfp8", "*_scale/e8m0 */fp8", ""),
    ("mxfp4", "*_scale/e8m0 */packed", ""),
    ("mxfp4", "scale/e8m0 weight/byte", ""),
    ("fp8", "*_scale */fp8", ""),
    ("fp8", "scale weight/narrow", ""),
    ("fp8", "*_scales */fp8", ""),
    ("int8", "*_scale */int8", ""),
    ("int8", "qweight/byte scale", ""),
    ("int8", "*_q/byte *_scale", ""),
    ("int8", "*_int8/byte *_scale", ""),
    ("int8", "*_quantized/byte *_scale", ""),
    ("packed", "qweight/int scale", ""),
    ("packed", "*_scale */packed", ""),
    ("packed", "*_scales */packed", ""),
    ("packed", "scale weight/packed", ""),
    ("packed", "scales weight/packed", ""),
    ("scaled", "weight_scale_inv weight", ""),
    ("scaled", "weight_scale weight", ""),
)
#: Layouts that several tools write: the config's ``quant_method`` says which one did.
_SHARED = frozenset({"gptq", "awq", "marlin", "fp8", "mxfp8", "mxfp4", "nvfp4", "int8", "packed", "scaled", "mlx"})
#: Recognised on their own, without the tensors around them.
_LONE = {"_extra_state": "transformer engine", "scaled_fp8": "comfyui scaled fp8"}
#: Scales of activations and of the KV cache: they may stand in a module whose weights are plain.
_ACTIVATION_SCALES = frozenset(
    {"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"}
    | {"input_scale", "output_scale", "input_global_scale", "input_zero_point", "output_zero_point", "_amax"}
)
#: Where a format keeps more of a module than stands directly under its prefix.
_BELOW = {
    "vptq": ("centroids", "res_centroids", "outlier_centroids"),
    "bitsandbytes 4-bit": ("quant_state",),
}
#: What is packed by its name alone once a config says that the checkpoint is quantized.
_DECLARED = frozenset({"W_q", "qweight", "dqweight", "weight_packed"})
#: Nested configs looked into, and globs of an ignore list tried.
_MAX_CONFIGS = 1000
_MAX_GLOBS = 100


@dataclass(frozen=True, slots=True)
class _Signature:
    order: int
    format: str
    leaves: tuple[tuple[str, frozenset[str]], ...]
    one_of: tuple[tuple[str, frozenset[str]], ...]


def _leaves(text: str) -> tuple[tuple[str, frozenset[str]], ...]:
    parts = (word.partition("/") for word in text.split())
    return tuple((leaf, _CLASSES[kind]) for leaf, _, kind in parts)


_SIGNATURES = tuple(
    _Signature(order, name, _leaves(leaves), _leaves(one_of)) for order, (name, leaves, one_of) in enumerate(_TABLE)
)
_EXACT = frozenset(signature.leaves[0][0] for signature in _SIGNATURES)
_ENDINGS = tuple({leaf[1:] for leaf in _EXACT if leaf.startswith("*")})


def find_quantized(
    infos: Iterable[TensorInfo], config: Mapping[str, object] | None, metadata: Mapping[str, str]
) -> dict[str, str]:
    """Tensor name -> format, for every tensor of a quantized module.

    ``config`` is the repo's ``config.json``, ``metadata`` the ``__metadata__`` of its files.  A plain
    model gives an empty dict.
    """
    tensors = {info.name: info for info in infos}
    declared = _declared(config)
    modules = _by_signature(tensors, declared.method)
    for owner, name in (*_by_metadata(metadata), *_by_declaration(tensors, declared, modules)):
        modules.setdefault(owner, name)
    below = {f"{owner}.{child}": name for owner, name in modules.items() for child in _BELOW.get(name, ())}
    return dict(_members(tensors, modules | below, declared.method))


def _members(tensors: Mapping[str, TensorInfo], modules: Mapping[str, str], method: str) -> Iterator[tuple[str, str]]:
    scaled = method or next(iter(modules.values()), "")
    for name in tensors:
        owner, _, leaf = name.rpartition(".")
        if owner in modules:
            yield name, modules[owner]
        elif leaf in _LONE:
            yield name, _LONE[leaf]
        elif scaled and modules and leaf in _ACTIVATION_SCALES:
            yield name, scaled


def _by_signature(tensors: Mapping[str, TensorInfo], method: str) -> dict[str, str]:
    """Module prefix -> format, from the tensors alone."""
    best: dict[str, _Signature] = {}
    for name, info in tensors.items():
        owner, _, leaf = name.rpartition(".")
        for signature, stem in _candidates(leaf):
            if _stands(signature, tensors, owner, stem, info):
                for module in _modules(owner, tensors):
                    known = best.get(module)
                    if known is None or signature.order < known.order:
                        best[module] = signature
                break
    return {module: _format(found.format, tensors, module, method) for module, found in best.items()}


@lru_cache(maxsize=65536)
def _candidates(leaf: str) -> tuple[tuple[_Signature, str], ...]:
    """The signatures that look for this leaf, and what ``*`` stands for in it."""
    if leaf not in _EXACT and not leaf.endswith(_ENDINGS):
        return ()
    found = []
    for signature in _SIGNATURES:
        key = signature.leaves[0][0]
        if key == leaf:
            found.append((signature, ""))
        elif key.startswith("*") and len(leaf) >= len(key) and leaf.endswith(key[1:]):
            found.append((signature, leaf[: 1 - len(key)]))
    return tuple(found)


def _stands(signature: _Signature, tensors: Mapping[str, TensorInfo], owner: str, stem: str, info: TensorInfo) -> bool:
    prefix = owner + "." if owner or info.name.startswith(".") else ""

    def there(leaf: str, classes: frozenset[str]) -> bool:
        found = tensors.get(prefix + leaf.replace("*", stem))
        return found is not None and (not classes or found.dtype.name in classes)

    if not all(there(leaf, classes) for leaf, classes in signature.leaves):
        return False
    return not signature.one_of or any(there(leaf, classes) for leaf, classes in signature.one_of)


def _modules(owner: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """The prefix the parts stand under, and the module itself where that prefix is a tensor's own name."""
    yield owner
    if owner in tensors or owner.endswith("weight"):
        yield owner.rpartition(".")[0]


def _format(name: str, tensors: Mapping[str, TensorInfo], module: str, method: str) -> str:
    if name in _SHARED and method:
        return method
    if name == "awq":  # GPTQ packs rows, AWQ columns: then fewer columns than scales have
        weight, scales = (tensors.get(f"{module}.{leaf}") for leaf in ("qweight", "scales"))
        return "gptq" if weight and scales and weight.shape[-1:] == scales.shape[-1:] else "awq"
    return name


def _by_metadata(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What torchao and ComfyUI write into a file's ``__metadata__``."""
    for name in _strings(_json(metadata.get("tensor_names"))):
        entry = _json(metadata.get(name))
        if isinstance(entry, dict) and entry.get("_type", "Tensor") != "Tensor":
            yield name.rpartition(".")[0], "torchao"
    layers = _json(metadata.get("_quantization_metadata"))
    layers = layers.get("layers") if isinstance(layers, dict) else None
    for name in layers if isinstance(layers, dict) else ():
        yield name, "comfyui"


def _json(text: object) -> object:
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _strings(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a config says of quantization."""

    method: str = ""
    ignored: tuple[str, ...] = ()  #: modules it says are plain: names, prefixes or globs


def _declared(config: Mapping[str, object] | None) -> _Declared:
    for part in _configs(config):
        for key in ("quantization_config", "compression_config", "quantization"):
            said = part.get(key)
            if isinstance(said, Mapping) and (method := _method(said, key)):
                keys = ("modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules")
                return _Declared(method, tuple(name for k in keys for name in _strings(said.get(k))))
    return _Declared()


def _method(said: Mapping[str, object], key: str) -> str:
    """The format a config names; odd text in its place is worth no more than the fact that it is there."""
    method = said.get("quant_method", "")
    if not isinstance(method, str):
        return ""
    if not method and (said.get("load_in_4bit") is True or said.get("load_in_8bit") is True):
        return "bitsandbytes"
    if not method and "quant_algo" in said:
        return "modelopt"
    if not method and key == "quantization" and "bits" in said:
        return "mlx"
    return method if re.fullmatch(r"[A-Za-z0-9_.\-]{0,40}", method) else "quantized"


def _configs(config: Mapping[str, object] | None) -> Iterator[Mapping[str, object]]:
    queue: list[Mapping[str, object]] = [config] if isinstance(config, Mapping) else []
    for part in queue:
        yield part
        room = max(0, _MAX_CONFIGS - len(queue))
        queue.extend([value for value in part.values() if isinstance(value, Mapping)][:room])


def _by_declaration(
    tensors: Mapping[str, TensorInfo], declared: _Declared, known: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Modules with a packed weight whose companions have names that no signature knows."""
    if not declared.method:
        return
    packed = _CLASSES["packed"]
    plain = frozenset(declared.ignored)
    globs = [entry for entry in declared.ignored if "*" in entry and not entry.startswith("re:")][:_MAX_GLOBS]
    for name, info in tensors.items():
        owner, _, leaf = name.rpartition(".")
        is_weight = info.dtype.name in packed and ("weight" in leaf or owner.endswith("experts"))
        if (is_weight or leaf in _DECLARED) and owner not in known and not _ignored(owner, plain, globs):
            yield owner, declared.method


def _ignored(module: str, plain: frozenset[str], globs: list[str]) -> bool:
    """Whether an ignore list names the module; its regular expressions (``re:``) are not run."""
    parts = module.split(".")
    ends = (".".join(part) for i in range(1, len(parts) + 1) for part in (parts[:i], parts[-i:]))
    return not plain.isdisjoint((*parts, *ends)) or any(fnmatch.fnmatchcase(module, glob) for glob in globs)
