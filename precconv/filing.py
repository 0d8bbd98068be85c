"""A conversion's report put where the request wants it, as JSON and as a page, beside the output or in place of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import html
from .report import Report, check_report_path
from .request import Request

__all__ = ["check_filing", "file_refusal", "filed"]


def check_filing(request: Request, others: Sequence[Path]) -> None:
    """Refuse places where the report could not go; raises OutputError.  ``others``: the files of this conversion."""
    if request.report is not None:
        check_report_path(request.report, others)
    if request.html is not None:
        html.check_page_path(request.html, [*others, *([request.report] if request.report is not None else [])])


@contextmanager
def filed(done: Report, request: Request) -> Iterator[None]:
    """Write the report before the body, in which the output is published; it is gone when the body raises."""
    with ExitStack() as stack:
        if request.report is not None:
            stack.enter_context(done.staged(request.report))
        if request.html is not None:
            stack.enter_context(html.staged(done, request.html))
        yield


def file_refusal(refused: Report | None, request: Request) -> None:
    """Write the report on a conversion that was not done."""
    if refused is not None:
        with filed(refused, request):
            pass
