"""The project's own Hub for its tests: ``server.HubServer``, what tests break (``faults``) and fixtures (``fixture``).

A request goes from ``listener`` (sockets) through ``server`` (log, faults) to a function in a table of routes: ``api``
(accounts, whole repos), ``listing`` (what is in a repo), ``commits`` (writing), ``lfs`` and ``xet`` (large files).
They change plain data in ``store``, ``objects`` and ``xorbs``.  The standard library is all it needs.
"""
