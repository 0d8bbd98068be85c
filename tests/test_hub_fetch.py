"""Models on the Hub as sources: looked at by range, fetched once, and what is said when that does not work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import precconv
from precconv.hub.source import BLOCK

from .hub import faults
from .hub.faults import Effect
from .hub_runs import Waits, Work, model_files
from .repos import files, load, read_index, shard, sharded, single, stages, weight

REPO = "acme/m"
BIG = 300_000  # elements, 1.2 MB: more than is asked for at once
OUT = "m-bf16"


def big(count: int) -> list[dict[str, torch.Tensor]]:
    return [{f"layer.{n}.a": weight(n, (BIG,)), f"layer.{n}.b": weight(-n, (BIG,))} for n in range(1, count + 1)]


def torch_shards(root: Path, parts: list[dict[str, torch.Tensor]]) -> Path:
    """The same as ``sharded``, as torch saves it."""
    root.mkdir()
    weight_map: dict[str, str] = {}
    for n, tensors in enumerate(parts, 1):
        torch.save(tensors, root / shard(n, len(parts), ".bin"))
        weight_map |= dict.fromkeys(tensors, shard(n, len(parts), ".bin"))
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text('{"model_type": "toy"}')
    return root


@pytest.fixture
def source(here: Work, tmp_path: Path) -> Path:
    """A model in three shards, and the same in the repo."""
    root = sharded(tmp_path / "source", big(3))
    here.hub.create(REPO, model_files(root))
    return root


def expected(source: Path, to: str = "bf16") -> dict[str, bytes]:
    """What a conversion of the local directory gives."""
    out = source.with_name("expected")
    precconv.convert(source, to=to, output=out)
    found = files(out)
    shutil.rmtree(out)
    return found


def converted(path: Path) -> dict[str, bytes]:
    """A converted directory's files, but for the one that every repo begins with."""
    found = files(path)
    found.pop(".gitattributes")
    return found


def fetched_whole(here: Work) -> list[str]:
    """The files of which the client asked for more than a range, in order of name."""
    seen = here.hub.seen("GET", "/resolve/")
    return sorted(e.path.split("/resolve/")[1].partition("/")[2] for e in seen if not e.range.startswith("bytes=0-"))


def cached(here: Work) -> int:
    """Bytes in the client's cache."""
    return sum(p.lstat().st_size for p in here.home.rglob("*") if p.is_file() and not p.is_symlink())


# Looking


@pytest.mark.parametrize(
    "command", [["inspect"], ["inspect", "--to", "bf16"], ["convert", "--to", "bf16", "--dry-run"]]
)
@pytest.mark.parametrize("save", [sharded, torch_shards])
def test_no_weights_are_downloaded_to_look_at_a_model(
    save: Callable[[Path, list[dict[str, torch.Tensor]]], Path], command: list[str], here: Work, tmp_path: Path
) -> None:
    root = save(tmp_path / "source", big(3))
    here.hub.create(REPO, model_files(root))
    shown = here.ok(*command, REPO, "--json" if "inspect" in command else "-v")
    assert shown.count("layer.") == 6
    assert all(e.range for e in here.hub.seen("GET", "/(resolve|objects)/"))
    records = 3 * 6 if save is torch_shards else 0  # of a zip, each is looked up
    assert here.hub.bytes_of_weights() <= (3 + records) * (BLOCK + (1 << 14))
    assert here.hub.bytes_of_weights() < sum(p.stat().st_size for p in root.glob("*-of-*")) / 4
    assert cached(here) == 0
    assert here.left() == []


def test_of_a_torch_file_with_many_tensors_little_is_read(here: Work, tmp_path: Path) -> None:
    root = torch_shards(tmp_path / "source", [{f"layer.{n}": weight(n, (30_000,)) for n in range(50)}])
    here.hub.create(REPO, model_files(root))
    assert precconv.inspect(REPO).tensors == precconv.inspect(root).tensors
    assert here.hub.bytes_of_weights() < (root / shard(1, 1, ".bin")).stat().st_size / 5


