"""Warnings that save people: what a checkpoint's names, shapes and config say against a conversion.

One clear sentence each, decided before a value is read; the conversion goes on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from . import presets
from .dtypes import BF16, FP16, FP32, DType
from .tensors import TensorInfo

__all__ = ["advise"]

#: Names listed in a warning before it says how many more there are.
_NAMED = 3
#: A precision in a file name, as a word of its own: ``model.fp16.safetensors``, ``unet_bf16``.
_NAME_SAYS = re.compile(r"(?<![a-z0-9])(fp16|f16|float16|half|bf16|bfloat16|fp32|float32)(?![a-z0-9])")
#: Formats beside which a precision in a name is that of the rest, or of the arithmetic.
_NAME_HEDGES = re.compile(
    r"(?<![a-z0-9])(?:fp8|f8|(?:nv|mx)?fp4|nf4|int[48]|w\d+a\d+|gptq|awq|bnb|[48]bit|q\d)(?![a-z0-9])"
)
#: The autoencoder of a latent diffusion file, and what shows that the file is SDXL and not SD 1 or 2: their
#: autoencoders have the same names and shapes, and only SDXL's overflows.
_VAE = re.compile(r"(?:^|\.)first_stage_model\.decoder\.")
_BARE_VAE = re.compile(r"^(?:decoder\.mid\.block_1|decoder\.mid_block\.resnets\.0)\.")
_SDXL = re.compile(r"(?:^|\.)(?:conditioner\.embedders\.1|diffusion_model\.label_emb)\.")
_SDXL_FILE = re.compile(r"(?:sd_?xl|xl).*vae|vae.*(?:sd_?xl|xl)", re.IGNORECASE)
#: Weights that were made for FP16: their authors say so in the name.
_FIXED = re.compile(r"fp16[-_.]?fix", re.IGNORECASE)
#: T5's gated or plain feed-forward output, in transformers' layout and in the one of Wan's UMT5.
_T5 = re.compile(r"\.DenseReluDense\.wo\.weight$|(?:^|\.)blocks\.\d+\.ffn\.gate\.0\.weight$")


def advise(
    infos: Iterable[TensorInfo],
    config: Mapping[str, object] | None,
    target: DType,
    source_name: str,
    tables: Iterable[presets.Preset] = (),
) -> list[str]:
    """What to tell the user; ``source_name`` is the file, directory or repo as it was named.

    ``tables``: the presets of this checkpoint, which may have warnings of their own.
    """
    tensors = tuple(infos)
    return [
        *_force_upcast(tensors, config, target, source_name),
        *_position_ids(tensors),
        *_empty(tensors),
        *_misnamed(tensors, source_name),
        *_t5(tensors, target),
        *(warn.text for warn in presets.warnings(tables, target)),
    ]


def _force_upcast(
    tensors: Sequence[TensorInfo], config: Mapping[str, object] | None, target: DType, source_name: str
) -> Iterator[str]:
    if target != FP16:
        return
    forced = config.get("force_upcast") if isinstance(config, Mapping) else None
    if forced is True:
        yield (
            "this VAE's config says force_upcast: its activations overflow fp16, so keep the flag true "
            "or use bf16; the fp16 weights themselves are fine"
        )
    elif forced is None and not _FIXED.search(source_name) and _is_sdxl_vae(tensors, source_name):
        yield (
            "this holds the SDXL VAE, whose activations overflow fp16 (black images): run it in fp32 or "
            "bf16, or use the fp16-fix weights"
        )


def _is_sdxl_vae(tensors: Sequence[TensorInfo], source_name: str) -> bool:
    if any(_VAE.search(info.name) for info in tensors):
        return any(_SDXL.search(info.name) for info in tensors)
    bare = any(_BARE_VAE.search(info.name) for info in tensors)
    return bare and _SDXL_FILE.search(source_name) is not None


def _position_ids(tensors: Sequence[TensorInfo]) -> Iterator[str]:
    names = [i.name for i in tensors if i.dtype.is_castable and i.name.rpartition(".")[2] == "position_ids"]
    if names:
        yield (
            f"{_list(names)}: positions stored as floats, which some tool must have cast; "
            "bf16 is exact to 256 only, fp16 to 2,048: restore them as int64"
        )


def _empty(tensors: Sequence[TensorInfo]) -> Iterator[str]:
    empty = [i for i in tensors if 0 in i.shape and i.name.rpartition(".")[2] == "weight"]
    flat = [info.name for info in empty if len(info.shape) == 1]
    shaped = [info.name for info in empty if len(info.shape) > 1]
    if flat:
        yield (
            f"{_list(flat)}: empty, as DeepSpeed ZeRO-3 leaves what it has partitioned; "
            "gather the weights before saving (zero_to_fp32.py)"
        )
    if shaped:
        yield f"{_list(shaped)}: a weight with a dimension of zero holds no values"


def _misnamed(tensors: Sequence[TensorInfo], source_name: str) -> Iterator[str]:
    name = re.split(r"[/\\]", _FIXED.sub("", source_name).rstrip("/\\"))[-1].lower()
    said = {_spoken(word) for word in _NAME_SAYS.findall(name)}
    if len(said) != 1 or _NAME_HEDGES.search(name):  # none, or a name that speaks of a conversion
        return
    sizes: Counter[DType] = Counter()
    for info in tensors:
        if info.dtype.kind == "float" or info.dtype.bits < 64:
            sizes[info.dtype] += info.nbytes
    (claimed,) = said
    most, size = sizes.most_common(1)[0] if sizes else (claimed, 0)
    if most != claimed and size > 0:
        share = 100 * size / sizes.total()
        yield f"the name says {claimed}, the content is {share:.0f} % {most}; the content is what counts"


def _spoken(word: str) -> DType:
    return BF16 if word.startswith("b") else FP32 if word.endswith("32") else FP16


def _t5(tensors: Sequence[TensorInfo], target: DType) -> Iterator[str]:
    if target == FP16 and any(_T5.search(info.name) for info in tensors):
        yield (
            "a T5 feed-forward layer can reach 66246, above fp16's 65504: its output weights (wo) stay fp32, "
            "and bf16 avoids the question"
        )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
