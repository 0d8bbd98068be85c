"""Reading a diffusers pipeline's ``model_index.json``: which directories it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from precconv.errors import CorruptCheckpointError, InputError

from .doors import json_object, listed, shown, unsafe

__all__ = ["MODEL_INDEX", "component_names", "read_pipeline", "require_components"]

MODEL_INDEX = "model_index.json"
#: Bytes; published ones have one or two kilobytes.
MAX_PIPELINE = 16 << 20


def read_pipeline(raw: bytes, *, path: str) -> dict[str, object]:
    """Parsed, with every component's name checked.  Raises CorruptCheckpointError."""
    found = json_object(raw, path=path, limit=MAX_PIPELINE)
    for name in component_names(found):
        why = unsafe(name) or ("is not the name of a directory" if "/" in name or ":" in name else None)
        if why is not None:
            raise CorruptCheckpointError(f"its component {shown(name)} {why}", path=path)
    return found


def component_names(pipeline: Mapping[str, object]) -> list[str]:
    """The entries ``name: [library, class]`` with a class; the others are settings or components left out."""
    return [name for name, value in pipeline.items() if not name.startswith("_") and _is_component(value)]


def _is_component(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(part is None or isinstance(part, str) for part in value)
        and value[1] is not None
    )


def require_components(pipeline: Mapping[str, object], files: Iterable[str], *, path: str) -> None:
    """Raise InputError naming every component without a directory."""
    there = {file.partition("/")[0] for file in files if "/" in file}
    missing = [name for name in component_names(pipeline) if name not in there]
    if missing:
        raise InputError(
            f"its components {listed(missing)} have no directory"
            if len(missing) > 1
            else f"its component {missing[0]} has no directory",
            path=path,
            hint="download the whole pipeline, or set what it does without to [null, null]",
        )
