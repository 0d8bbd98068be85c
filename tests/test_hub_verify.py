"""Outputs and sources on the Hub, proven: what was published is what the source and the record make, every byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import precconv
from precconv.provenance import KEY

from .hub.server import HubServer
from .hub_models import llama, published
from .hub_runs import Work, model_files
from .hub_work import Place
from .repos import files, layers, record, shard, sharded

REPO = "acme/m"


@pytest.fixture
def source(here: Work, tmp_path: Path) -> Path:
    """A model in three shards, and the same in the repo."""
    root = sharded(tmp_path / "source", layers(3))
    (root / "README.md").write_text("# A model\n")
    here.hub.create(REPO, model_files(root))
    return root


@pytest.mark.usefixtures("source")
def test_what_was_published_is_proven_against_the_repo_it_was_made_from(here: Work) -> None:
    token = here.hub.tokens.write
    here.ok("convert", REPO, "--to", "bf16", "--push", "tester/half", token=token)
    said = here.ok("verify", "tester/half", "--against", REPO, token=token)
    assert f"tester/half is --to bf16 of {REPO}, every byte (options: its record)" in said
    assert here.left() == []


@pytest.mark.usefixtures("source")
def test_what_was_published_and_changed_is_not(here: Work) -> None:
    token = here.hub.tokens.write
    here.ok("convert", REPO, "--to", "bf16", "--push", "tester/half", token=token)
    made = published(here.hub, "tester/half")
    other = {**made, shard(2, 3): made[shard(2, 3)][:-1] + b"\x00", "config.json": b"{}", "more.txt": b""}
    here.hub.create("tester/changed", other)
    done = here("verify", "tester/changed", "--against", REPO, "--json", token=token)
    assert done.exit_code == 4, done.output
    found = json.loads(done.stdout)["mismatches"]
    assert [(m["kind"], m["file"]) for m in found] == [
        ("values", shard(2, 3)), ("file", "config.json"), ("unexpected", "more.txt"),
    ]  # fmt: skip


@pytest.mark.usefixtures("source")
def test_a_local_output_of_a_repo_is_proven_against_it_and_its_files_against_its_files(here: Work) -> None:
    here.ok("convert", REPO, "--to", "bf16", "-o", "out")
    here.ok("verify", "out", "--against", REPO)
    one = f"hf://{REPO}/{shard(1, 3)}"
    here.ok("convert", one, "--to", "bf16", "-o", "one.safetensors")
    here.ok("verify", "one.safetensors", "--against", one)
    assert here("verify", "one.safetensors", "--against", f"hf://{REPO}/{shard(2, 3)}").exit_code == 4


def test_the_record_is_the_same_whether_the_source_is_here_or_there(here: Work, source: Path) -> None:
    here.ok("convert", REPO, "--to", "bf16", "-o", "there")
    precconv.convert(source, to="bf16", output=here.path / "here")
    for n in (1, 2, 3):
        assert record(here.path / "there" / shard(n, 3)) == record(here.path / "here" / shard(n, 3))
    weights = {name for name in files(here.path / "here") if name.endswith(".safetensors")}
    assert {n: files(here.path / "here")[n] for n in weights} == {n: files(here.path / "there")[n] for n in weights}


@pytest.mark.parametrize(
    "how", [(), ("--low-disk",), ("--engine", "local", "--workers", "2")], ids=["", "low disk", "engine"]
)
def test_every_way_to_publish_writes_the_record_and_is_proven(
    hub: HubServer, tmp_path: Path, how: tuple[str, ...]
) -> None:
    hub.create("tester/m", llama(3))
    place = Place(hub, tmp_path)
    done = place.run("convert", "tester/m", "--to", "fp16", "--norms", "cast", "--push", "tester/half", *how)
    assert done.code == 0, done.stderr
    for name, data in published(hub, "tester/half").items():
        if name.endswith(".safetensors"):
            size = int.from_bytes(data[:8], "little")
            said = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])
            assert said["options"] == {"to": "fp16", "norms": "cast"}
    proof = place.run("verify", "tester/half", "--against", "tester/m")
    assert proof.code == 0, proof.stdout + proof.stderr


@pytest.mark.usefixtures("source")
def test_a_variant_in_its_sources_own_repo_is_proven_beside_the_source(here: Work) -> None:
    token = here.hub.tokens.write
    here.hub.create("tester/own", published(here.hub, REPO))
    here.ok("convert", "tester/own", "--to", "bf16", "--variant", "bf16", "--push", "tester/own", token=token)
    here.ok("verify", "tester/own", "--against", "tester/own", token=token)
    index = "model.safetensors.index.bf16.json"
    other = {**published(here.hub, "tester/own"), index: b"{}"}
    here.hub.create("tester/changed", other)
    done = here("verify", "tester/changed", "--against", "tester/changed", "--json", token=token)
    assert [m["file"] for m in json.loads(done.stdout)["mismatches"]] == [index]


def test_what_is_not_there_is_said_in_one_sentence(here: Work, source: Path) -> None:
    here.refused(5, "verify", "acme/nosuch", "--against", REPO)
    precconv.convert(source, to="bf16", output=here.path / "out")
    here.refused(5, "verify", "out", "--against", "acme/nosuch")
