"""The one seam to ``huggingface_hub``.

It is imported when it is first needed: that takes a third of a second, which local work does not have to wait for.
Tokens, endpoint, cache and offline mode are the client's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .._version import __version__
from .failures import scrubbed, translated

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["LIBRARY", "client", "history", "quiet", "scrubbed", "translated"]

LIBRARY = "precconv"


def client(*, token: str | bool | None = None) -> HfApi:
    """A client that says who it is; ``token`` as the client takes it: None for the user's own, False for none."""
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name=LIBRARY, library_version=__version__)


def history(api: HfApi, repo: str, revision: str) -> Iterator[dict[str, Any]]:
    """A revision's commits, the newest first, page by page: ``list_repo_commits`` always fetches all of them."""
    from huggingface_hub.utils import build_hf_headers, paginate  # type: ignore[attr-defined]

    headers = build_hf_headers(token=api.token, library_name=LIBRARY, library_version=__version__)
    url = f"{api.endpoint}/api/models/{repo}/commits/{quote(revision, safe='')}"
    return iter(paginate(url, params={}, headers=headers))


@contextmanager
def quiet() -> Iterator[None]:
    """The client's own progress bars and warnings are off in this process, for a program that shows its own."""
    from huggingface_hub import utils
    from huggingface_hub.utils import logging as talk

    bars: Any = utils  # it exports them without saying so
    before, shown = talk.get_verbosity(), not bars.are_progress_bars_disabled()
    talk.set_verbosity(talk.log_levels["error"])
    if shown:
        bars.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="huggingface_hub")  # what the Hub would like in a model card
            yield
    finally:
        talk.set_verbosity(before)
        if shown:
            bars.enable_progress_bars()
