"""The page around the data: static markup, style and script, allowed by their digests and nothing else.

The markup has no value of any file in it; the data follows as base64, which the script takes apart.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from .columns import packed

__all__ = ["MARK", "document"]

#: How every page begins; what begins otherwise is none of ours.
MARK = "<!doctype html>\n<!-- precconv page 1 -->\n"
#: Joined in this order: each uses what stands before it.
_SCRIPTS = ("format.js", "data.js", "heat.js", "table.js", "parts.js", "main.js")


def document(data: Mapping[str, Any]) -> str:
    """The whole page."""
    head, tail = _frame()
    return f"{MARK}{head}{packed(data)}{tail}"


@cache
def _frame() -> tuple[str, str]:
    """The page before its data and after it."""
    style = _static("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_static(name) for name in _SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _static("page.html")
    for place, text in {"@policy@": policy, "@style@": style, "@script@": script}.items():
        page = page.replace(place, text)
    head, _, tail = page.partition("@data@")
    return head, tail


def _digest(text: str) -> str:
    """As a content security policy names inline text (CSP Level 3, hash-source)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _static(name: str) -> str:
    return (files(__package__) / "static" / name).read_text("utf-8").replace("\r\n", "\n")
