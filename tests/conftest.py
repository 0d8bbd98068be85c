"""Fixtures that any test may ask for."""

from .hub.fixture import hub, hub_api, in_process
from .hub_runs import here, waits

__all__ = ["here", "hub", "hub_api", "in_process", "waits"]
