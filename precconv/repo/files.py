"""The files of an output that are no weights: configs and the model card rewritten, indexes made, the rest copied."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .._version import __version__
from ..configs import with_dtype
from ..convert import Outcome
from ..dtypes import DType
from ..errors import InputError
from ..formats import Format
from ..paths import reason
from ..plan import Item, Plan
from ..provenance import words
from ..report import FileReport
from ..request import Request, opaque_kept
from .card import Card, CardFacts, Kept, card
from .models import CONFIG, Models
from .names import family
from .plans import ModelPlan, Output
from .shards import index_json
from .stage import Stage

__all__ = ["INDEX", "copied_bytes", "fingerprint", "model_card", "output_names", "small_files", "write_files"]

README = "README.md"
INDEX = "index"  #: why a file is there
#: What transformers, timm and diffusers call the weights that ``config.json`` is about.
_CONFIGURED = ("model", "diffusion_pytorch_model")


def fingerprint(models: Models, plans: Sequence[ModelPlan], request: Request) -> str:
    """What an output depends on, as one digest: a run that is told the same may go on with another's work."""
    survey = models.survey
    sources = [path for s in survey.sets for path in s.files] + list(survey.others)
    said = {
        "version": __version__,
        "source": _identity(models, sources),
        "options": request.repo_options(),
        "measured": [request.is_reported, request.html is not None],
        "outputs": [[o.name, len(o.plan.items)] for p in plans for o in p.outputs],
        "plan": [[i.src.name, i.to.name, i.why] for p in plans for i in p.plan.items],
    }
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def output_names(models: Models, plans: Sequence[ModelPlan]) -> list[str]:
    """Every file of the output, relative; one that comes twice would be written twice."""
    weights = [name for p in plans for name in (*(o.name for o in p.outputs), p.index) if name is not None]
    return [*weights, *models.survey.others]


def _identity(models: Models, sources: Sequence[str]) -> list[object]:
    """What changes when the source does: its commit, or its files' sizes, times and places on the disk.

    Times alone do not tell two models apart that an archive gave one time: files of one architecture have one size.
    """
    files = models.files
    if files.sizes:
        return [files.repo, files.commit, sources]
    stats = [_stat(models.root / path) for path in sources]
    return [[path, s.st_size, s.st_mtime_ns, s.st_dev, s.st_ino] for path, s in zip(sources, stats, strict=True)]


def copied_bytes(models: Models) -> int:
    """Bytes of what is carried over."""
    return sum(_stat(models.root / path).st_size for path in models.survey.others)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as e:  # removed since it was listed
        raise InputError(f"cannot be read: {reason(e)}", path=path) from e


def model_card(models: Models, plan: Plan, request: Request) -> Card | None:
    """The source's card with what the conversion did; None where it has none."""
    if README not in models.survey.others:
        return None
    repo, commit = models.files.repo, models.files.commit
    to = None if request.lossless == "auto" else request.policy.target
    cast = [i for i in plan.items if i.to is not i.src.dtype and to in (i.to, None)]
    kept = [Kept(g.why, g.to, g.tensors, g.nbytes) for g in plan.groups() if to is None or g.to is not to]
    facts = CardFacts(
        source=repo or models.root.resolve().name,
        target=to,
        version=request.version,
        tensors=len(cast),
        bytes_before=sum(i.src.nbytes for i in cast),
        bytes_after=sum(i.nbytes for i in cast),
        base_model=repo,
        commit=commit,
        options=shlex.join(words(request.recorded)),
        kept=kept,
    )
    return card(models.read(README).decode("utf-8", errors="surrogateescape"), facts)


@dataclass(frozen=True, slots=True)
class Small:
    """A file of an output that is no weights."""

    path: str  #: relative, with ``/``
    data: bytes | None  #: None where it is copied as it is
    why: str = ""
    mode_of: Path | None = None  #: the file whose permissions it has


