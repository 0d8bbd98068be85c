"""Fixtures that any test may ask for."""

from .hub.fixture import hub, hub_api, in_process

__all__ = ["hub", "hub_api", "in_process"]
