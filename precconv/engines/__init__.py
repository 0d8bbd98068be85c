"""Where jobs run: executors by name, all of them ``concurrent.futures`` ones.

A new engine is a module here with ``open_engine``, and a row in ``ENGINES``.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import UsageError
from .base import Engine as Engine
from .base import interrupted_by as interrupted_by

__all__ = ["ENGINES", "Engine", "interrupted_by", "open_engine"]

#: Names that ``--engine`` takes, and the module of each, imported when it is asked for.
ENGINES = {"local": "local", "inline": "inline", "ray": "ray"}


def open_engine(name: str, *, workers: int | None = None, address: str | None = None) -> Engine:
    """An engine with room for ``workers`` jobs at a time; leave it as a context manager.

    ``address``: of a cluster, for engines that have one.  Raises UsageError for a name there is not, an engine whose
    package is not installed, and a cluster that does not answer.
    """
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}", hint=f"engines: {', '.join(ENGINES)}")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers: at least 1 is needed")
    if address is not None and name != "ray":
        raise UsageError(f"--address is a Ray cluster's, the engine is {name}", hint="say --engine ray")
    found = import_module(f"{__name__}.{ENGINES[name]}").open_engine(workers=workers, address=address)
    assert isinstance(found, Engine)
    return found
