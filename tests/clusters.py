"""A real Ray for tests, in a network of its own: it binds every address that there is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from .processes import HANG, environment

__all__ = ["needs_ray", "run_alone", "start_ray"]

_RAY = shutil.which("ray", path=sysconfig.get_path("scripts"))
_NETWORK = ["unshare", "-n", "-p", "--fork", "--kill-child", "--mount-proc"]


def _has_own_network() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    tried = subprocess.run([*_NETWORK, "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    return tried.returncode == 0


needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or _RAY is None or not _has_own_network(),
    reason="needs Ray (pip install 'precconv[ray]') and leave to make a network namespace (unshare -n)",
)

#: Ray's sockets need short names, so its directory is mounted under one; all of it ends with the namespace.
_ALONE = """
set -e
ip link set lo up
mkdir {home}/ray
mount --bind {home}/ray /mnt
export RAY_TMPDIR=/mnt
exec {python} {driver} {home}
"""
_START = (
    "start", "--head", "--num-cpus", "2", "--memory", "2000000000", "--object-store-memory", "80000000",
    "--include-dashboard=false", "--disable-usage-stats",
)  # fmt: skip


def run_alone(driver: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a network of its own, where only loopback is; its argument is the directory that it is in."""
    script = _ALONE.format(python=sys.executable, driver=driver, home=driver.parent)
    return subprocess.run(
        [*_NETWORK, "bash", "-c", script],
        cwd=driver.parent, env=environment(), capture_output=True, encoding="utf-8", timeout=HANG, check=False,
    )  # fmt: skip


def start_ray() -> None:
    """From a script that runs alone: a cluster of one node, whose workers get the environment that there is now."""
    assert _RAY is not None
    done = subprocess.run([_RAY, *_START], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
