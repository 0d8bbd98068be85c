"""Files of a model repository that are no weights to convert, told from their paths alone: tables.

A row is a name, a suffix or a directory, and what it means.  Only what has no row here is looked at further.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["DCP", "ORIGINAL", "Kind", "Role", "directory_of", "is_ignored", "roles", "saved_while_training"]


class Kind(Enum):
    STATE = "training state"  #: never weights
    FOREIGN = "weights in a format that cannot be read"
    SECOND = "the same weights once more"  #: weights, where there are no others


@dataclass(frozen=True, slots=True)
class Role:
    """Why a file is not converted; ``format`` names one that cannot be read."""

    kind: Kind
    why: str
    format: str = ""


#: Of version control, caches and this tool itself: no part of a model.
IGNORED = frozenset({".git", ".cache", ".huggingface", "__pycache__", ".ipynb_checkpoints", ".DS_Store"})
_PART = ".precconv-part"


def is_ignored(name: str) -> bool:
    """Whether a file or directory of this name is passed over without a word."""
    return name in IGNORED or name.endswith(_PART)


def _state(what: str) -> Role:
    return Role(Kind.STATE, f"{what} of a training run")


def _foreign(name: str) -> Role:
    return Role(Kind.FOREIGN, f"the weights in another format ({name})", name)


_OPTIMIZER, _RNG, _SCHEDULER = _state("optimizer state"), _state("random state"), _state("scheduler state")
_ONNX, _TF = _foreign("ONNX"), _foreign("TensorFlow")
_COREML, _GGUF, _GGML = _foreign("Core ML"), _foreign("GGUF"), _foreign("GGML")
#: Converted where its directory has no others, and where there are no others at all.
_CONSOLIDATED = Role(Kind.SECOND, "the same weights in the layout of another loader")
ORIGINAL = Role(Kind.SECOND, "the same weights in their first layout")
DCP = Role(Kind.STATE, "part of a distributed checkpoint (DCP)", "a distributed checkpoint (DCP)")

_NAMES: dict[str, Role] = {
    "training_args.bin": _state("the arguments"),  # transformers Trainer
    "optimizer.pt": _OPTIMIZER,
    "optimizer.bin": _OPTIMIZER,  # accelerate
    "scheduler.pt": _SCHEDULER,
    "scheduler.bin": _SCHEDULER,
    "scaler.pt": _state("gradient scaler"),
    "sampler.bin": _state("sampler state"),
    "dl_state_dict.bin": _state("sampler state"),
    "trainer_state.json": _state("the log"),
    "zero_to_fp32.py": Role(Kind.STATE, "joins the DeepSpeed state of a training run"),
    "rust_model.ot": _foreign("rust-bert"),
    "saved_model.pb": _TF,
    "weights.pb": _ONNX,  # diffusers' ONNX_EXTERNAL_WEIGHTS_NAME
    "model.onnx_data": _ONNX,
}
_PATTERNS: tuple[tuple[str, Role], ...] = (
    (r"optimizer_\d+\.(bin|pt)", _OPTIMIZER),  # accelerate, the second and later ones
    (r"scheduler_\d+\.(bin|pt)", _SCHEDULER),
    (r"sampler_\d+\.bin", _state("sampler state")),
    (r"rng_state.*\.pth", _RNG),
    (r"random_states_.*\.pkl", _RNG),
    (r"(bf16_|fp16_)?zero_pp_rank_.*\.pt|.*_(model|optim)_states\.pt", _state("DeepSpeed state")),
    (r".*\.distcp", DCP),
    (r".*\.(onnx|onnx_data|onnx\.data)", _ONNX),
    (r"openvino.*\.(bin|xml)", _foreign("OpenVINO")),
    (r"tf_model.*|.*\.h5|.*\.keras|.*\.ckpt\.(index|meta)|.*\.ckpt\.data-\d+-of-\d+|.*\.h5\.index\.json", _TF),
    (r".*\.msgpack|.*\.msgpack\.index(\..*)?\.json", _foreign("Flax")),
    (r".*\.tflite", _foreign("TensorFlow Lite")),
    (r".*\.gguf", _GGUF),
    (r".*\.ggml|ggml-.*\.bin", _GGML),
    (r".*\.mlmodel", _COREML),
    (r".*\.ot", _foreign("rust-bert")),
    (r".*\.flashpack", _foreign("FlashPack")),
    (r".*\.pdparams", _foreign("PaddlePaddle")),
    (r".*\.nemo", _foreign("NeMo")),
    (r".*\.(engine|plan)", _foreign("TensorRT")),
    # Meta's and Mistral's own loaders
    (r"consolidated.*(\.safetensors|\.pth|\.pt|\.safetensors\.index\.json)", _CONSOLIDATED),
)
_DIRECTORIES: tuple[tuple[str, Role], ...] = (
    (r"global_step\d+", _state("DeepSpeed state")),
    (r"pytorch_model_fsdp.*", _state("FSDP state")),
    (r"optimizer(_\d+)?", _OPTIMIZER),  # FSDP; a component is never called so
    (r"onnx", _ONNX),
    (r"openvino", _foreign("OpenVINO")),
    (r"coreml|.*\.(mlpackage|mlmodelc)", _COREML),
    (r"original", ORIGINAL),
)
_CHECKPOINT = re.compile(r"checkpoint[-_]\d+")  # transformers, diffusers' scripts; accelerate
_DEEPSPEED = re.compile(r"global_step\d+")


class _Rows:
    """Patterns tried together, so that a name costs one search however many rows there are."""

    def __init__(self, rows: tuple[tuple[str, Role], ...]) -> None:
        self._roles = {f"r{n}": role for n, (_, role) in enumerate(rows)}
        self._regex = re.compile("|".join(f"(?P<r{n}>{pattern})" for n, (pattern, _) in enumerate(rows)))

    def find(self, name: str) -> Role | None:
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return next(self._roles[group] for group, text in found.groupdict().items() if group in self._roles and text)


_BY_NAME, _BY_DIRECTORY = _Rows(_PATTERNS), _Rows(_DIRECTORIES)


def directory_of(path: str) -> str:
    """The directory part, "" for the root."""
    return path.rpartition("/")[0]


def roles(files: Iterable[str]) -> dict[str, Role]:
    """What the tables say of each file; a directory's row holds for all below it.  Others are absent."""
    directories: dict[str, Role | None] = {}
    found: dict[str, Role] = {}
    trained: set[str] = set()  # directories with a DeepSpeed checkpoint in them
    distributed: set[str] = set()
    beside: list[tuple[str, str, Role]] = []
    for path in files:
        where, _, name = path.rpartition("/")
        if where not in directories:
            directories[where] = next(filter(None, map(_BY_DIRECTORY.find, where.lower().split("/"))), None)
            trained.update(_above(where, _DEEPSPEED))
        role = directories[where] or _NAMES.get(name) or _BY_NAME.find(name.lower())
        if role is not None:
            found[path] = role
            if role is DCP:
                distributed.add(where)
        elif name in ("latest", ".metadata"):
            beside.append((path, where, DCP if name == ".metadata" else _state("DeepSpeed state")))
    found |= {path: role for path, where, role in beside if where in (distributed if role is DCP else trained)}
    return found


def saved_while_training(files: Iterable[str], holders: Collection[str]) -> dict[str, Role]:
    """Files in a ``checkpoint-N`` directory inside a directory that has weights itself (``holders``)."""
    role = Role(Kind.STATE, "a checkpoint saved during training")
    inside: dict[str, bool] = {}
    found = {}
    for path in files:
        where = directory_of(path)
        if where not in inside:
            inside[where] = any(above in holders for above in _above(where, _CHECKPOINT))
        if inside[where]:
            found[path] = role
    return found


def _above(where: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """The directories in which the path goes through one whose name matches."""
    parts = where.split("/")
    for n, part in enumerate(parts):
        if pattern.fullmatch(part):
            yield "/".join(parts[:n])
