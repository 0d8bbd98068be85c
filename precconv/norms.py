"""Which tensors belong to normalisation layers, told from the names and shapes of a whole checkpoint.

Tensors are grouped by the module that owns them, and each module is judged by ``RULES`` in turn: by its
running statistics, its name, its tensors' own names, and its structure.  Structure is what finds
torchvision's ``downsample.1`` or an LDM file's ``in_layers.0``, whose names say nothing.  Where the
evidence is even the answer is "norm": that costs a few bytes, the other mistake costs precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from .names import canonical
from .norm_tables import (
    ACTIVATION,
    AFFINE,
    CAMEL_CASE,
    DIGITS,
    EXTRAS,
    IGNORED,
    LDM_EMA,
    LONE,
    MIN_LONE,
    NORM,
    NORMS,
    OFFSETS,
    OWN_NAME,
    PAIRS,
    PEFT,
    PEFT_PARTS,
    PER_HEAD,
    PLAIN,
    QUERY_KEY,
    SCALES,
    SHIFTS,
    STATISTICS,
    VECTOR,
)
from .tensors import TensorInfo

__all__ = ["RULES", "find_norms"]

Shapes = Mapping[str, tuple[int, ...]]


class Module(NamedTuple):
    """What one module owns, and what the checkpoint says about its surroundings."""

    path: str  #: canonical, without PEFT's components
    tensors: Shapes  #: shape by leaf, without ``IGNORED``
    is_leaf: bool  #: no other module of the checkpoint lies below it
    beside_conv: bool  #: in a Sequential, directly after a convolution or batch norm, or before a convolution

    @property
    def name(self) -> str:
        """The last component, lower case."""
        return self.path.rpartition(".")[2].lower()

    @property
    def kind(self) -> str:
        """The name, or the list's name for an entry of a list (``acts.0``), lower case."""
        container, _, name = self.path.rpartition(".")
        return (container.rpartition(".")[2] if _is_entry(name) else name).lower()


# Rules: each gives the leaves of the module's tensors that are a norm's, none if it doesn't apply.


def by_statistics(module: Module) -> Collection[str]:
    """Running statistics: BatchNorm, and InstanceNorm that tracks them; all that the module owns is theirs.

    But in a quantization-aware ``ConvBn2d`` the weight and bias beside them are the convolution's.
    """
    tensors = module.tensors
    if STATISTICS.isdisjoint(tensors):
        return ()
    found = STATISTICS.intersection(tensors)
    rank = max(1, *(len(tensors[leaf]) for leaf in found))
    if len(tensors.get("weight", ())) > rank:
        return found.union(tensors.keys() & {"gamma", "beta"})
    return found.union(leaf for leaf in tensors if len(tensors[leaf]) <= rank)


def by_name(module: Module) -> Collection[str]:
    """A component that says norm, and shapes that a norm can have.

    Only the last component counts: diffusers' ``norm1.linear`` is a Linear, and so is a ``norm`` that owns
    a matrix.  A lone bias (BitFit files) needs a module without anything unknown in it.
    """
    if not says_norm(module.path):
        return ()
    scale = next((leaf for leaf in SCALES if leaf in module.tensors), None)
    if scale is None:
        return _without_scale(module.tensors)
    shape = module.tensors[scale]
    if not _is_per_head(module, scale) and (not _is_vector(shape) or _is_projection(module, scale)):
        return ()
    if scale == "alpha" and ("beta" in module.tensors or prod(shape) == 1):
        return ()  # ResMLP's affine and Snake; LoRA's scalar
    if scale == "scale" and "zero_point" in module.tensors:
        return ()  # quantizes the norm's output
    offsets = (leaf for leaf, other in module.tensors.items() if other == shape or _is_vector(other))
    return [scale, *OFFSETS.intersection(offsets)]


def by_own_name(module: Module) -> Collection[str]:
    """A tensor that says norm itself, whoever owns it: Transformer Engine's fused layers, bare parameters."""
    return [leaf for leaf, shape in module.tensors.items() if says_norm_itself(leaf) and _is_norm_vector(shape)]


def by_pair(module: Module) -> Collection[str]:
    """A scale and a shift of one shape, and nothing else: a LayerNorm or GroupNorm in a Sequential."""
    if len(module.tensors) < 2 or not module.is_leaf or AFFINE.search(module.name):
        return ()
    for scale, shift in PAIRS:
        shape = module.tensors.get(scale)
        if shape is None or shape != module.tensors.get(shift) or not _is_vector(shape):
            continue
        if scale != "weight" and prod(shape) == 1:  # StarReLU, learned offsets; Linear has no weight of [1]
            continue
        if (len(shape) == 1 or scale not in PLAIN) and set(module.tensors) <= {scale, shift, *EXTRAS}:
            return list(module.tensors)
    return ()


