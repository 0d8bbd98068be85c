"""The client without its waits: it tries again at once, and what it would have waited is written down."""

from __future__ import annotations

import pytest


def impatient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client's uploads and API calls asked to wait, in order."""
    asked: list[float] = []

    class Impatient:
        sleep = staticmethod(asked.append)

    monkeypatch.setattr("huggingface_hub.utils._http.time", Impatient)
    return asked
