"""What a measurement depends on besides the code: versions, processor, memory, file system."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import precconv

from .measure import ROOT, environment

GB = 1 << 30
#: Packages that a conversion or one of its competitors imports.
IMPORTED = (
    *(
        "torch",
        "torchgen",
        "safetensors",
        "numpy",
        "precconv",
        "huggingface_hub",
        "click",
        "tqdm",
        "packaging",
    ),
    *(
        "typing_extensions",
        "sympy",
        "mpmath",
        "jinja2",
        "markupsafe",
        "networkx",
        "filelock",
        "fsspec",
        "yaml",
    ),
)
_COMPILE = """
import compileall, importlib.util, os, sys
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        compileall.compile_dir(place, quiet=2)
        if not os.path.exists(importlib.util.cache_from_source(os.path.join(place, "__init__.py"))):
            sys.exit(1)
"""


def compile_imported() -> bool:
    """Compile what will be imported, so that no child pays for it; whether byte code is there now.

    With PYTHONDONTWRITEBYTECODE set and byte code missing, ``import torch`` takes twice as long.
    """
    done = subprocess.run([sys.executable, "-c", _COMPILE, *IMPORTED], env=environment(), check=False)
    return done.returncode == 0


def facts(directory: Path) -> dict[str, str]:
    """A table's footer: no host names, no paths.  A load means that somebody else was at work, too."""
    return {
        "precconv": _precconv_version(),
        **{name: _version(name) for name in ("torch", "safetensors", "numpy")},
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _filesystem(directory),
        "cp": _first_line(["cp", "--version"]),
        "CPU": _cpu(),
        "cores": str(cores()),
        "memory": f"{memory() / GB:.1f} GB",
        "load before the run": f"{os.getloadavg()[0]:.1f}",
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int:
    """Bytes of RAM."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _precconv_version() -> str:
    commit = _first_line(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    return f"{precconv.__version__} ({commit})"


def _first_line(argv: list[str]) -> str:
    if shutil.which(argv[0]) is None:
        return "unknown"
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def _filesystem(directory: Path) -> str:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    where = directory.resolve()
    kinds = [(len(point), kind) for _, point, kind, *_ in map(str.split, mounts) if where.is_relative_to(point)]
    return max(kinds)[1] if kinds else "unknown"
