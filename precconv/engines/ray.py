"""Jobs as tasks of a Ray cluster that exists; the package is shipped to its nodes, which need torch and no precconv.

Tensors never travel: a job's source and output are places that the nodes can reach themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError, UsageError
from .base import Engine, Progress

__all__ = ["open_engine"]

T = TypeVar("T")

#: Times that a task is given to another worker when the one that had it died.
RETRIES = 2


class Ray(Engine):
    """``concurrent.futures`` over Ray: an ``ObjectRef`` gives a future of that kind."""

    remote = True

    def __init__(self, ray: Any, workers: int | None, *, owned: bool) -> None:
        self._ray, self._owned = ray, owned
        self._refs: dict[Future[Any], Any] = {}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._memory = max(int(node.get("memory", 0)) for node in nodes)
        self.workers = workers or len(nodes)
        each = -(-self.workers // len(nodes))  # jobs on a node
        self.threads = max(1, int(max(node.get("CPU", 1) for node in nodes)) // each)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._submit(0, fn, *args, **kwargs)

    def start(self, function: Callable[[Any, Progress | None], T], job: object, *, memory: int) -> Future[T]:
        return self._submit(memory, function, job, None)

    def _submit(self, memory: int, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A task waits for ever when it asks for more memory than any node has."""
        options = {"num_cpus": self.threads, "max_retries": RETRIES, "memory": min(memory, self._memory) or None}
        ref = self._ray.remote(fn).options(**options).remote(*args, **kwargs)
        future: Future[T] = ref.future()
        self._refs[future] = ref
        future.add_done_callback(lambda done: self._refs.pop(done, None))
        return future

    def interrupt(self) -> None:
        for future, ref in [*self._refs.items()]:
            if not future.done():
                self._ray.cancel(ref)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  Executor's
        if cancel_futures:
            self.interrupt()
        if wait:
            _wait(list(self._refs))
        if self._owned:
            self._ray.shutdown()
            self._owned = False


def _wait(futures: list[Future[Any]]) -> None:
    wait(futures)


def open_engine(*, workers: int | None, address: str | None) -> Ray:
    """On the cluster at ``address``, by default the one that this machine belongs to."""
    try:
        import ray
    except ImportError as e:
        raise UsageError("the engine ray needs Ray", hint="pip install 'precconv[ray]'") from e
    owned = not ray.is_initialized()
    if owned:
        package = str(Path(__file__).parent.parent)
        settings: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "runtime_env": {"py_modules": [package]},
        }
        try:
            ray.init(address=address or "auto", **settings)
        except ConnectionError as e:
            where = f"at {address}" if address not in (None, "auto") else "on this machine"
            hint = "start one (ray start --head), or say where it is (--address ray://HOST:10001)"
            raise InputError(f"no Ray cluster answers {where}", hint=hint) from e
    return Ray(ray, workers, owned=owned)
