"""File formats: a file in, a file out; interchangeable siblings.

A module here that defines ``FORMAT`` is a format; nothing else needs to know of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from ..dtypes import DType
from ..errors import InputError, UnknownFormatError
from ..fileio import InputFile, is_directory
from ..tensors import TensorInfo

__all__ = ["Format", "Layout", "Reader", "detect", "format_for_suffix", "formats", "open_checkpoint"]

_MODULES = ("safetensors",)
#: Enough of a file's start to tell any format by.
_HEAD = 64


class Reader(Protocol):
    """An open checkpoint.  ``infos`` are in the order of the bytes in the file."""

    @property
    def format(self) -> Format: ...
    @property
    def file(self) -> InputFile: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def infos(self) -> Sequence[TensorInfo]: ...
    @property
    def notes(self) -> Sequence[str]:
        """What a user should know of this file, a sentence each."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every byte of an output goes, fixed before any data is read."""

    header: bytes  #: written at the start of the file
    offsets: tuple[int, ...]  #: first byte of each tensor, in the order the tensors were given
    size: int  #: of the whole file, bytes


@dataclass(frozen=True, slots=True)
class Format:
    """A record of functions, not a base class."""

    name: str
    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]  #: whether a file that starts so claims this format
    open: Callable[[InputFile], Reader]  #: raises CorruptCheckpointError
    layout: Callable[[Sequence[TensorInfo], Sequence[DType], Mapping[str, str]], Layout]
    """Sources and their new dtypes to the bytes of an output; pure."""
    library_view: Callable[[Path], dict[str, tuple[str, tuple[int, ...]]]]
    """Names to (dtype code, shape) as the format's own library reads the file, in byte order.

    Raises VerificationError when the library refuses it.
    """


def formats() -> tuple[Format, ...]:
    found = (import_module(f"{__name__}.{m}").FORMAT for m in _MODULES)
    return tuple(f for f in found if isinstance(f, Format))


def format_for_suffix(path: Path) -> Format | None:
    return next((f for f in formats() if path.suffix.lower() in f.suffixes), None)


def detect(file: InputFile) -> Format:
    """The format a file is in, by its content and never by its name; raises UnknownFormatError."""
    head = file.read(0, min(_HEAD, file.size))
    if not head:
        raise UnknownFormatError("is empty", path=file.path)
    for fmt in formats():
        if fmt.sniff(head):
            return fmt
    known = ", ".join(f.name for f in formats())
    raise UnknownFormatError(f"not a checkpoint precconv can read (formats: {known})", path=file.path)


def open_checkpoint(path: str | os.PathLike[str]) -> Reader:
    """Open a checkpoint and read its header, not its data.  Close ``.file`` when done."""
    path = Path(path)
    if is_directory(path):
        raise InputError("is a directory, not a checkpoint file", path=path, hint="name a file in it")
    file = InputFile(path)
    try:
        return detect(file).open(file)
    except BaseException:
        file.close()
        raise
