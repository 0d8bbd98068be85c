"""A scan or a conversion as one page for a browser, which needs nothing but itself.

What comes from a file is never part of the markup: all of it is packed data, which the page's script shows as text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..bulk import collector_paused
from ..fileio import part_file
from ..report import Report, check_report_path
from .document import MARK, document
from .summary import conversion_data, scan_data

if TYPE_CHECKING:
    from ..scan import Scan

__all__ = ["check_page_path", "page", "staged", "write"]


def page(result: Scan | Report) -> str:
    """The page; it holds the numbers of ``to_dict()``, those with a fraction to six digits.

    It fetches nothing, and its content security policy forbids that it ever does.
    """
    with collector_paused():
        return document(conversion_data(result) if isinstance(result, Report) else scan_data(result))


def write(result: Scan | Report, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, whole or not at all; raises OutputError."""
    with staged(result, path):
        pass


@contextmanager
def staged(result: Scan | Report, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the page before the body, give it its name after it; when the body raises it is gone."""
    data = page(result).encode()
    with part_file(Path(path)) as part:
        part.write(memoryview(data), 0)
        yield
        part.publish(replace=True, durable=False)


def check_page_path(path: Path, others: Sequence[Path]) -> None:
    """Refuse a page that could not be written after a long run, or would replace anything but an older page."""
    check_report_path(path, others, option="--html", begins=MARK.encode())
