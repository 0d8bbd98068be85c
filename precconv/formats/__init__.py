"""File formats: a file in, a file out; interchangeable siblings.

A module here that defines ``FORMAT`` is a format; nothing else needs to know of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

from ..dtypes import DType
from ..errors import InputError, UnknownFormatError
from ..fileio import InputFile, SourceFile
from ..paths import is_directory
from ..tensors import TensorInfo
from .impostors import directory_impostor, file_impostor
from .torch_tensors import TensorRef

__all__ = [
    "Elements",
    "Format",
    "Layout",
    "Place",
    "Reader",
    "Source",
    "detect",
    "format_for_suffix",
    "format_named",
    "formats",
    "open_reader",
]

_MODULES = ("safetensors", "torch")
#: Enough of a file's start to tell any format by.
_HEAD = 1024


class Elements(Protocol):
    """Reads a tensor whose elements do not lie one after the other in the file; for one thread at a time."""

    def read(self, out: memoryview, start: int) -> None:
        """Fill ``out``, bytes of whole elements, in row-major order from element ``start`` on."""
        ...


class Reader(Protocol):
    """An open file, its header read and valid."""

    @property
    def format(self) -> Format: ...
    @property
    def file(self) -> SourceFile: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def notes(self) -> Sequence[str]:
        """What a user should know of this file, a sentence each."""
        ...

    @property
    def digest(self) -> str:
        """``sha256:…`` of what indexes the data: enough to tell two files apart, but not to prove every byte."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of a file that a conversion is about."""

    reader: Reader
    infos: Sequence[TensorInfo]  #: under the names they get in the output
    refs: Mapping[str, TensorRef] = field(default_factory=dict)  #: of a torch checkpoint's tensors, by those names
    open_elements: Callable[[TensorRef], Elements] | None = None  #: for those of them without an offset
    is_part: bool = False  #: whether the user chose some of the file's weights, and wants nothing else

    @property
    def file(self) -> SourceFile:
        return self.reader.file

    def elements(self, info: TensorInfo) -> Callable[[], Elements] | None:
        """What reads a tensor that has no offset."""
        if info.offset >= 0:
            return None
        assert self.open_elements is not None
        return partial(self.open_elements, self.refs[info.name])


class Place(NamedTuple):
    """A stretch of tensor data: elements that follow each other in the source, and do so in the output."""

    src: TensorInfo  #: name, dtype, bytes and, unless it is -1, offset in the source
    to: DType
    offset: int  #: first byte in the output
    keys: tuple[int, ...]  #: the tensors it holds, by position; none where it is copied unseen
    elements: Callable[[], Elements] | None = None  #: where the source has no offset
    shown: Callable[[int, int], bytearray] | None = None
    """(start, count) to a byte an element, 0 where no tensor shows it; None where all are shown."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every byte of an output goes, fixed before any data is read."""

    start: Sequence[tuple[int, bytes]]  #: what is known now, and where it goes
    places: Sequence[Place]
    size: int  #: of the whole file, bytes
    changes: Mapping[int, tuple[DType, str]] = field(default_factory=dict)
    """Tensors, by position, that the format must give another dtype than was wanted, and why."""
    finish: Callable[[Sequence[tuple[int, int, int]]], Sequence[tuple[int, bytes]]] | None = None
    """(offset, bytes, CRC-32) of every chunk written to what remains to be written, where checksums are needed."""


@dataclass(frozen=True, slots=True)
class Format:
    """A record of functions, not a base class."""

    name: str  #: as ``--format`` has it
    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]  #: whether a file that starts so claims this format
    open: Callable[[SourceFile], Reader]  #: raises UnknownFormatError or CorruptCheckpointError
    layout: Callable[[Source, Sequence[TensorInfo], Sequence[DType], Mapping[str, str], str], Layout]
    """Source, tensors, their new dtypes, metadata and the output's name to the bytes of the output; pure."""
    check: Callable[[Path, Layout, Sequence[TensorInfo], Sequence[DType]], None]
    """Read a finished file as its own library does; raises VerificationError where it is not the planned one."""


def formats() -> tuple[Format, ...]:
    found = (import_module(f"{__name__}.{m}").FORMAT for m in _MODULES)
    return tuple(f for f in found if isinstance(f, Format))


def format_for_suffix(path: Path) -> Format | None:
    return next((f for f in formats() if path.name.lower().endswith(f.suffixes) and path.suffix), None)


def format_named(name: str) -> Format:
    """``safetensors`` or ``pt``."""
    return next(f for f in formats() if f.name == name)


def detect(file: SourceFile) -> Format:
    """The format a file is in, by its content and never by its name; raises UnknownFormatError saying what it is."""
    head = file.read(0, min(_HEAD, file.size))
    if not head:
        raise UnknownFormatError("is empty", path=file.path, hint="fetch or copy the file again")
    for fmt in formats():
        if fmt.sniff(head):
            return fmt
    impostor = file_impostor(file)
    if impostor is not None:
        raise impostor.error(file.path)
    known = ", ".join(f.name for f in formats())
    raise UnknownFormatError(f"not a checkpoint precconv can read (formats: {known})", path=file.path)


def open_reader(path: str | os.PathLike[str] | SourceFile) -> Reader:
    """Open a checkpoint file and read its header, not its data.  Close ``.file`` when done."""
    file = _opened(Path(path)) if isinstance(path, (str, os.PathLike)) else path
    try:
        return detect(file).open(file)
    except BaseException:
        file.close()
        raise


def _opened(path: Path) -> InputFile:
    if is_directory(path):
        impostor = directory_impostor(path)
        if impostor is not None:
            raise impostor.error(path)
        raise InputError("is a directory, not a checkpoint file", path=path, hint="name a file in it")
    return InputFile(path)
