"""The conversion of whatever a source is: the public ``convert`` and ``plan``; and what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .checks import OnNonfinite, OnOverflow
from .convert import convert_file, plan_file
from .dtypes import DType
from .errors import UsageError
from .hub.convert import convert_repo, inspect_repo, plan_repo, push_directory
from .hub.publish import Target
from .hub.push import Push
from .hub.refs import parse_ref
from .inspection import Inspection, inspect_file
from .outputs import FormatChoice
from .paths import is_directory
from .plan import Plan
from .readback import VerifyMode
from .repo.convert import convert_directory, plan_directory
from .repo.inspection import inspect_directory
from .report import Report
from .request import Request, Rounding, StrPath, request_of
from .rules import MixedMode, NormMode, Rule
from .runs import ProgressCallback
from .ties import SharedMode
from .weights import Weights

__all__ = ["convert", "inspect", "plan"]


def plan(
    source: StrPath,
    *,
    to: str | DType,
    lossless_only: bool = False,
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
    component: Mapping[str, str | DType] | Sequence[str] = (),
    shard_size: str | int | None = None,
    variant: str | None = None,
    from_variant: str | None = None,
    copy_all: bool = False,
    provenance: bool = True,
    progress: ProgressCallback | None = None,
) -> Plan:
    """What ``convert`` with the same arguments would do, from the header alone.

    With ``to="auto"`` and with ``lossless_only`` the values decide, and are read; ``progress`` is called with (done,
    total) bytes of them, in this thread.  A model on the Hub is refused then: its weights are not fetched for a plan.

    Of ``output`` only the suffix matters here.  Raises InputError for a source that cannot be used, UsageError where
    its weights are the user's choice, RuleError for a rule that cannot be read or matches nothing.
    """
    request = request_of(
        to=to, lossless_only=lossless_only,
        preset=preset, norms=norms, mixed=mixed, keep=keep, rule=rule, rules=rules, format=format,
        weights=weights, select=select, strip_wrappers=strip_wrappers, shared=shared, component=component,
        shard_size=shard_size, variant=variant, from_variant=from_variant, copy_all=copy_all,
        provenance=provenance,
    )  # fmt: skip
    if is_directory(source):
        return plan_directory(source, output, request, progress)
    ref = parse_ref(source)
    if ref is not None:
        return plan_repo(ref, output, request if ref.file is None else _of_file(request, source))
    return plan_file(source, output, _of_file(request, source), progress)


def convert(
    source: StrPath,
    *,
    to: str | DType,
    lossless_only: bool = False,
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
    component: Mapping[str, str | DType] | Sequence[str] = (),
    shard_size: str | int | None = None,
    variant: str | None = None,
    from_variant: str | None = None,
    copy_all: bool = False,
    provenance: bool = True,
    push: str | None = None,
    private: bool = False,
    branch: str | None = None,
    pr: bool = False,
    low_disk: bool = False,
    engine: str | None = None,
    address: str | None = None,
    on_overflow: OnOverflow = "error",
    on_nonfinite: OnNonfinite = "warn",
    max_underflow: float | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    verify: VerifyMode = "sample",
    workers: int | None = None,
    durable: bool = False,
    report: StrPath | None = None,
    html: StrPath | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Convert a checkpoint file, a model directory or a model on the Hub.

    The output appears whole and verified, or not at all.

    ``source``: a checkpoint file, a directory with a model in it, or a reference to one on the Hub (``org/name``,
    ``org/name@revision``, ``hf://org/name/file``); never changed.
    ``to``: the target dtype; ``fp32``, ``fp16``, ``bf16`` or an alias.  ``auto``: for each tensor the smallest of them
    that holds all its values, so that nothing is lost.
    ``lossless_only``: a tensor of which a value would change keeps its dtype.  Both read all values before they
    convert; what rules, norms and presets keep stays kept.
    ``output``: of a file, a file or an existing directory to put it in, by default ``NAME.bf16.SUFFIX`` beside the
    source; of a directory, the directory to make, by default ``DIR-bf16``, or a file for its one checkpoint; of a
    model on the Hub the same, by default in the working directory.
    ``format``: the output's, where its name does not say it: the source's, ``safetensors`` or ``pt``.
    ``force``: replace an existing output; a directory only where all in it are files that the output has too, or
    other forms of its weights.  The source itself is refused in any case.
    ``weights``, ``select``: which weights of a training checkpoint, or those at a key path.
    ``strip_wrappers``: take wrapper modules (``module.``, ``_orig_mod.``) out of the names.
    ``shared``: tied tensors in safetensors: each gets the data (``clone``, for files), or one does and the
    metadata names the others (``drop``, for transformers models).
    ``keep``, ``rule``, ``rules``: the user's own rules; ``rule`` before ``keep`` before the file ``rules``, the first
    that matches a name wins.
    ``preset``, ``norms``, ``mixed``: what stays FP32 without a rule: what the architecture needs, normalisation
    layers, and the FP32 tensors of a source that is mostly 16-bit.
    ``component``: other targets for some components of a pipeline, or ``keep``: ``{"vae": "fp32"}``; those of a
    directory, or of a single file under the names they would have there.
    ``shard_size``: cut a directory's checkpoints anew, into files of at most this size (``5GB``).
    ``variant``, ``from_variant``: of the names of a directory's weight files, written and read.
    ``copy_all``: carry over also what is no part of the converted model, such as its weights in other formats.
    ``provenance``: record in a safetensors output's metadata, under ``precconv``, the options, the source's size and
    header digest, and the version, for ``verify``; nothing in it differs between two runs.
    ``push``: publish a model on the Hub, in this repo; it is kept here too where an ``output`` is named.  ``private``,
    ``branch``, ``pr``: in a private repo if it is new, on a branch, as a pull request.  ``low_disk``: fetch, convert,
    send and remove one file of weights at a time.  ``engine``, ``address``: let ``ray`` workers, or ``local``
    processes, each convert and send a shard, as many at a time as ``workers``.
    ``on_overflow``, ``on_nonfinite``, ``max_underflow``: what to do about values that do not survive.
    ``rounding``, ``seed``: ``stochastic`` rounds FP64 and FP32 to a 16-bit type up with a probability equal to the
    remainder; the random bits depend on the seed (0 if none is given), the tensor's name and the element's index.
    ``verify``: compare a ``sample`` of every tensor, everything (``full``) or nothing with a fresh cast.
    ``workers``: threads; by default one for each usable core.  The output does not depend on it.
    ``durable``: wait until the output is on the disk before it gets its name.
    ``report``: a file for the report as JSON, written also when a check or the verification refuses; every tensor's
    sizes and errors are then measured, which takes longer.
    ``html``: the same as a page for a browser; how large the source's values are is then counted too, which takes a
    little longer again.
    ``progress``: called in this thread with (done, total) bytes of the source.

    Raises InputError, OutputError, UsageError (also RuleError), HubError, NumericError or VerificationError; the last
    two carry the report.  After any of them, and after KeyboardInterrupt, the output path is as it was.
    """
    request = request_of(
        to=to, lossless_only=lossless_only,
        preset=preset, norms=norms, mixed=mixed, keep=keep, rule=rule, rules=rules, format=format, force=force,
        weights=weights, select=select, strip_wrappers=strip_wrappers, shared=shared, on_overflow=on_overflow,
        on_nonfinite=on_nonfinite, max_underflow=max_underflow, rounding=rounding, seed=seed, verify=verify,
        workers=workers, durable=durable, report=report, html=html, component=component,
        shard_size=shard_size, variant=variant, from_variant=from_variant, copy_all=copy_all, provenance=provenance,
    )  # fmt: skip
    wanted = None if push is None else Push(Target(push, branch, private, pr), low_disk, engine, address, workers)
    if wanted is None:
        _need_push(private=private, branch=branch, pr=pr, low_disk=low_disk, engine=engine, address=address)
    return _convert(source, output, request, progress, wanted)


