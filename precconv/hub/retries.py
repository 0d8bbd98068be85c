"""Going on after what passes by itself: rate limits, failures of the server, cut connections, commits in between.

The client does so for most transfers; it leaves commits, listings and all that creates something to its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import HubError

__all__ = ["FEW", "LONGEST", "TRIES", "persistently"]

T = TypeVar("T")

#: With a wait of 1, 2, 4 … seconds between them two minutes in all, if the Hub says nothing else.
TRIES = 8
#: For what is asked first, while somebody may be waiting for the answer: seven seconds.
FEW = 4
_LONGEST_OWN = 60.0
#: Seconds; the Hub counts requests by windows of five minutes.
LONGEST = 600.0


def persistently(action: Callable[[], T], *, sleep: Callable[[float], object], tries: int = TRIES) -> T:
    """Try until it succeeds, fails for good, or has failed ``tries`` times; the last error is raised.

    The action must be one that may be done twice, or look first whether it has been done.
    """
    tried = 0
    while True:
        try:
            return action()
        except HubError as e:
            wait = max(min(2.0**tried, _LONGEST_OWN), 0.0 if e.wait is None else e.wait + 1)
            tried += 1
            if not e.is_passing or tried == tries or wait > LONGEST:
                raise
        sleep(wait)
