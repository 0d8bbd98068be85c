"""A batch that publishes and is killed at any point: the next run publishes what is missing, and nothing twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .forked import Ended, Runner, commands
from .hub import faults
from .hub.server import HubServer
from .hub_models import is_half_of, keyed, llama, model, published
from .hub_work import LEDGER, PUSH, Place
from .processes import HANG, posix

pytestmark = posix

SOURCES = ("acme/a", "acme/s")
#: Steps of a run at which something outside of it changes.
CHANGES = ("ledger", "send", "sent", "commit", "recorded")


class Killed:
    """Runs of one batch, each published under names of its own, and killed before one of its steps."""

    def __init__(self, hub: HubServer, place: Place, run: Runner) -> None:
        self.hub, self.place, self.forked = hub, place, run
        hub.create("acme/a", model(1))
        hub.create("acme/s", llama(3))

    def run(self, mark: str, at: int | None = None) -> Ended:
        args = ["batch", *SOURCES, "--to", "fp16", "--push", f"{PUSH}-{mark}", "--output-dir", self.place.path / mark]
        return self.forked(*args, at=at, values={"precconv.engines:ENGINES": {"local": "inline"}}, only=CHANGES)

    def is_right(self, mark: str) -> bool:
        """Whether each is published once and is right, and nothing else is left here."""
        targets = {source: f"tester/{source.partition('/')[2]}-fp16-{mark}" for source in SOURCES}
        assert {source: len(keyed(self.hub, target)) for source, target in targets.items()} == dict.fromkeys(targets, 1)
        assert os.listdir(self.place.path / mark) == [LEDGER]
        return all(is_half_of(published(self.hub, t), published(self.hub, s)) for s, t in targets.items())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    root = tmp_path_factory.mktemp("killed")
    with HubServer(root / "hub", xet=False) as hub, pytest.MonkeyPatch.context() as patch:
        place = Place(hub, root)
        for name, value in hub.environment(place.home, token=hub.tokens.write, xet=False).items():
            patch.setenv(name, value)
        patch.chdir(place.path)
        with commands(root) as run:
            yield Killed(hub, place, run)


def test_a_run_killed_at_any_step_and_run_again_publishes_each_once(killed: Killed) -> None:
    whole = killed.run("whole")
    assert (whole.code, whole.stderr) == (0, "")
    assert killed.is_right("whole")
    kinds = [step.split()[0] for step in whole.steps]
    assert (kinds.count("ledger"), kinds.count("commit"), kinds.count("send")) == (4, 2, 12)
    for at, step in enumerate(whole.steps):
        if step.startswith(("send", "sent", "recorded")) and at % 3:
            continue
        died = killed.run(f"at{at}", at=at)
        assert died.code == -signal.SIGKILL, died.stderr
        again = killed.run(f"at{at}")
        assert (again.code, again.stderr) == (0, ""), step
        assert killed.is_right(f"at{at}"), step
    third = killed.run("at0")
    assert "2 skipped" in third.stdout
    assert killed.is_right("at0")


def test_workers_that_die_with_their_parent_in_the_middle_of_an_upload_publish_nothing_twice(
    hub: HubServer, tmp_path: Path
) -> None:
    place = Place(hub, tmp_path)
    hub.create("acme/a", model(1))
    hub.create("acme/s", llama(3))
    args = ("batch", *SOURCES, "--to", "fp16", "--push", PUSH, "--workers", "2", "--json")
    process = place.start(*args)
    hub.fail(faults.before(process.kill), method="PUT")
    try:
        process.communicate(timeout=HANG)  # returns when the workers, which have the same pipes, are gone too
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL
    again = place.run(*args)
    assert again.code == 0, again.stderr
    assert {job["outcome"] for job in json.loads(again.stdout)["jobs"]} == {"done"}
    for source in SOURCES:
        target = f"tester/{source.partition('/')[2]}-fp16"
        assert len(keyed(hub, target)) == 1
        assert is_half_of(published(hub, target), published(hub, source))
    assert place.left() == [LEDGER]