def test_a_look_at_the_hub_shows_what_a_look_at_the_directory_does(here: Work, source: Path) -> None:
    there, near = precconv.inspect(REPO), precconv.inspect(source)
    assert there.path == f"{REPO}@{here.hub.commits(REPO)[0].oid}"
    assert (there.tensors, there.files, there.file_bytes) == (near.tensors, near.files, near.file_bytes)
    assert precconv.plan(REPO, to="fp16") == precconv.plan(source, to="fp16")
    assert json.loads(here.ok("inspect", "--json", REPO))["totals"] == near.to_dict()["totals"]


def test_one_commit_is_used_throughout(here: Work, source: Path) -> None:
    first = here.hub.commits(REPO)[0].oid
    wanted = expected(source)
    other = model_files(sharded(source.with_name("other"), [{"other": weight(9)}] * 1))
    deleted = [shard(n, 3) for n in (1, 2, 3)]
    here.hub.fail(faults.before(lambda: here.hub.commit(REPO, other, deleted=deleted)), path=r"/resolve/.*index\.json")
    here.ok(REPO, "--to", "bf16")
    assert here.hub.commits(REPO)[0].oid != first
    assert converted(here.path / OUT) == wanted
    assert all(f"/resolve/{first}/" in e.path for e in here.hub.seen(path="/resolve/"))
    here.ok(REPO, "--to", "bf16", "--force")
    assert load(here.path / OUT).keys() == {"other"}


def test_a_revision_is_what_is_converted(here: Work, source: Path) -> None:
    first = here.hub.commits(REPO)[0].oid
    single(source.with_name("dev"), {"dev": weight(1)})
    gone = [name for name in here.hub.files(REPO) if "model" in name]
    here.hub.commit(REPO, model_files(source.with_name("dev")), revision="dev", deleted=gone)
    here.hub.commit(REPO, model_files(source.with_name("dev")), revision="refs/pr/1", deleted=gone)
    for revision in ("dev", "refs/pr/1"):
        here.ok(f"{REPO}@{revision}", "--to", "bf16", "-o", "out", "--force")
        assert load(here.path / "out").keys() == {"dev"}
    assert len(precconv.inspect(f"{here.hub.endpoint}/{REPO}/tree/refs/pr/1")) == 1
    assert len(precconv.inspect(f"{REPO}@{first[:10]}")) == 6


# Fetching


def test_only_what_the_conversion_needs_is_fetched(here: Work, tmp_path: Path) -> None:
    root = single(tmp_path / "source", {"layer.0.a": weight(1)})
    wanted = ["README.md", "config.json", "tokenizer.json", "model.safetensors", ".gitattributes"]
    duplicates = [
        "pytorch_model.bin", "model.fp16.safetensors", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx",
        "optimizer.pt", "rng_state_0.pth",
    ]  # fmt: skip
    extra = dict.fromkeys(duplicates, b"not asked for") | {"README.md": b"---\n---\n", "tokenizer.json": b"{}"}
    here.hub.create(REPO, {**model_files(root), **extra})
    here.ok(REPO, "--to", "bf16")
    assert fetched_whole(here) == sorted(wanted)
    assert here.left() == sorted([OUT, *(f"{OUT}/{name}" for name in wanted)])
    assert not [e for e in here.hub.requests if any(name in e.path for name in duplicates)]


def test_the_output_is_that_of_the_local_directory(here: Work, source: Path) -> None:
    report = json.loads(here.ok(REPO, "--to", "bf16", "--json"))
    assert converted(here.path / OUT) == expected(source)
    assert read_index(here.path / OUT)
    assert report["source"] == f"{REPO}@{here.hub.commits(REPO)[0].oid}"
    assert (report["output"], report["published"]) == (OUT, None)
    assert stages(here.path) == []


