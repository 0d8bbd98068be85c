"""Tensor names as the model's author wrote them: the prefixes that wrappers add are seen through."""

from __future__ import annotations

import re

__all__ = ["canonical"]

#: Components that DataParallel, ``torch.compile``, FSDP and activation checkpointing put into a name.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def canonical(name: str) -> str:
    """The name without the components that wrappers have put into it."""
    return _WRAPPERS.sub("", name)
