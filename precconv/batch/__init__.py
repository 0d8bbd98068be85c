"""Many conversions: which, where to, what became of each, and what of it is still to do.

``lists`` and ``options`` read what is asked for, ``prepare`` makes jobs of it, ``run`` does them on an engine,
``ledger`` remembers, ``many`` is the public function.
"""
