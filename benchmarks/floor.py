"""The floor of a conversion: two threads read the source and write as many bytes as the output has.

Nothing else happens: 1 MB chunks of the source, positional calls, one kept buffer a thread.  How the output
gets its blocks matters on some file systems, so there are both ways: ``--allocate ftruncate``, ``fallocate``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time

CHUNK = 1 << 20
PAGE = 4096
ALLOCATE = ("ftruncate", "fallocate") if hasattr(os, "posix_fallocate") else ("ftruncate",)


def copy(source: str, target: str, nbytes: int, *, allocate: str, threads: int = 2) -> float:
    """Seconds to read all of ``source`` and write ``nbytes`` to ``target``, files opened and closed."""
    start = time.perf_counter()
    fd_in = os.open(source, os.O_RDONLY)
    fd_out = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(fd_out, nbytes)
        if allocate == "fallocate" and nbytes:
            os.posix_fallocate(fd_out, 0, nbytes)
        _copy_chunks(fd_in, fd_out, nbytes, threads)
    finally:
        os.close(fd_in)
        os.close(fd_out)
    return time.perf_counter() - start


def _copy_chunks(fd_in: int, fd_out: int, nbytes: int, threads: int) -> None:
    chunks = -(-os.fstat(fd_in).st_size // CHUNK)
    share = -(-nbytes // max(chunks, 1) // PAGE) * PAGE  # bytes written a chunk, whole pages
    taken = itertools.count()
    failures: list[BaseException] = []

    def work() -> None:
        buffer = memoryview(bytearray(max(CHUNK, share)))
        try:
            while (i := next(taken)) < chunks:
                os.preadv(fd_in, [buffer[:CHUNK]], i * CHUNK)
                low, high = i * share, min((i + 1) * share, nbytes)
                if low < high and os.pwrite(fd_out, buffer[: high - low], low) != high - low:
                    raise OSError("short write")
        except OSError as e:
            failures.append(e)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="time reading a file and writing so many bytes")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--bytes", type=int, required=True, help="bytes to write")
    parser.add_argument("--allocate", choices=ALLOCATE, default=ALLOCATE[0])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    seconds = copy(options.source, options.target, options.bytes, allocate=options.allocate, threads=options.threads)
    print(json.dumps({"seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
