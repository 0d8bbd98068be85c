"""What a weight file's name says: stem, variant, shard number, suffix; and the name of what is written.

Everything here reads one name at a time and knows nothing of its neighbours.  The forms are those that transformers
5 (``_add_variant``, ``split_torch_state_dict_into_shards``), diffusers 0.42 (``variant_compatible_siblings``), PEFT,
timm and open_clip write and read; each row below says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "SUFFIXES",
    "IndexName",
    "WeightName",
    "family",
    "index_name",
    "is_canonical",
    "is_guess",
    "parse_index",
    "parse_weight",
    "rank",
    "renamed",
    "weight_name",
]

#: Of files that can be read; of one model in several formats the first is converted.
SUFFIXES: tuple[str, ...] = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pth.tar", ".pt.tar")
_RANK = {suffix: n for n, suffix in enumerate(SUFFIXES)}
#: Of files that are something else as often: vocabularies, embeddings, other tools' models.
_GUESSES = frozenset({".bin", ".pt", ".pth"})

#: One model's stem as safetensors and as ``.bin``.
PAIRS: tuple[tuple[str, str], ...] = (
    ("model", "pytorch_model"),  # transformers, timm, sentence-transformers
    ("open_clip_model", "open_clip_pytorch_model"),  # open_clip, timm
    ("diffusion_pytorch_model", "diffusion_pytorch_model"),  # diffusers
    ("adapter_model", "adapter_model"),  # PEFT
    ("pytorch_lora_weights", "pytorch_lora_weights"),  # diffusers' LoRA
)
_TO_BIN = dict(PAIRS)
_TO_SAFE = {torch: safe for safe, torch in PAIRS}
_CANONICAL = {(safe, ".safetensors") for safe, _ in PAIRS} | {(torch, ".bin") for _, torch in PAIRS}

#: Stems whose library reads the index where the directory has a single file too; the others read the file.
INDEX_FIRST = frozenset({"diffusion_pytorch_model"})

#: ``X-00001-of-00003``, and with the variant behind the numbers, as diffusers wrote it before 0.31.
_NUMBERED = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(?:\.([\w+-]+))?", re.DOTALL)
_WORD = re.compile(r"[\w+-]+")
_SUFFIX = "|".join(re.escape(s) for s in SUFFIXES)
#: ``X.safetensors.index.json``, ``X.safetensors.index.fp16.json``, ``X.safetensors.fp16.index.json`` (diffusers, old).
_INDEX = re.compile(rf"(.+)({_SUFFIX})(?:\.([\w+-]+))?\.index(?:\.([\w+-]+))?\.json", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WeightName:
    """A weight file's name in its parts; ``number`` and ``total`` are None for a file that is no shard."""

    stem: str
    variant: str | None
    suffix: str
    number: int | None = None
    total: int | None = None
    group: str = ""  #: the name with ``*`` for the number: equal for the shards of one numbering


@dataclass(frozen=True, slots=True)
class IndexName:
    """A shard index's name in its parts; ``suffix`` is that of the shards."""

    stem: str
    variant: str | None
    suffix: str


def is_canonical(stem: str, suffix: str) -> bool:
    """Whether a library looks for exactly this name."""
    return (stem, suffix) in _CANONICAL


def is_guess(stem: str, suffix: str) -> bool:
    """Whether a file of this name may be no checkpoint at all: ``vocab.bin``."""
    return suffix in _GUESSES and not is_canonical(stem, suffix)


def family(stem: str, suffix: str) -> str:
    """What the same model is called in every format: ``model`` for ``pytorch_model.bin``."""
    return _TO_SAFE.get(stem, stem) if suffix == ".bin" else stem


def rank(suffix: str) -> int:
    """Lower is preferred."""
    return _RANK[suffix]


def parse_weight(name: str) -> WeightName | None:
    """The parts of a file name without its directory, None when its suffix is no checkpoint's."""
    suffix = next((s for s in SUFFIXES if name.lower().endswith(s)), None)
    if suffix is None or len(name) == len(suffix):
        return None
    body = name[: -len(suffix)]
    found = _NUMBERED.fullmatch(body)
    if found is None:
        return WeightName(*_split_variant(body, suffix), suffix)
    front, number, total, behind = found.groups()
    if behind is None:
        stem, variant = _split_variant(front, suffix)
    elif is_canonical(front, suffix):
        stem, variant = front, behind
    else:  # not a variant, so not a shard's number either
        return WeightName(body, None, suffix)
    group = f"{front}-*-of-{total}" + (f".{behind}" if behind else "") + suffix
    return WeightName(stem, variant, suffix, int(number), int(total), group)


def _split_variant(body: str, suffix: str) -> tuple[str, str | None]:
    """``model.fp16``: a word behind a canonical stem is a variant, behind any other it is part of the name."""
    stem, dot, word = body.rpartition(".")
    return (stem, word) if dot and _WORD.fullmatch(word) and is_canonical(stem, suffix) else (body, None)


def parse_index(name: str) -> IndexName | None:
    """The parts of an index's file name, None when it is no index of weights that can be read."""
    if not name.endswith(".json"):
        return None
    found = _INDEX.fullmatch(name)
    if found is None:
        return None
    body, suffix, old, new = found.groups()
    if old and new:
        return None
    stem, within = _split_variant(body, suffix)  # huggingface_hub's save_torch_state_dict
    return IndexName(body, old or new, suffix) if old or new else IndexName(stem, within, suffix)


def renamed(stem: str, *, old: str, new: str) -> str:
    """The stem in another format: ``pytorch_model`` from ``.bin`` becomes ``model`` as ``.safetensors``, and back."""
    if (old, new) == (".bin", ".safetensors"):
        return _TO_SAFE.get(stem, stem)
    if (old, new) == (".safetensors", ".bin"):
        return _TO_BIN.get(stem, stem)
    return stem


def weight_name(
    stem: str, *, suffix: str, variant: str | None = None, number: int | None = None, total: int | None = None
) -> str:
    """As the Hub's libraries name it: ``model.fp16-00001-of-00003.safetensors``; numbers start at 1."""
    assert (number is None) == (total is None)
    body = stem if variant is None else f"{stem}.{variant}"
    return f"{body}{suffix}" if number is None else f"{body}-{number:05d}-of-{total:05d}{suffix}"


def index_name(stem: str, *, suffix: str, variant: str | None = None) -> str:
    """As the Hub's libraries name it: ``model.safetensors.index.fp16.json``."""
    return f"{stem}{suffix}.index.json" if variant is None else f"{stem}{suffix}.index.{variant}.json"