def by_itself(module: Module) -> Collection[str]:
    """One vector and nothing else: an RMSNorm in a Sequential, unless its place or name says otherwise.

    PReLU looks the same; it has one weight by default, and stands beside convolutions.
    """
    if len(module.tensors) != 1:
        return ()
    ((leaf, shape),) = module.tensors.items()
    if leaf == "g" and shape == (1,):  # lucidrains' ScaleNorm, which may hold the layer that follows it
        return (leaf,)
    if leaf not in LONE or not module.is_leaf or not _is_norm_vector(shape):
        return ()
    kind = module.kind
    if leaf == "weight" and (len(shape) > 1 or shape[0] < MIN_LONE or _holds_a_vector(module, kind)):
        return ()
    return () if AFFINE.search(kind) else (leaf,)


#: In order; the first that finds something decides for its module.
RULES: tuple[Callable[[Module], Collection[str]], ...] = (
    by_statistics,
    by_name,
    by_own_name,
    by_pair,
    by_itself,
)


def _without_scale(tensors: Shapes) -> Collection[str]:
    """A module of shifts alone (BitFit files, BiasNorm) or of flax statistics; nothing unknown in it."""
    known = all(leaf in OFFSETS and _is_vector(shape) for leaf, shape in tensors.items())
    shifts = not tensors.keys().isdisjoint(SHIFTS)
    return tuple(tensors) if known and (shifts or {"mean", "var"} <= tensors.keys()) else ()


def _is_projection(module: Module, scale: str) -> bool:
    """A Linear or convolution from or to one channel: its bias lacks the weight's broadcast dimensions."""
    shape, bias = module.tensors[scale], module.tensors.get("bias")
    return scale in PLAIN and len(shape) > 1 and bias is not None and bias != shape


def _is_per_head(module: Module, scale: str) -> bool:
    """One row a head, or one for each of several inputs, as no Linear would be laid out."""
    shape = module.tensors[scale]
    if len(shape) - shape.count(1) != 2:
        return False
    paired = any(module.tensors.get(leaf) == shape for leaf in SHIFTS)
    return paired or scale in PER_HEAD or (scale == "weight" and QUERY_KEY.search(module.name) is not None)


def _holds_a_vector(module: Module, kind: str) -> bool:
    """Something else that owns one vector."""
    return bool(module.beside_conv or ACTIVATION.search(kind) or VECTOR.search(module.name))


def _is_vector(shape: tuple[int, ...]) -> bool:
    """At most one dimension is not 1."""
    return len(shape) - shape.count(1) <= 1


def _is_norm_vector(shape: tuple[int, ...]) -> bool:
    return _is_vector(shape) and prod(shape) > 1


# Names.


def _component_says_norm(name: str) -> bool:
    lower = name.lower()
    return NORM.search(lower) is not None or (lower != name and CAMEL_CASE.search(name) is not None)


def _is_container(name: str) -> bool:
    return NORMS.search(name.lower()) is not None


@lru_cache(maxsize=1 << 12)
def says_norm_itself(leaf: str) -> bool:
    """Whether a tensor's own name, without its module's, is a norm's."""
    return OWN_NAME.search(leaf.lower()) is not None


def says_norm(path: str) -> bool:
    """Whether a module's path ends in a norm's name, or in an entry of a list of norms."""
    owner, _, name = path.rpartition(".")
    if _component_says_norm(name):
        return True
    if not owner:
        return False
    container = owner.rpartition(".")[2]
    return _is_container(container) or (_is_entry(name) and _component_says_norm(container))


def _is_entry(name: str) -> bool:
    """Of a ModuleList or Sequential, or the one entry of a PEFT ModuleDict."""
    return _is_index(name) or name == "default"


def _is_index(name: str) -> bool:
    return name.isdecimal() and len(name) < 10  # longer ones are hostile: int() refuses them


# The checkpoint as modules.


def _split(name: str) -> tuple[str, str]:
    """Owner and leaf of a tensor's name; TF and Haiku write ``a/b/gamma:0``."""
    if "/" in name:
        name = name.removesuffix(":0").replace("//", "/").replace("/", ".")
    if name.startswith("model_ema.") and (match := LDM_EMA.match(name)):
        return match[1], match[2]
    owner, _, leaf = name.rpartition(".")
    return owner, leaf


