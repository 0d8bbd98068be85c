"""The files around the weights of a model directory: carried over, rewritten or left out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import precconv
from precconv.errors import OutputError

from .layouts import CONFIG, directory, left, linear, names

#: Each with bytes that a rewrite would change: line ends, odd spacing, a key twice, no UTF-8.
CARRIED = {
    "tokenizer.json": b'{"a": 1,\r\n "a": 2}', "tokenizer_config.json": b'{"dtype": "float32"}', "vocab.txt": b"a\r\nb",
    "tokenizer.model": b"\x0a\x00\xff\xfe", "chat_template.jinja": b"{{ messages }}\r\n", "merges.txt": b"#version\n",
    "modeling_own.py": b"raise SystemExit('never run')\n", "generation_config.json": b'{"_from_model_config":true}',
    "preprocessor_config.json": b'{ "size":   224 }', "processor_config.json": b"{}",
    "video_preprocessor_config.json": b"{}",
    ".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", "LICENSE": b"\xff not UTF-8",
    "special_tokens_map.json": b"{}", "additional_chat_templates/tool.jinja": b"x", "assets/figure.png": b"\x89PNG",
}  # fmt: skip
STATE = (
    "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "trainer_state.json",
    "global_step10/mp_rank_00_model_states.pt", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest",
    "zero_to_fp32.py", "checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt",
)  # fmt: skip


def model(root: Path, **more: bytes) -> Path:
    return directory(root, {"model.safetensors": linear(), "config.json": CONFIG, **more})


def test_everything_that_is_no_weights_is_carried_over_byte_for_byte(tmp_path: Path) -> None:
    source = model(tmp_path / "in", **CARRIED)
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert names(tmp_path / "out") == {*CARRIED, "model.safetensors", "config.json"}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in CARRIED} == CARRIED
    config = (source / "config.json").read_bytes().replace(b"float32", b"bfloat16")
    assert (tmp_path / "out/config.json").read_bytes() == config


def test_the_state_of_a_training_run_is_left_out_and_that_is_said(tmp_path: Path) -> None:
    source = model(tmp_path / "in", **dict.fromkeys(STATE, b"not read"))
    (source / ".git").mkdir()
    (source / ".git/config").write_bytes(b"")
    report = precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert names(tmp_path / "out") == {"model.safetensors", "config.json"}
    assert left(report).keys() == set(STATE)
    assert all("training" in why for why in left(report).values())
    for path, why in left(report).items():
        assert any(note.startswith(f"left out, {why}: ") and path in note for note in report.plan.notes)


def test_with_copy_all_it_is_carried_over(tmp_path: Path) -> None:
    source = model(tmp_path / "in", **dict.fromkeys(STATE, b"not read"))
    report = precconv.convert(source, to="bf16", output=tmp_path / "out", copy_all=True)
    assert names(tmp_path / "out") == names(source)
    assert left(report) == {}


@pytest.mark.skipif(os.name == "nt", reason="permissions are those of POSIX")
def test_permissions_are_the_sources_own(tmp_path: Path) -> None:
    source = model(tmp_path / "in", **{"run.py": b"", "README.md": b"# model\n"})
    modes = {"run.py": 0o755, "README.md": 0o600, "config.json": 0o640, "model.safetensors": 0o640}
    for name, mode in modes.items():
        (source / name).chmod(mode)
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert {name: stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in modes} == modes


# A snapshot in the Hub's cache, and the card

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = b"---\nlicense: mit\n---\n# Model\n\nText of the model's own.\n"


def snapshot(root: Path) -> Path:
    """Links into ``blobs``, as huggingface_hub lays them out."""
    home = root / "models--org--name"
    plain = model(root / "plain", **{"README.md": CARD, "tokenizer.json": b"{}", "sub/deep.txt": b"x"})
    folder = home / "snapshots" / COMMIT
    (home / "blobs").mkdir(parents=True)
    for n, name in enumerate(sorted(names(plain))):
        blob = home / "blobs" / f"{n:064x}"
        blob.write_bytes((plain / name).read_bytes())
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    return folder


def test_a_snapshot_of_the_hubs_cache_is_followed_and_its_card_names_repo_and_commit(tmp_path: Path) -> None:
    source = snapshot(tmp_path)
    before = {name: (source / name).read_bytes() for name in names(source)}
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert names(tmp_path / "out") == before.keys()
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_symlink()] == []
    assert (tmp_path / "out/tokenizer.json").stat().st_nlink == 1
    assert {name: (source / name).read_bytes() for name in before} == before
    text = (tmp_path / "out/README.md").read_text("utf-8")
    front = text.split("---\n")[1]
    assert front == "license: mit\nbase_model: org/name\nbase_model_relation: quantized\n"
    assert text.count("Text of the model's own.") == 1
    assert f"at commit `{COMMIT}`" in text
    assert "[org/name](https://huggingface.co/org/name)" in text


def test_converting_again_replaces_the_cards_section(tmp_path: Path) -> None:
    precconv.convert(snapshot(tmp_path), to="fp32", output=tmp_path / "first")
    precconv.convert(tmp_path / "first", to="bf16", output=tmp_path / "second")
    text = (tmp_path / "second/README.md").read_text("utf-8")
    assert "## Converted to fp32" in (tmp_path / "first/README.md").read_text("utf-8")
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Converted to bf16"]
    assert text.count("precconv:begin") == text.count("precconv:end") == 1
    assert text.startswith("---\nlicense: mit\nbase_model: org/name\n")


def test_an_output_is_replaced_only_when_asked_and_only_where_it_is_one(tmp_path: Path) -> None:
    source = model(tmp_path / "in")
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    with pytest.raises(OutputError, match="exists"):
        precconv.convert(source, to="fp16", output=tmp_path / "out")
    precconv.convert(source, to="fp16", output=tmp_path / "out", force=True)
    assert b"float16" in (tmp_path / "out/config.json").read_bytes()
    (tmp_path / "out/diary.txt").write_text("mine")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")}
    with pytest.raises(OutputError, match=r"diary\.txt"):
        precconv.convert(source, to="bf16", output=tmp_path / "out", force=True)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")} == before
