"""A model directory or Hub repository: what each file of it is.

Nothing here opens weights: names, indexes and ``model_index.json`` say it all.
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
