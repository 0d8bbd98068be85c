"""precconv changes the precision of model checkpoints: streamed, checked, verified.

>>> import precconv
>>> report = precconv.convert("model.safetensors", to="bf16")  # doctest: +SKIP

Importing this is cheap: torch is imported when the first value is cast.
"""

from ._version import __version__ as __version__
from .api import convert as convert
from .api import inspect as inspect
from .api import plan as plan
from .batch.many import convert_many as convert_many
from .batch.summary import BatchReport as BatchReport
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import open_checkpoint as open_checkpoint
from .checks import Finding as Finding
from .deviation import Deviation as Deviation
from .deviation import Worst as Worst
from .diff import diff as diff
from .differences import Diff as Diff
from .differences import TensorDiff as TensorDiff
from .dtypes import DType as DType
from .dtypes import dtype as dtype
from .errors import CorruptCheckpointError as CorruptCheckpointError
from .errors import HubError as HubError
from .errors import InputError as InputError
from .errors import NumericError as NumericError
from .errors import OutputError as OutputError
from .errors import PrecconvError as PrecconvError
from .errors import RuleError as RuleError
from .errors import SourceChangedError as SourceChangedError
from .errors import UnknownFormatError as UnknownFormatError
from .errors import UsageError as UsageError
from .errors import VerificationError as VerificationError
from .errors import WorkerError as WorkerError
from .exponents import Exponents as Exponents
from .inspection import Inspection as Inspection
from .live import cast_state_dict as cast_state_dict
from .measures import Loss as Loss
from .measures import Measure as Measure
from .plan import Item as Item
from .plan import Plan as Plan
from .proof import Mismatch as Mismatch
from .proof import Proof as Proof
from .report import Report as Report
from .report import TensorReport as TensorReport
from .rules import Rule as Rule
from .scan import Scan as Scan
from .scan import TensorScan as TensorScan
from .scanning import scan as scan
from .stats import Norms as Norms
from .stats import Stats as Stats
from .tensors import TensorInfo as TensorInfo
from .verdict import Judged as Judged
from .verdict import Judgement as Judgement
from .verdict import Verdict as Verdict
from .verification import verify as verify
