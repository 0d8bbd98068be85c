"""What the harness runs in child processes; each task prints one JSON line as its last.

``children.py torch`` imports torch and nothing else: the memory that no conversion can do without.
``children.py convert SOURCE TARGET DTYPE [VERIFY [on|off [ROUNDING]]]`` times ``precconv.convert`` after
``import torch``, its own imports included; ``off`` takes the look at the results out of the kernel, which no option
does.
``children.py scan SOURCE`` times ``precconv.scan`` likewise.
``children.py verify SOURCE TARGET`` makes the target, to bf16, and times ``precconv.verify``.
``children.py imports ARGUMENT ...`` runs the command line and counts the modules of torch it has loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any


def torch_only() -> dict[str, float]:
    import torch

    return {"threads": torch.get_num_threads()}


def convert(
    source: str, target: str, to: str, verify: Any = "sample", checks: str = "on", rounding: Any = "nearest"
) -> dict[str, float]:
    import torch  # noqa: F401 -- loaded before the clock starts

    start = time.perf_counter()
    import precconv

    if checks == "off":
        _switch_checks_off()
    precconv.convert(source, to=to, output=target, force=True, verify=verify, rounding=rounding)
    return {"seconds": time.perf_counter() - start}


def scan(source: str) -> dict[str, float]:
    import torch  # noqa: F401 -- loaded before the clock starts

    start = time.perf_counter()
    import precconv

    assert precconv.scan(source).verdict.run
    return {"seconds": time.perf_counter() - start}


def _switch_checks_off() -> None:
    from precconv.cast import Lane

    assert callable(Lane.survey)
    Lane.survey = lambda *_args, **_options: []  # type: ignore[method-assign]


def verify(source: str, target: str) -> dict[str, float]:
    import precconv

    precconv.convert(source, to="bf16", output=target, force=True)
    start = time.perf_counter()
    assert precconv.verify(target, against=source).proven
    return {"seconds": time.perf_counter() - start}


def imports(*arguments: str) -> dict[str, float]:
    sys.argv = ["precconv", *arguments]
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            runpy.run_module("precconv", run_name="__main__")
        except SystemExit as e:
            if e.code:
                raise
    return {"torch_modules": sum(name.split(".")[0] == "torch" for name in sys.modules)}


TASKS: dict[str, Callable[..., dict[str, float]]] = {
    "torch": torch_only,
    "convert": convert,
    "scan": scan,
    "verify": verify,
    "imports": imports,
}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
