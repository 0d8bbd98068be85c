"""What a run measured, as plain data, and as JSON: the page can be written again without measuring."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Series:
    """What a job took in each round."""

    wall: list[float] = field(default_factory=list)  #: seconds, the whole process
    peak: list[int] = field(default_factory=list)  #: bytes resident
    told: list[dict[str, float]] = field(default_factory=list)  #: what the child measured itself
    failed: str = ""  #: why there are no more numbers

    @property
    def seconds(self) -> list[float]:
        """The child's own time where it took one, else the whole process's."""
        return [told.get("seconds", wall) for told, wall in zip(self.told, self.wall, strict=True)]


@dataclass(slots=True)
class Run:
    """Everything a table is made of."""

    scale: float  #: inputs are this much smaller than the table's names for them
    small: int  #: number of small tensors
    machine: dict[str, str]
    titles: dict[str, str] = field(default_factory=dict)  #: group key -> what it is
    groups: dict[str, dict[str, Series]] = field(default_factory=dict)  #: group key -> job name -> numbers
    notes: list[str] = field(default_factory=list)  #: what was skipped, and why

    @property
    def failures(self) -> list[str]:
        return [
            f"{self.titles[key]}: {name}: {series.failed}"
            for key, group in self.groups.items()
            for name, series in group.items()
            if series.failed
        ]


def save(run: Run, path: Path) -> None:
    path.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Run:
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["groups"] = {
        key: {name: Series(**series) for name, series in group.items()} for key, group in fields["groups"].items()
    }
    return Run(**fields)
