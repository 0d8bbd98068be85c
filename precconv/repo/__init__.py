"""Whole models: a directory of checkpoints, configs and other files in, one that loads the same way out.

``survey`` says what every file is, from names alone; ``models`` opens the checkpoints, ``plans`` decides, ``convert``
does it.
"""

from .doors import check_collisions as check_collisions
from .listing import list_directory as list_directory
from .sets import LeftOut as LeftOut
from .sets import Survey as Survey
from .sets import WeightSet as WeightSet
from .sets import output_index as output_index
from .sets import output_name as output_name
from .survey import survey as survey

__all__ = [
    "LeftOut",
    "Survey",
    "WeightSet",
    "check_collisions",
    "list_directory",
    "output_index",
    "output_name",
    "survey",
]
