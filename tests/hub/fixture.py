"""Fixtures: a Hub of the test's own, and the real client in the test's process turned towards it.

``huggingface_hub`` reads its environment when it is imported, which in a test process has long happened.  Two ways:

* another process (the command line, anything with Xet) gets ``hub.environment(home)``;
* in this process ``in_process`` replaces what the client read.  Xet is off there: its Rust side reads the environment
  by itself, keeps a cache outside ``tmp_path`` and needs seconds to end.  ``HfApi()`` made afterwards is right, and so
  are downloads; functions that belong to a client made at import (``huggingface_hub.create_repo``) are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .server import HubServer, is_about_hubs

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """Empty, and gone with the test."""
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def in_process(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The same Hub, and for the client of this process the only one; no token is set."""
    with turned_to(hub, tmp_path / "hf-home", monkeypatch):
        yield hub


@contextmanager
def turned_to(hub: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client of this process works with this Hub; ``home`` is for its cache."""
    from huggingface_hub import close_session, constants

    for name in [n for n in os.environ if is_about_hubs(n)]:
        monkeypatch.delenv(name)
    replaced = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,  # else it asks the Hub who runs it
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(constants, name, value)
    close_session()
    yield
    close_session()


@pytest.fixture
def hub_api(in_process: HubServer) -> HfApi:
    """The real client, with the token that may write."""
    from huggingface_hub import HfApi

    return HfApi(token=in_process.tokens.write)
