"""The conversion of whatever a source is: the public ``convert`` and ``plan``."""

from __future__ import annotations

from collections.abc import Sequence

from .checks import OnNonfinite, OnOverflow
from .convert import convert_file, plan_file
from .dtypes import DType
from .outputs import FormatChoice
from .plan import Plan
from .report import Report
from .request import StrPath, request_of
from .rules import MixedMode, NormMode, Rule
from .runs import ProgressCallback
from .ties import SharedMode
from .verify import VerifyMode
from .weights import Weights

__all__ = ["convert", "plan"]


def plan(
    source: StrPath,
    *,
    to: str | DType,
    output: StrPath | None = None,
    format: FormatChoice = "same",  # noqa: A002  the command line's name
    weights: Weights = "auto",
    select: str | None = None,
    strip_wrappers: bool = False,
    shared: SharedMode | None = None,
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
) -> Plan:
    """What ``convert`` with the same arguments would do, from the header alone.

    Of ``output`` only the suffix matters here.  Raises InputError for a source that cannot be used, UsageError where
    its weights are the user's choice, RuleError for a rule that cannot be read or matches nothing.
    """
    request = request_of(
        to=to, preset=preset, norms=norms, mixed=mixed, keep=keep, rule=rule, rules=rules, format=format,
        weights=weights, select=select, strip_wrappers=strip_wrappers, shared=shared,
    )  # fmt: skip
    return plan_file(source, output, request)


def convert(
    source: StrPath,
    *,
    to: str | DType,
    output: StrPath | None = None,
    format: FormatChoice = "same",  # noqa: A002  the command line's name
    force: bool = False,
    weights: Weights = "auto",
    select: str | None = None,
    strip_wrappers: bool = False,
    shared: SharedMode | None = None,
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
    on_overflow: OnOverflow = "error",
    on_nonfinite: OnNonfinite = "warn",
    max_underflow: float | None = None,
    verify: VerifyMode = "sample",
    workers: int | None = None,
    durable: bool = False,
    report: StrPath | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Convert one checkpoint file; the output appears under its name whole and verified, or not at all.

    ``source``: a checkpoint file, which is never changed.
    ``to``: the target dtype; ``fp32``, ``fp16``, ``bf16`` or an alias.
    ``output``: a file, or an existing directory to put it in; by default beside the source as ``NAME.bf16.SUFFIX``.
    ``format``: the output's, where its name does not say it: the source's, ``safetensors`` or ``pt``.
    ``force``: replace an existing output.  The source itself is refused in any case.
    ``weights``, ``select``: which weights of a training checkpoint, or those at a key path.
    ``strip_wrappers``: take wrapper modules (``module.``, ``_orig_mod.``) out of the names.
    ``shared``: tied tensors in safetensors: each gets the data (``clone``), or one does and the metadata names the
    others (``drop``).
    ``keep``, ``rule``, ``rules``: the user's own rules; ``rule`` before ``keep`` before the file ``rules``, the first
    that matches a name wins.
    ``preset``, ``norms``, ``mixed``: what stays FP32 without a rule: what the architecture needs, normalisation
    layers, and the FP32 tensors of a source that is mostly 16-bit.
    ``on_overflow``, ``on_nonfinite``, ``max_underflow``: what to do about values that do not survive.
    ``verify``: compare a ``sample`` of every tensor, everything (``full``) or nothing with a fresh cast.
    ``workers``: threads; by default one for each usable core.  The output does not depend on it.
    ``durable``: wait until the output is on the disk before it gets its name.
    ``report``: a file for the report as JSON, written also when a check or the verification refuses; every tensor's
    sizes and errors are then measured, which takes longer.
    ``progress``: called in this thread with (done, total) bytes of the source.

    Raises InputError, OutputError, UsageError (also RuleError), NumericError or VerificationError; the last two
    carry the report.  After any of them, and after KeyboardInterrupt, the output path is as it was.
    """
    request = request_of(
        to=to, preset=preset, norms=norms, mixed=mixed, keep=keep, rule=rule, rules=rules, format=format, force=force,
        weights=weights, select=select, strip_wrappers=strip_wrappers, shared=shared, on_overflow=on_overflow,
        on_nonfinite=on_nonfinite, max_underflow=max_underflow, verify=verify, workers=workers, durable=durable,
        report=report,
    )  # fmt: skip
    return convert_file(source, output, request, progress)
