"""The command line, run in this process."""

from __future__ import annotations

import signal

from click.testing import CliRunner, Result

from precconv import cli

__all__ = ["run"]


def run(*args: object) -> Result:
    """Outcome of ``precconv`` with these arguments; the signal handlers that it installs are taken back."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        result = CliRunner().invoke(cli.cli, [str(arg) for arg in args], prog_name="precconv")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
