"""precconv changes the precision of model checkpoints: streamed, checked, verified."""

from ._version import __version__ as __version__