def _convert(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None, wanted: Push | None
) -> Report:
    """By what the source is."""
    if is_directory(source):
        if wanted is not None:
            return push_directory(source, output, request, progress, wanted)
        return convert_directory(source, output, request, progress)
    ref = parse_ref(source)
    if ref is not None:
        asked = request if ref.file is None else _of_file(request, source)
        return convert_repo(ref, output, asked, progress, wanted)
    if wanted is not None:
        raise UsageError("--push publishes models, this is a file", path=source, hint="give the model's directory")
    return convert_file(source, output, _of_file(request, source), progress)


def _need_push(**given: object) -> None:
    """Raises UsageError for options that are about publishing, where nothing says to publish."""
    for name, value in given.items():
        if value:
            hint = "say where to with --push REPO"
            raise UsageError(f"--{name.replace('_', '-')} is about publishing", hint=hint)


def _of_file(request: Request, source: StrPath) -> Request:
    """The request for a single file; raises UsageError for options that are about directories."""
    given = {
        "--shard-size": request.shard_size, "--variant": request.variant,
        "--from-variant": request.from_variant, "--copy-all": request.copy_all,
    }  # fmt: skip
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} is for model directories, this is a file", path=source)
    return request.with_shared()


def inspect(source: StrPath, *, weights: Weights = "auto", select: str | None = None) -> Inspection:
    """What is in a checkpoint file or a model directory, from headers alone; torch is not imported.

    ``weights``, ``select``: as in ``convert``.  Where they leave a choice, all weights are shown and a note says so.
    Raises InputError for a source that cannot be used.
    """
    if is_directory(source):
        return inspect_directory(source, weights=weights, select=select)
    ref = parse_ref(source)
    if ref is not None:
        return inspect_repo(ref, weights=weights, select=select)
    return inspect_file(source, weights=weights, select=select)
