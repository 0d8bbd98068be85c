"""Large files by the SHA-256 of their bytes, in a directory.

Nothing has its name there before it is whole and checked.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from .refusals import Refused

_CHUNK = 1 << 20
_number = itertools.count()


def chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
            yield data


class Objects:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self.root / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def size(self, sha256: str) -> int:
        return self.path(sha256).stat().st_size

    def read(self, sha256: str) -> bytes:
        return self.path(sha256).read_bytes()

    def put(self, data: Iterable[bytes], *, expected: str | None = None) -> str:
        """Keep these bytes and return their SHA-256; with another ``expected`` they are refused."""
        part, digest = self.root / f"{next(_number)}.part", hashlib.sha256()
        with open(part, "wb") as file:
            for chunk in data:
                digest.update(chunk)
                file.write(chunk)
        found = digest.hexdigest()
        if expected not in (None, found):
            part.unlink()
            raise Refused(400, f"the object has the SHA-256 {found}, not {expected}")
        if self.has(found):
            part.unlink()  # the other one may be open
        else:
            part.replace(self.path(found))
        return found