def _parents(paths: Iterable[str]) -> set[str]:
    """The paths that some other path lies below.

    Sorted with the dot as the lowest character, what lies below a path follows it at once.  No prefix of a path is
    stored that is not a path itself: a hostile name has a million.
    """
    ordered = sorted({path.replace(".", "\0") for path in paths})
    return {
        above.replace("\0", ".")
        for above, below in pairwise(ordered)
        if below.startswith(above) and (not above or below[len(above)] == "\0")
    }


def _neighbour(path: str, step: int) -> str | None:
    """Another entry of the Sequential or ModuleList that this is an entry of."""
    container, dot, index = path.rpartition(".")
    return f"{container}{dot}{int(index) + step}" if _is_index(index) else None


def _beside_convolutions(paths: Sequence[str], shapes: Sequence[Shapes]) -> set[str]:
    """Where the lone vector of a Sequential is rather a PReLU's: next to convolutions, after a BatchNorm.

    Nowhere in a model whose named norms are lone weights: there it is one more of them (ConvNeXt's RMSNorm).
    """
    found: set[str | None] = set()
    for path, tensors in zip(paths, shapes, strict=True):
        if len(tensors.get("weight", ())) > 2:
            found.add(_neighbour(path, -1))
        elif STATISTICS.isdisjoint(tensors):
            continue
        found.add(_neighbour(path, 1))
        found.add(_neighbour(path.rpartition(".")[0], 1))  # after the block it lies in
    found.discard(None)
    for path, tensors in zip(paths, shapes, strict=True) if found else ():
        if len(tensors) == 1 and len(tensors.get("weight", ())) == 1 and says_norm(path):
            return set()
    return {path for path in found if path is not None}


def _paths(owners: Iterable[str]) -> list[str]:
    """The owners' paths without wrappers and PEFT's components; few checkpoints have any, so they are asked at once."""
    paths = list(owners)
    text = "\n".join(paths)
    if "module" in text or "_orig_mod" in text:
        paths = [canonical(f"{owner}.")[:-1] for owner in paths]
    if any(part in text for part in PEFT_PARTS):
        paths = [PEFT.sub("", path) for path in paths]
    return paths


def _ends(paths: Iterable[str]) -> Iterator[bytes]:
    """All that the rules read of each path: its last two components, and of a digit that it is one.

    As bytes, of which digits are translated at four times the speed.
    """
    known: dict[str, bytes] = {}
    for path in paths:
        end = path[path.rfind(".", 0, max(0, path.rfind("."))) + 1 :]
        alike = known.get(end)
        if alike is None:
            alike = known[end] = end.encode("utf-8", "surrogatepass").translate(DIGITS)
        yield alike


def _judge(module: Module) -> Collection[str]:
    for rule in RULES:
        if leaves := rule(module):
            return leaves
    return ()


def find_norms(infos: Sequence[TensorInfo]) -> frozenset[str]:
    """Names, as given, of the floating-point tensors that belong to a normalisation layer.

    Wants the whole checkpoint, not one shard: siblings are evidence.  The order doesn't matter.
    """
    keys = [_split(info.name) for info in infos]
    owners: dict[str, dict[str, tuple[int, ...]]] = {}
    for (owner, leaf), info in zip(keys, infos, strict=True):
        if leaf not in IGNORED:
            owners.setdefault(owner, {})[leaf] = info.shape
    norms = _norms(owners)
    return frozenset(
        info.name
        for (owner, leaf), info in zip(keys, infos, strict=True)
        if owner in norms and leaf in norms[owner] and info.dtype.is_castable
    )


def _norms(owners: Mapping[str, Shapes]) -> dict[str, Collection[str]]:
    """The owners that have tensors of a norm, and which; modules that look alike are judged once."""
    paths = _paths(owners)
    parents = _parents(paths)
    beside_conv = _beside_convolutions(paths, [*owners.values()])
    judged: dict[tuple[object, ...], Collection[str]] = {}  # most modules stand in every layer
    found: dict[str, Collection[str]] = {}
    for path, end, (owner, shapes) in zip(paths, _ends(paths), owners.items(), strict=True):
        is_leaf, beside = path not in parents, path in beside_conv
        alike = (end, is_leaf, beside, *shapes.items())
        leaves = judged.get(alike)
        if leaves is None:
            leaves = judged[alike] = _judge(Module(path, shapes, is_leaf, beside))
        if leaves:
            found[owner] = leaves
    return found
