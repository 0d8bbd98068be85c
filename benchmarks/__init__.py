"""Benchmarks and exhaustive checks; ``run.py``, ``exhaustive.py`` and ``inputs.py`` are run as scripts."""