@pytest.mark.usefixtures("source")
def test_one_file_can_be_made_of_it(here: Work) -> None:
    here.ok(REPO, "--to", "bf16", "-o", "one.safetensors")
    assert here.left() == ["one.safetensors"]
    assert len(precconv.inspect("one.safetensors")) == 6
    here.hub.requests.clear()
    here.refused(1, REPO, "--to", "bf16", "-o", "one.safetensors")
    assert fetched_whole(here) == []


@pytest.mark.usefixtures("source")
def test_what_is_in_the_cache_is_not_fetched_again(here: Work) -> None:
    here.ok(REPO, "--to", "bf16")
    here.hub.requests.clear()
    here.ok(REPO, "--to", "fp16")
    assert fetched_whole(here) == []
    assert here.hub.bytes_of_weights() <= 3 * BLOCK


@pytest.mark.usefixtures("source")
def test_a_second_run_needs_no_connection(here: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    here.ok(REPO, "--to", "bf16")
    wanted, commit = converted(here.path / OUT), here.hub.commits(REPO)[0].oid
    here.hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision in ("", "@main", f"@{commit}"):
        here.ok(REPO + revision, "--to", "bf16", "--force")
        assert converted(here.path / OUT) == wanted
    assert "6 tensors" in here.ok("inspect", REPO)
    assert here.hub.requests == []


@pytest.mark.usefixtures("source")
def test_the_client_offline_is_offline(here: Work) -> None:
    code, _, said = here.apart(REPO, "--to", "bf16", HF_HUB_OFFLINE="1")
    assert (code, here.left(), here.hub.requests) == (5, [], [])
    assert f"error: {REPO}: is no file or directory here, and as a model on the Hub is not in the cache" in said
    assert here.apart(REPO, "--to", "bf16")[0] == 0
    here.hub.requests.clear()
    assert here.apart(REPO, "--to", "fp16", HF_HUB_OFFLINE="1")[0] == 0
    assert here.hub.requests == []
    assert (here.path / "m-fp16").is_dir()


@pytest.mark.usefixtures("source")
def test_offline_a_model_of_which_a_part_is_cached_is_not_taken_for_whole(
    here: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.ok(REPO, "--to", "bf16")
    next(here.home.rglob(shard(2, 3))).unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in (["inspect", REPO], [REPO, "--to", "fp16"], [REPO, "--to", "fp16", "--dry-run"]):
        said = here.refused(5, *command)
        assert f"{REPO}: is not whole in the cache, and the client is offline: 1 of its 3 shards not found" in said
    assert "is not in the cache, and the client is offline" in here.refused(5, "inspect", f"hf://{REPO}/{shard(2, 3)}")
    assert len(precconv.inspect(f"hf://{REPO}/{shard(1, 3)}")) == 2


def test_a_renamed_repo_is_found_under_its_old_name(here: Work, source: Path) -> None:
    here.hub.rename(REPO, "acme/new")
    report = json.loads(here.ok(REPO, "--to", "bf16", "--json"))
    assert report["source"].startswith("acme/new@")
    assert converted(here.path / "new-bf16") == expected(source)


# A file of a model


def test_a_file_is_converted_as_a_file(here: Work, source: Path) -> None:
    name = shard(2, 3)
    report = json.loads(here.ok(f"hf://{REPO}/{name}", "--to", "bf16", "--json"))
    assert report["source"] == f"hf://{REPO}@{here.hub.commits(REPO)[0].oid}/{name}"
    out = name.replace(".safetensors", ".bf16.safetensors")
    assert here.left() == [out]
    assert fetched_whole(here) == ["config.json", name]
    alone = precconv.convert(source / name, to="bf16", output=source.with_name("alone.safetensors"))
    assert (here.path / out).read_bytes() == Path(str(alone.output)).read_bytes()
    here.hub.requests.clear()
    assert "exists" in here.refused(1, f"hf://{REPO}/{name}", "--to", "bf16")
    assert fetched_whole(here) == []


def test_a_file_is_looked_at_alone(here: Work, source: Path) -> None:
    page = f"{here.hub.endpoint}/{REPO}/blob/main/{shard(2, 3)}"
    assert [t.name for t in precconv.inspect(page)] == ["layer.2.a", "layer.2.b"]
    assert precconv.plan(page, to="fp16").items == precconv.plan(source / shard(2, 3), to="fp16").items
    assert precconv.diff(page, source / shard(2, 3)).equal
    assert "--variant is for model directories" in here.refused(2, page, "--to", "bf16", "--variant", "x")
    assert "--push publishes whole models" in here.refused(2, page, "--to", "bf16", "--push", "acme/out")


def test_the_config_beside_a_file_on_the_hub_counts_and_none_here_does(here: Work, tmp_path: Path) -> None:
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    root = single(tmp_path / "source", {name: weight(1), "other.weight": weight(2)}, config='{"model_type": "t5"}')
    here.hub.create(REPO, model_files(root))
    trap = here.path / REPO
    trap.mkdir(parents=True)
    (trap / "config.json").write_text('{"model_type": "llama"}')
    made = precconv.plan(f"hf://{REPO}/model.safetensors", to="fp16")
    assert {i.src.name: i.to.name for i in made.items} == {name: "fp32", "other.weight": "fp16"}
    done = precconv.convert(f"hf://{REPO}/model.safetensors", to="fp16")
    assert done.plan.items == made.items


# What cannot be had


@pytest.mark.usefixtures("source")
def test_who_cannot_read_a_repo_hears_why(here: Work) -> None:
    hub, repo = here.hub, here.hub.repo(REPO)
    convert = (REPO, "--to", "bf16")
    assert "the Hub does not accept the token" in here.refused(5, *convert, token=hub.tokens.wrong)
    assert "there is no such branch, tag or commit" in here.refused(5, f"{REPO}@nope", "--to", "bf16")
    assert "there is no such file" in here.refused(5, f"hf://{REPO}/nope.bin", "--to", "bf16")
    repo.private = True
    assert "or it is private and no token was sent" in here.refused(5, *convert)
    assert "may not see it" in here.refused(5, *convert, token=hub.tokens.stranger)
    here.ok("inspect", REPO, token=hub.tokens.read)
    repo.private, repo.gated = False, True
    assert "is gated, and no token was sent" in here.refused(5, *convert)
    said = here.refused(5, *convert, token=hub.tokens.stranger)
    assert f"has not been let in\nhint: ask for access at {hub.endpoint}/{REPO}" in said
    assert hub.bytes_of_weights() < 10 * BLOCK
    repo.allowed.add("stranger")
    here.ok(*convert, token=hub.tokens.stranger)
    repo.gated, repo.disabled = False, True
    assert "the Hub has disabled it" in here.refused(5, *convert, "--force")


REFUSALS = {
    "rule": (["--rule", "layer.9=keep"], 2, "matches no tensor"),
    "component": (["--component", "unet=fp16"], 2, "there is no component 'unet'"),
    "exists": (["-o", "there"], 1, "there: exists"),
    "no place": (["-o", "none/out"], 1, "none: there is no such directory"),
    "report": (["--report", "none/r.json"], 1, "none: there is no such directory"),
    "variant": (["--from-variant", "fp16"], 2, "there is no variant 'fp16'"),
}


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(("options", "code", "said"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("push", [False, True])
def test_what_can_be_refused_is_before_anything_is_fetched_or_made(
    options: list[str], code: int, said: str, push: bool, here: Work
) -> None:
    (here.path / "there").mkdir()
    (here.path / "there" / "x").write_bytes(b"")
    to = ["--push", "acme/out"] if push else []
    assert said in here.refused(code, REPO, "--to", "bf16", *options, *to, token=here.hub.tokens.write)
    assert fetched_whole(here) == []
    if options[0] != "-o":
        assert here.hub.repos() == [REPO]


@pytest.mark.parametrize(("free", "what"), [(5_000_000, "needs 7"), (9_000_000, "needs 10")])
@pytest.mark.parametrize("ref", [REPO, f"hf://{REPO}/one.safetensors"])
def test_a_full_disk_is_foreseen(
    ref: str, free: int, what: str, here: Work, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = source.with_name("one.safetensors")
    precconv.convert(source, to="fp32", output=one)
    here.hub.commit(REPO, {"one.safetensors": one})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    said = here.refused(1, ref, "--to", "bf16")
    assert f"{REPO} {what}" in said
    assert f"the disk has {free} free" in said
    assert set(fetched_whole(here)) <= {"config.json"}


# What passes


BURSTS: dict[str, tuple[Effect, int]] = {
    "rate limit": (faults.rate_limited(seconds=20), 3),
    "failures": (faults.status(503), 3),
    "cut": (faults.lost(), 2),
    "outage": (faults.outage(0.05), 1),
}


@pytest.mark.parametrize(("effect", "times"), BURSTS.values(), ids=BURSTS)
@pytest.mark.parametrize("where", ["GET /api/models/", "GET /resolve/", "HEAD /resolve/", "GET /objects/"])
def test_what_passes_is_waited_for(
    where: str, effect: Effect, times: int, here: Work, source: Path, waits: Waits
) -> None:
    method, path = where.split()
    rule = here.hub.fail(effect, method=method, path=path, times=times)
    here.ok(REPO, "--to", "bf16")
    assert rule.left == 0
    assert waits or method == "HEAD"  # the client asks a second time at once
    assert converted(here.path / OUT) == expected(source)


@pytest.mark.usefixtures("source")
def test_the_client_does_not_talk_meanwhile(here: Work) -> None:
    here.hub.fail(faults.status(503), method="GET", path="/resolve/")
    assert here.apart("inspect", "-q", REPO) == (0, here.ok("inspect", "-q", REPO), "")


def test_a_download_that_is_cut_goes_on(here: Work, source: Path) -> None:
    rule = here.hub.fail(faults.cut(700_000), method="GET", path="^/objects/", times=9)
    here.ok(REPO, "--to", "bf16")
    assert rule.left == 0
    assert converted(here.path / OUT) == expected(source)


@pytest.mark.usefixtures("source")
def test_what_does_not_pass_is_given_up(here: Work, waits: Waits) -> None:
    here.hub.fail(faults.status(500), path="/api/models/", times=99)
    assert "the Hub failed (500)" in here.refused(5, REPO, "--to", "bf16")
    assert waits == [1, 2, 4]
    here.hub._rules.rules.clear()
    here.hub.fail(faults.cut(1000), method="GET", path="^/objects/", times=9999)
    assert "the connection to" in here.refused(5, REPO, "--to", "bf16")
    here.hub._rules.rules.clear()
    here.ok(REPO, "--to", "bf16")


@pytest.mark.usefixtures("source")
def test_a_file_that_the_cache_has_cut_short_is_said(here: Work) -> None:
    here.ok(REPO, "--to", "bf16")
    path = next(p for p in here.home.rglob(shard(2, 3)))
    with open(path, "rb+") as file:
        file.truncate(1000)
    assert "has 1000 bytes in the cache" in here.refused(1, REPO, "--to", "fp16")


# Progress


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("xs", [REPO, f"hf://{REPO}/{shard(1, 3)}"])
def test_progress_goes_forward_to_its_end(xs: str, here: Work) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        seen.clear()
        precconv.convert(xs, to="bf16", output=here.path, progress=lambda *at: seen.append(at)) if "hf:" in xs else (
            precconv.convert(xs, to="bf16", progress=lambda *at: seen.append(at))
        )
        done = [at for at, _ in seen]
        assert done == sorted(done)
        assert all(at <= total for at, total in seen)
        assert seen[-1][0] == seen[-1][1] > BIG * 4
        for path in here.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