def small_files(
    models: Models, plans: Sequence[ModelPlan], outcomes: Mapping[str, Outcome], readme: Card | None
) -> Iterator[Small]:
    """All that is no weights, what makes the output look complete last."""
    configs, root = dict(_configs(models, plans)), models.root
    for path in models.survey.others:
        if path not in configs and not (path == README and readme is not None):
            yield Small(path, None)
    for made in plans:
        if made.index is not None:
            yield Small(made.index, _index(made, outcomes).encode(), INDEX)
    for path, data in configs.items():
        yield Small(path, data, "dtype", root / path)
    if readme is not None:
        data = readme.text.encode("utf-8", errors="surrogateescape")
        yield Small(README, data, "model card", root / README)


def write_files(
    models: Models, plans: Sequence[ModelPlan], outcomes: Mapping[str, Outcome], stage: Stage, readme: Card | None
) -> list[FileReport]:
    """Write all that is no weights; a line for every file there is."""
    done = [
        FileReport(o.name, "converted", outcomes[o.name].size, p.model.set.files[0]) for p in plans for o in p.outputs
    ]
    for small in small_files(models, plans, outcomes, readme):
        if small.data is None:
            stage.copy(models.root / small.path, small.path)
            done.append(FileReport(small.path, "copied", stage.place(small.path).stat().st_size))
        else:
            stage.write(small.path, small.data, mode_of=small.mode_of)
            done.append(FileReport(small.path, "written", len(small.data), small.why))
    done += [FileReport(lo.path, "left out", None, lo.why) for lo in models.survey.left_out]
    return done


def _configs(models: Models, plans: Sequence[ModelPlan]) -> Iterator[tuple[str, bytes]]:
    """The configs of converted components that say a dtype, with the one they have now."""
    for made in _with_config(plans):
        path = os.fspath(PurePosixPath(made.model.set.where, CONFIG))
        if path not in models.survey.others or made.request.components.get(made.model.name) == "keep":
            continue
        to = _model_dtype(made)
        if to is None:
            continue
        data = models.read(path)
        changed = with_dtype(data.decode("utf-8"), to).encode()
        if changed != data:
            yield path, changed


def _model_dtype(made: ModelPlan) -> DType | None:
    """What a config is to say.

    Where the values decided, that is what everything cast became, if it is also what most of the weights are; a loader
    would round the others to it.  None where nothing can be said: the config stays as it is.
    """
    if made.request.lossless is None:
        return made.request.policy.target
    cast = {i.to for i in made.plan.items if i.to is not i.src.dtype}
    elements: dict[DType, int] = {}
    for item in made.plan.items:
        elements[item.to] = elements.get(item.to, 0) + item.src.numel
    most = max(elements, key=lambda to: elements[to])
    return most if cast == {most} else None


def _with_config(plans: Sequence[ModelPlan]) -> Iterable[ModelPlan]:
    """The one checkpoint of each directory that its config is about: an adapter beside it has a config of its own."""
    owners: dict[str, ModelPlan] = {}
    for made in sorted(plans, key=lambda made: family(made.model.set.stem, made.model.set.suffix) not in _CONFIGURED):
        owners.setdefault(made.model.set.where, made)
    return owners.values()


def _index(made: ModelPlan, outcomes: Mapping[str, Outcome]) -> str:
    assert made.index is not None
    where = PurePosixPath(made.index).parent
    items = {o.name: outcomes[o.name].plan.items for o in made.outputs}
    weight_map: dict[str, str] = {}
    for o in made.outputs:
        shard = PurePosixPath(o.name).relative_to(where).as_posix()
        names = [i.src.name for i in items[o.name]]
        weight_map |= dict.fromkeys(
            names + (opaque_kept(o.found, made.request) if made.fmt.name == "pt" else []), shard
        )
    total = sum(_data_bytes(o, items[o.name], made.fmt) for o in made.outputs)
    return index_json(made.model.set.index_metadata, total, weight_map)


def _data_bytes(output: Output, items: Sequence[Item], fmt: Format) -> int:
    """Bytes of tensor data in one file; torch files hold tied tensors once, as transformers counts them."""
    refs = output.found.source.refs if fmt.name == "pt" else {}
    seen = {(refs[i.src.name].view if i.src.name in refs else i.src.name, i.to.name): i.nbytes for i in items}
    return sum(seen.values())
