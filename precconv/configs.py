"""Reading the ``config.json`` that lies beside a model's weights: hostile input, and never needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["config_beside"]

#: Bytes; the largest of published configs have some hundred kilobytes.
MAX_CONFIG = 16 << 20


def config_beside(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The config in a checkpoint's directory, None where there is none, and a note on one that is of no use."""
    config = path.parent / "config.json"
    try:
        if not config.is_file():  # nothing, or what must not be opened: a pipe would never end
            return None, []
        with config.open("rb") as file:
            raw = file.read(MAX_CONFIG + 1)
    except OSError as e:
        return None, [_note(config, f"cannot be read ({(e.strerror or str(e)).lower()})")]
    if len(raw) > MAX_CONFIG:
        return None, [_note(config, "too large for a model's config")]
    try:
        found = json.loads(raw.decode("utf-8"))
    except RecursionError:
        return None, [_note(config, "nests too deeply")]
    except ValueError:
        return None, [_note(config, "not valid JSON")]
    return (found, []) if isinstance(found, dict) else (None, [_note(config, "not an object")])


def _note(config: Path, why: str) -> str:
    return f"{config}: {why}, so tensor names alone say what the architecture needs"
