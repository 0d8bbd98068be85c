"""Reading and rewriting a model's ``config.json``: hostile input, and every byte of it is somebody's own.

Beside a single file it is never needed, so what is wrong with it is a note; in a repo it is an error.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from .dtypes import DType, dtype
from .errors import InputError, UsageError

__all__ = ["config_beside", "read_config", "with_dtype"]

#: Bytes; the largest of published configs have some hundred kilobytes.
MAX_CONFIG = 16 << 20

#: What transformers and diffusers call a model's dtype; the second is the older name.
_DTYPE_KEYS = ("dtype", "torch_dtype")
#: What is said below these is about codes and scales (transformers, compressed-tensors, MLX), which no cast changes.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")

#: Enough of JSON, once it is known to be valid: a string before a colon is a key, any other is a value.
_TOKEN = re.compile(r'(?P<string>"(?:[^"\\]++|\\.)*+")(?P<colon>[ \t\r\n]*:)?|(?P<open>[{\[])|(?P<close>[}\]])')

#: What an object or list holds: ``dtypes`` is an object that is itself the value of a dtype key.
_Inside = Literal["config", "dtypes", "quantization"]


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
    found = _parsed(raw)
    return (found, []) if isinstance(found, dict) else (None, [_note(config, found)])


def read_config(data: bytes, where: str) -> dict[str, Any]:
    """A repo's config; ``where`` is its path, for the message.

    A byte order mark is passed over and of a key that comes twice the last counts.  Raises InputError.
    """
    found = _parsed(data.removeprefix(codecs.BOM_UTF8))
    if isinstance(found, str):
        raise InputError(found, path=where, hint="repair the file, or fetch it again")
    return found


def with_dtype(text: str, to: DType) -> str:
    """The config with each castable float that a ``dtype`` or ``torch_dtype`` names set to ``to``, wherever it stands.

    Nothing else changes, not a byte.  A value may also be an object of dtypes, one for each part of the model: that
    is what transformers saves when it was given one.  What stands below a quantization config is left alone, as are
    ``null``, ``"auto"`` and every other type.  Raises InputError for what is not a JSON object.
    """
    found = _loaded(text.removeprefix("\ufeff"))
    if isinstance(found, str):
        raise InputError(f"the config is unusable: {found}")
    pieces, done = [], 0
    for token in _dtype_values(text):
        old = json.loads(token["string"])
        new = _renamed(old, to)
        if new != old:
            pieces += [text[done : token.start()], f'"{new}"']
            done = token.end()
    return "".join([*pieces, text[done:]])


def _parsed(raw: bytes) -> dict[str, Any] | str:
    """The object that a config holds, or why it is of no use."""
    if len(raw) > MAX_CONFIG:
        return "too large for a model's config"
    try:
        return _loaded(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return "not valid JSON"


def _loaded(text: str) -> dict[str, Any] | str:
    try:
        found = json.loads(text)
    except RecursionError:
        return "nests too deeply"
    except ValueError:
        return "not valid JSON"
    return found if isinstance(found, dict) else "not an object"


def _dtype_values(text: str) -> Iterator[re.Match[str]]:
    """The strings of valid JSON that stand where a model's dtype does."""
    inside: list[_Inside] = []
    key: str | None = None  # of the value that comes next; None in a list
    for token in _TOKEN.finditer(text):
        if token["open"]:
            inside.append(_entered(inside[-1] if inside else "config", key, token["open"]))
            key = None
        elif token["close"]:
            inside.pop()
            key = None
        elif token["colon"]:
            key = json.loads(token["string"])
        elif inside[-1] == "dtypes" or (inside[-1] == "config" and key in _DTYPE_KEYS):
            yield token


def _entered(outer: _Inside, key: str | None, bracket: str) -> _Inside:
    if outer == "quantization" or key in _QUANTIZATION_KEYS:
        return "quantization"
    return "dtypes" if key in _DTYPE_KEYS and bracket == "{" else "config"


def _renamed(name: str, to: DType) -> str:
    """What a config's dtype becomes; itself unless it names a castable float."""
    prefix = "torch." if name.startswith("torch.") else ""
    try:
        found = dtype(name)
    except UsageError:
        return name
    return prefix + to.torch if found.is_castable else name


def _note(config: Path, why: str) -> str:
    return f"{config}: {why}, so tensor names alone say what the architecture needs"
