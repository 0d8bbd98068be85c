"""Tensor names as the model's author wrote them: wrapper modules seen through.

Training code wraps modules (data parallel, compile, checkpointing, sharding), and each wrapper leaves a
component of its own in every name below it.  Rules match the canonical name; files keep the given one.
"""

from __future__ import annotations

__all__ = ["WRAPPERS", "canonical"]

#: The attribute under which a wrapper holds what it wraps.
WRAPPERS: tuple[str, ...] = (
    "module",  # torch DataParallel, DistributedDataParallel, AveragedModel; DeepSpeed, Apex, Megatron
    "_module",  # Opacus GradSampleModule
    "_orig_mod",  # torch.compile, OptimizedModule
    "_checkpoint_wrapped_module",  # torch checkpoint_wrapper and offload_wrapper
    "_fsdp_wrapped_module",  # torch FullyShardedDataParallel
    "_fpw_module",  # FairScale and torch 1.11 FlattenParamsWrapper
    "_forward_module",  # Lightning Fabric
)

_WRAPPERS = frozenset(WRAPPERS)


def canonical(name: str) -> str:
    """The name without wrapper components, wherever they stand.

    The last component is the tensor's own and always stays.  Two names of one checkpoint can become
    equal (a model beside its wrapped copy), so this is for matching, not a key.
    """
    if "module." not in name and "_orig_mod." not in name:  # nearly all names; three times the speed
        return name
    *owners, leaf = name.split(".")
    kept = [owner for owner in owners if owner not in _WRAPPERS]
    kept.append(leaf)
    return ".".join(kept)
