"""Which tensors an architecture needs in FP32, as tables of data: ``*.toml`` beside this file.

A new architecture is a new table.  Tables are read once, when the first of them is asked for.
"""

from .matching import match as match
from .matching import select as select
from .matching import templates as templates
from .matching import warnings as warnings
from .tables import Preset as Preset
from .tables import Row as Row
from .tables import Warn as Warn
from .tables import list_presets as list_presets
from .tables import load as load

__all__ = ["Preset", "Row", "Warn", "list_presets", "load", "match", "select", "templates", "warnings"]
