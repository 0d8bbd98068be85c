"""What happens in a batch, as lines that grep and awk can read: time, level, source, event, ``key=value`` …"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["LogEvent", "line"]

_PLAIN = re.compile(r"[\w./:@+,%~*?<>()\[\]-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One thing that happened to one job, or to the batch as a whole, whose source is ``-``."""

    time: str
    level: Literal["info", "warning", "error"]
    source: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)  #: those that are None are not shown


def line(event: LogEvent) -> str:
    """One line, without its end; what is no plain word stands in double quotes, as in JSON."""
    fields = [f"{key}={_word(value)}" for key, value in event.fields.items() if value is not None]
    return " ".join([event.time, event.level, _word(event.source), event.event, *fields])


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
