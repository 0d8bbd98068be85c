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
        if not config.is_file():
            return None, []
        if config.stat().st_size > MAX_CONFIG:
            return None, [f"{config}: too large for a model's config, not looked at"]
        found = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None, [f"{config}: not valid JSON, not looked at"]
    return (found, []) if isinstance(found, dict) else (None, [f"{config}: not an object, not looked at"])
