"""A proof holds for what was converted, whatever the options; and every kind of damage to an output is found."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import precconv
from precconv.errors import InputError, UsageError, VerificationError
from precconv.proof import Mismatch, Proof
from precconv.provenance import KEY
from precconv.runs import CHUNK_BYTES

from .command import run
from .repos import INDEX, files, layers, pipeline, shard, sharded, single, weight
from .samples import PROPERTY

#: Enough for several chunks of one tensor.
BIG = CHUNK_BYTES // 4 * 2 + 77
Damage = Callable[[Path], None]


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.mlp.weight": weight(1, (BIG, 1)),
        "model.layers.1.mlp.weight": weight(2, (16, 24)),
        "model.layers.2.mlp.weight": weight(3, (16, 24)),
        "model.norm.weight": weight(4, (24,)),
        "model.empty": torch.zeros(0, 3),
        "ids": torch.arange(12),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proving") / "m.safetensors"
    save_file(tensors(), path, metadata={"format": "pt", "note": "kept"})
    torch.save({"state_dict": tensors(), "epoch": 3, "opt": {"exp_avg": weight(9, (5, 5))}}, path.with_suffix(".ckpt"))
    return path


def proven(out: Path, source: Path, **options: Any) -> Proof:
    found = precconv.verify(out, against=source, **options)
    assert found.proven, found.mismatches
    return found


def mismatches(out: Path, source: Path, **options: Any) -> list[Mismatch]:
    found = precconv.verify(out, against=source, **options)
    assert not found.proven
    return list(found.mismatches)


def said(found: list[Mismatch]) -> list[tuple[str, str | None]]:
    return [(m.kind, m.tensor) for m in found]


# --- what holds -----------------------------------------------------------------------------------------------

OPTIONS: tuple[dict[str, Any], ...] = (
    {"to": "bf16"},
    {"to": "fp16"},
    {"to": "fp32"},
    {"to": "auto"},
    {"to": "bf16", "lossless_only": True},
    {"to": "bf16", "rounding": "stochastic", "seed": 7},
    {"to": "fp16", "rounding": "stochastic"},
    {"to": "bf16", "norms": "cast", "preset": "none", "mixed": "cast"},
    {"to": "bf16", "rule": ["*.0.*=fp16", "*norm*=drop"], "keep": ["*.1.*"]},
    {"to": "bf16", "strip_wrappers": True},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("given", "made"), [(".safetensors", ".safetensors"), (".ckpt", ".safetensors")])
def test_the_record_is_enough_to_prove_a_safetensors_output(
    source: Path, tmp_path: Path, options: dict[str, Any], given: str, made: str
) -> None:
    if given == ".ckpt" and "strip_wrappers" not in options:
        options = {**options, "select": "state_dict"}
    out = tmp_path / f"out{made}"
    report = precconv.convert(
        source.with_suffix(given), to=options["to"], output=out, **{k: v for k, v in options.items() if k != "to"}
    )
    found = proven(out, source.with_suffix(given), workers=1)
    is_copy = options["to"] == "fp32" and given == made  # which says nothing of itself
    assert found.options_from == ("dtypes" if is_copy else "record")
    assert found.options["to"] == options["to"]
    assert found.compared_bytes == out.stat().st_size
    assert [i.to for i in found.plan.items] == [i.to for i in report.plan.items]


@pytest.mark.parametrize("given", [".safetensors", ".ckpt"])
@pytest.mark.parametrize(
    "options",
    [{"to": "bf16"}, {"to": "fp16", "norms": "cast"}, {"to": "bf16", "rounding": "stochastic", "seed": 3}],
    ids=str,
)
def test_a_torch_output_has_no_record_and_is_proven_by_its_report_or_by_the_options(
    source: Path, tmp_path: Path, given: str, options: dict[str, Any]
) -> None:
    out, report = tmp_path / "out.pt", tmp_path / "report.json"
    precconv.convert(source.with_suffix(given), output=out, report=report, **options)
    by_report = proven(out, source.with_suffix(given), report=report)
    assert (by_report.options_from, by_report.version) == ("report", None)
    by_options = proven(out, source.with_suffix(given), **options)
    assert by_options.options_from == "arguments"
    assert by_options.compared_bytes == out.stat().st_size


def test_without_record_report_and_options_the_target_is_what_most_floats_are(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="fp16", output=out, provenance=False)
    found = proven(out, source)
    assert (found.options_from, found.options["to"], found.version) == ("dtypes", "fp16", None)


@pytest.mark.parametrize("policy", ["keep", "fp32", "bf16", "clamp", "ieee"])
def test_what_overflows_is_decided_again(tmp_path: Path, policy: Any) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"big": torch.full((3, 50), 1e5), "small": weight(0, (3, 50)), "wide": weight(1).double()}, source)
    precconv.convert(source, to="fp16", output=out, on_overflow=policy)
    proven(out, source)
    if policy in ("clamp", "ieee"):
        found = said(mismatches(out, source, on_overflow="error"))
        assert ("record", None) in found
        assert ("refused", "big") in found


def test_an_output_that_the_conversion_would_have_refused_is_not_proven(tmp_path: Path) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"big": torch.tensor([1.0, 1e5, 2.0]), "small": weight(0)}, source)
    precconv.convert(source, to="fp16", output=out, on_overflow="ieee", provenance=False)
    (found,) = mismatches(out, source, to="fp16")
    assert (found.kind, found.tensor) == ("refused", "big")
    assert "1 finite values do not fit fp16" in found.text


def test_bf16_cannot_take_everything_either(tmp_path: Path) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"big": torch.tensor([3.4e38, 1.0])}, source)
    precconv.convert(source, to="fp16", output=out, on_overflow="ieee", provenance=False)
    kinds = {m.kind for m in mismatches(out, source, to="fp16", on_overflow="bf16")}
    assert kinds == {"refused", "dtype"}


@pytest.mark.parametrize("name", ["renamed.safetensors", "elsewhere/out.safetensors"])
def test_an_output_may_have_another_name_than_it_was_given(source: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    proven(out.rename(tmp_path / name), source)


def test_a_torch_archive_may_have_another_name_too(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    precconv.convert(source, to="bf16", output=out, format="pt")
    proven(out.rename(tmp_path / "best.model.ckpt"), source)


def test_nothing_is_written_and_neither_side_is_changed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (*tmp_path.iterdir(), *source.parent.iterdir())}
    proven(out, source)
    assert before == {
        p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (*tmp_path.iterdir(), *source.parent.iterdir())
    }


def test_progress_is_in_bytes_and_reaches_its_end(source: Path, tmp_path: Path) -> None:
    out, calls = tmp_path / "out.safetensors", list[tuple[int, int]]()
    precconv.convert(source, to="bf16", output=out)
    proven(out, source, workers=1, progress=lambda *c: calls.append(c))
    assert calls[-1][0] == calls[-1][1] == sum(t.nbytes for t in precconv.inspect(source))


# --- damage to a file ---------------------------------------------------------------------------------------


@PROPERTY
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), kind=st.sampled_from([".safetensors", ".ckpt"]))
def test_any_flipped_bit_is_found(
    source: Path, tmp_path_factory: pytest.TempPathFactory, where: float, bit: int, kind: str
) -> None:
    out = _made(source, kind, tmp_path_factory)
    damaged = bytearray(out.read_bytes())
    damaged[int(where * len(damaged))] ^= 1 << bit
    target = out.with_name(f"damaged{kind}")
    target.write_bytes(damaged)
    assert not precconv.verify(target, against=source.with_suffix(kind), to="bf16").proven


_MADE: dict[str, Path] = {}


def _made(source: Path, kind: str, factory: pytest.TempPathFactory) -> Path:
    """A good output, made once."""
    if kind not in _MADE or not _MADE[kind].exists():
        _MADE[kind] = factory.mktemp("made") / f"out{kind}"
        precconv.convert(source.with_suffix(kind), to="bf16", output=_MADE[kind])
    return _MADE[kind]


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The header changed, the data left as it is."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def resaved(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Loaded, changed and saved by the library, the metadata kept as it was written."""
    metadata: dict[str, str] = {}
    edited(path, lambda h: metadata.update(h["__metadata__"]))
    state = load_file(path)
    change(state)
    path.unlink()
    save_file(state, path)  # which writes several keys of metadata in no order
    edited(path, lambda h: h.update({"__metadata__": metadata, **{n: h.pop(n) for n in list(h)}}))


A, B = "model.layers.1.mlp.weight", "model.layers.2.mlp.weight"


def _swap_offsets(header: dict[str, Any]) -> None:
    header[A], header[B] = header[B], header[A]


def _swap(state: dict[str, torch.Tensor]) -> None:
    state[A], state[B] = state[B], state[A]


def _set(state: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    state[name] = value


DAMAGE: dict[str, tuple[Damage, list[tuple[str, str | None]]]] = {
    "two tensors' offsets swapped": (
        lambda p: edited(p, _swap_offsets),
        [("bytes", None), ("values", A), ("values", B)],
    ),
    "two tensors swapped": (lambda p: resaved(p, _swap), [("values", A), ("values", B)]),
    "a tensor missing": (lambda p: resaved(p, lambda s: s.pop(A)), [("missing", A)]),
    "a tensor too many": (lambda p: resaved(p, lambda s: _set(s, "more", weight(0))), [("unexpected", "more")]),
    "a tensor renamed": (lambda p: resaved(p, lambda s: _set(s, "x", s.pop(A))), [("missing", A), ("unexpected", "x")]),
    "a tensor of another dtype": (lambda p: resaved(p, lambda s: _set(s, A, s[A].half())), [("dtype", A)]),
    "a norm cast too": (
        lambda p: resaved(p, lambda s: _set(s, "model.norm.weight", s["model.norm.weight"].bfloat16())),
        [("dtype", "model.norm.weight")],
    ),
    "a tensor of another shape": (lambda p: resaved(p, lambda s: _set(s, A, s[A].reshape(24, 16))), [("shape", A)]),
    "a tensor transposed": (
        lambda p: resaved(p, lambda s: _set(s, A, s[A].T.contiguous().reshape(s[A].shape))),
        [("values", A)],
    ),
    "one element off by one": (
        lambda p: resaved(p, lambda s: s[A].view(torch.int16).view(-1)[77:78].add_(1)),
        [("values", A)],
    ),
    "an integer tensor": (lambda p: resaved(p, lambda s: s["ids"].neg_()), [("values", "ids")]),
    "metadata changed": (lambda p: edited(p, lambda h: h["__metadata__"].update(note="lost")), [("metadata", None)]),
    "metadata missing": (lambda p: edited(p, lambda h: h["__metadata__"].pop("note")), [("metadata", None)]),
    "metadata added": (lambda p: edited(p, lambda h: h["__metadata__"].update(more="x")), [("metadata", None)]),
    "a record of another source": (
        lambda p: edited(
            p, lambda h: h["__metadata__"].update({KEY: h["__metadata__"][KEY].replace("sha256:", "sha256:0")})
        ),
        [("record", None)],
    ),
    "header spelled otherwise": (
        lambda p: edited(p, lambda h: h.update({A: dict(reversed(h[A].items()))})),
        [("bytes", None)],
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_a_file_is_found_and_named(source: Path, tmp_path: Path, kind: str) -> None:
    damage, want = DAMAGE[kind]
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    damage(out)
    assert sorted(said(mismatches(out, source))) == sorted(want)


def test_the_first_wrong_element_is_named_with_both_patterns(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)

    def change(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.0.mlp.weight"].view(torch.int16)[BIG - 5 :] ^= 1
        state[A].view(torch.int16)[3, 4] ^= 1

    before = int(load_file(out)[A].view(torch.int16)[3, 4]) & 0xFFFF
    resaved(out, change)
    for workers in (1, 2, 5):
        one, two = mismatches(out, source, workers=workers)
        assert (one.elements, one.first) == (5, (BIG - 5, 0))
        assert (two.elements, two.first) == (1, (3, 4))
        assert (
            f"1 of 384 elements is wrong, the first at [3, 4]: 0x{before ^ 1:04x}, should be 0x{before:04x}" in two.text
        )


@pytest.mark.parametrize("cut", [1, 100, 5000])
@pytest.mark.parametrize("kind", [".safetensors", ".ckpt"])
def test_a_truncated_file_is_found(source: Path, tmp_path: Path, kind: str, cut: int) -> None:
    out = tmp_path / f"out{kind}"
    precconv.convert(source.with_suffix(kind), to="bf16", output=out)
    out.write_bytes(out.read_bytes()[:-cut])
    (found,) = mismatches(out, source.with_suffix(kind), to="bf16")
    assert found.kind == "unreadable"
    with pytest.raises(VerificationError):
        precconv.verify(out, against=source.with_suffix(kind))


def test_bytes_after_the_end_are_found(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    out.write_bytes(out.read_bytes() + b"x")
    (found,) = mismatches(out, source, to="bf16")
    assert found.kind == "unreadable"


def test_what_a_checkpoint_holds_beside_its_weights_is_proven_too(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    precconv.convert(source.with_suffix(".ckpt"), to="bf16", output=out)
    data, there = bytearray(out.read_bytes()), weight(9, (5, 5)).numpy().tobytes()
    assert data.count(there) == 1
    data[data.index(there) + 10] ^= 1
    out.write_bytes(data)
    (wrong,) = mismatches(out, source.with_suffix(".ckpt"), to="bf16")
    assert (wrong.kind, wrong.tensor, wrong.elements) == ("values", None, 1)
    state = torch.load(out, weights_only=True)
    state["epoch"] = 4
    torch.save(state, out)
    assert mismatches(out, source.with_suffix(".ckpt"), to="bf16")


def test_another_seed_is_another_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out, rounding="stochastic", seed=1, provenance=False)
    proven(out, source, rounding="stochastic", seed=1)
    assert {m.kind for m in mismatches(out, source, rounding="stochastic", seed=2)} == {"values"}
    assert {m.kind for m in mismatches(out, source, rounding="nearest")} == {"values"}


def test_an_output_of_another_source_is_found(source: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out.safetensors", tmp_path / "other.safetensors"
    precconv.convert(source, to="bf16", output=out)
    state = tensors() | {A: weight(99, (16, 24))}
    save_file(state, other, metadata={"format": "pt", "note": "kept"})
    assert set(said(mismatches(out, other))) - {("record", None)} == {("values", A)}


def test_what_a_fine_tool_writes_is_proven_where_its_bytes_are_the_same(source: Path, tmp_path: Path) -> None:
    """An output of safetensors itself, of a file that gets no record."""
    bare, out = tmp_path / "bare.safetensors", tmp_path / "out.safetensors"
    save_file(load_file(source), bare, metadata={"format": "pt"})
    want = {n: x.bfloat16() if x.is_floating_point() and "norm" not in n else x for n, x in load_file(bare).items()}
    save_file(want, out, metadata={"format": "pt"})
    proven(out, bare)


# --- damage to a model --------------------------------------------------------------------------------------


def model(root: Path) -> Path:
    sharded(root, layers(3), metadata={"total_size": 1, "note": "kept"})
    (root / "tokenizer.json").write_text('{"a": 1}')
    (root / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (root / "sub").mkdir()
    (root / "sub" / "vocab.txt").write_text("a b c")
    return root


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model and its conversion."""
    source, out = model(tmp_path / "source"), tmp_path / "out"
    precconv.convert(source, to="bf16", output=out)
    return source, out


def test_a_converted_model_is_proven_to_the_last_file(pair: tuple[Path, Path]) -> None:
    source, out = pair
    found = proven(out, source)
    assert (found.options_from, found.files) == ("record", len(files(out)))
    assert found.compared_bytes == sum(len(data) for data in files(out).values())


SHARD = shard(2, 3)
MODEL_DAMAGE: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "a config edited": (lambda d: (d / "config.json").write_text("{}"), [("file", "config.json")]),
    "a config's dtype left": (
        lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace("bfloat16", "float32")),
        [("file", "config.json")],
    ),
    "an index edited": (
        lambda d: (d / INDEX).write_text((d / INDEX).read_text().replace('"note": "kept"', '"note": "lost"')),
        [("file", INDEX)],
    ),
    "a tokenizer edited": (lambda d: (d / "tokenizer.json").write_text('{"a": 2}'), [("file", "tokenizer.json")]),
    "a file cut": (lambda d: (d / "sub" / "vocab.txt").write_text("a b"), [("file", "sub/vocab.txt")]),
    "a file longer": (lambda d: (d / "sub" / "vocab.txt").write_text("a b c d"), [("file", "sub/vocab.txt")]),
    "a card edited": (lambda d: (d / "README.md").write_text("# Mine\n"), [("file", "README.md")]),
    "a file missing": (lambda d: (d / "tokenizer.json").unlink(), [("missing", "tokenizer.json")]),
    "a file too many": (lambda d: (d / "more.txt").write_text(""), [("unexpected", "more.txt")]),
    "a shard missing": (lambda d: (d / SHARD).unlink(), [("missing", SHARD)]),
    "a shard cut": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-2]), [("unreadable", SHARD)]),
    "a shard that is another": (
        lambda d: shutil.copy(d / shard(1, 3), d / SHARD),
        [("missing", SHARD)] * 2 + [("record", SHARD)] + [("unexpected", SHARD)] * 2,
    ),
    "a shard's value": (lambda d: resaved(d / SHARD, lambda s: s["layer.1.a"].neg_()), [("values", SHARD)]),
    "weights of before beside it": (
        lambda d: shutil.copy(d / SHARD, d / "model.safetensors"),
        [("unexpected", "model.safetensors")],
    ),
}


@pytest.mark.parametrize("kind", MODEL_DAMAGE)
def test_damage_to_a_model_is_found_and_named(pair: tuple[Path, Path], kind: str) -> None:
    source, out = pair
    damage, want = MODEL_DAMAGE[kind]
    damage(out)
    assert sorted((m.kind, m.file) for m in mismatches(out, source)) == sorted(want)


def test_what_does_not_matter_can_be_left_out(pair: tuple[Path, Path]) -> None:
    source, out = pair
    (out / "README.md").write_text("# Mine\n")
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("")
    proven(out, source, ignore=["README.md", "notes/*"])
    assert len(mismatches(out, source, ignore=["README.md"])) == 1


def test_weights_are_compared_whatever_is_ignored(pair: tuple[Path, Path]) -> None:
    source, out = pair
    resaved(out / SHARD, lambda s: s["layer.1.a"].neg_())
    assert mismatches(out, source, ignore=["*"])


@pytest.mark.parametrize(
    "options",
    [
        {"to": "fp16", "shard_size": 300},
        {"to": "bf16", "variant": "half"},
        {"to": "bf16", "format": "pt"},
        {"to": "auto"},
        {"to": "bf16", "lossless_only": True},
        {"to": "bf16", "rounding": "stochastic", "seed": 1},
        {"to": "fp16", "on_overflow": "keep"},
    ],
    ids=str,
)
def test_a_model_of_any_options_is_proven(tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "out"
    torch_tensors = {**layers(3)[1], "layer.1.big": torch.full((7, 9), 1e6)}
    save_file(torch_tensors, source / SHARD, metadata={"format": "pt"})
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["layer.1.big"] = SHARD
    (source / INDEX).write_text(json.dumps(index))
    if options["to"] == "fp16" and "on_overflow" not in options:
        options = {**options, "on_overflow": "clamp"}
    precconv.convert(source, output=out, **options)
    is_told = "format" not in options and options["to"] != "auto" and "lossless_only" not in options
    found = proven(out, source, **({} if is_told else options))  # a copy and a torch file do not say it
    assert found.options_from == ("record" if is_told else "arguments")


def test_a_pipeline_is_proven_with_what_each_component_became(tmp_path: Path) -> None:
    source = pipeline(tmp_path / "source", unet={"u": weight(1)}, vae={"v": weight(2)}, text_encoder={"t": weight(3)})
    out = tmp_path / "out"
    options: dict[str, Any] = {"component": {"vae": "keep", "unet": "fp16"}, "rule": ["text_encoder/t=fp32"]}
    precconv.convert(source, to="bf16", output=out, **options)
    found = proven(out, source)
    assert {i.src.name: i.to.name for i in found.plan.items} == {
        "unet/u": "fp16",
        "vae/v": "fp32",
        "text_encoder/t": "fp32",
    }
    path = next((out / "vae").glob("*.safetensors"))
    resaved(path, lambda s: s["v"].neg_())
    (wrong,) = mismatches(out, source)
    assert (wrong.file, wrong.tensor) == (path.relative_to(out).as_posix(), "v")


def test_a_file_made_of_a_directory_is_proven_against_the_directory(tmp_path: Path) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "one.safetensors"
    precconv.convert(source, to="bf16", output=out)
    proven(out, source)
    resaved(out, lambda s: s["layer.2.b"].neg_())
    assert said(mismatches(out, source)) == [("values", "layer.2.b")]


def test_an_output_within_its_source_is_no_part_of_it(tmp_path: Path) -> None:
    source = single(tmp_path / "source", {"w": weight(1)})
    precconv.convert(source, to="bf16", output=source / "half")
    proven(source / "half", source)


def test_the_directory_that_one_is_in_can_be_proven(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = pair
    monkeypatch.chdir(out)
    proven(Path(), source.absolute())


def test_a_source_that_is_not_there_is_said_to_be_so(pair: tuple[Path, Path]) -> None:
    _, out = pair
    with pytest.raises(InputError, match="no such file or directory"):
        precconv.verify(out, against=out.with_name("nosuch"))


def test_a_directory_and_a_file_are_not_held_against_each_other(pair: tuple[Path, Path]) -> None:
    source, out = pair
    with pytest.raises(UsageError, match="is a directory"):
        precconv.verify(out, against=source / SHARD)


# --- where the options come from ------------------------------------------------------------------------------


def test_given_options_come_before_the_record_and_a_record_that_says_otherwise_is_a_mismatch(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out, keep=["*.1.*"])
    kinds = {m.kind for m in mismatches(out, source, rule=["*.2.*=fp16"])}
    assert kinds == {"record", "dtype"}
    proven(out, source, rule=["*.1.*=keep"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"options":{"to":"bf16","later":1},"source":{"bytes":1,"header":"x"},"version":"9"}', "'later' is not known"),
        ('{"options":{"to":5},"source":{"bytes":1,"header":"x"},"version":"9"}', "to = 5 is not"),
        (
            '{"options":{"to":"bf16","push":"a/b"},"source":{"bytes":1,"header":"x"},"version":"9"}',
            "'push' is not known",
        ),
        ('{"options":{},"source":{"bytes":1,"header":"x"},"version":"9"}', "names no dtype"),
        ('{"options":{"to":"int8"},"source":{"bytes":1,"header":"x"},"version":"9"}', "int8"),
    ],
)
def test_a_record_that_cannot_be_followed_is_said_to_be_so(
    source: Path, tmp_path: Path, text: str, sentence: str
) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    edited(out, lambda h: h["__metadata__"].update({KEY: text}))
    with pytest.raises(UsageError, match=sentence):
        precconv.verify(out, against=source)


def test_options_that_are_given_stand_in_for_a_record_that_cannot_be_followed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    text = '{"options":{"to":"bf16","later":1},"source":{"bytes":1,"header":"x"},"version":"9"}'
    edited(out, lambda h: h["__metadata__"].update({KEY: text}))
    assert said(mismatches(out, source, to="bf16")) == [("record", None)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"options":[]}', "[" * 100_000, '{"options":{},"source":1,"version":2}']
)
def test_a_record_that_is_none_is_a_mismatch(source: Path, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    edited(out, lambda h: h["__metadata__"].update({KEY: text}))
    assert said(mismatches(out, source)) == [("record", None)]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"options": {}}', '{"ok": true, "options": {"to": "bf16"}}', "\0"])
def test_what_is_no_report_is_said_to_be_none(source: Path, tmp_path: Path, text: str) -> None:
    out, report = tmp_path / "out.safetensors", tmp_path / "report.json"
    precconv.convert(source, to="bf16", output=out)
    report.write_text(text)
    with pytest.raises(InputError, match="is no report"):
        precconv.verify(out, against=source, report=report)


def test_a_regular_expression_in_a_record_is_not_run(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    rule = "re:" + "(.*)*" * 15 + "!$=fp32"
    precconv.convert(source, to="bf16", output=out)
    text = (
        f'{{"options":{{"rule":[{json.dumps(rule)}],"to":"bf16"}},"source":{{"bytes":1,"header":"x"}},"version":"1.0"}}'
    )
    edited(out, lambda h: h["__metadata__"].update({KEY: text}))
    with pytest.raises(UsageError, match="regular expression, which is not run") as caught:
        precconv.verify(out, against=source)
    assert caught.value.hint is not None
    assert "give the rules: --rule 're:(.*)*" in caught.value.hint


def test_a_record_with_a_regular_expression_is_followed_where_the_rules_are_given(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out, norms="cast", rule=["re:layers.1=fp32", "*.2.*=keep"])
    result = run("verify", out, "--against", source)
    assert result.exit_code == 2
    words = result.stderr.partition("give the rules: ")[2].split()
    assert words == ["--rule", "re:layers.1=fp32", "--keep", "'*.2.*'"]
    proven(out, source, rule=["re:layers.1=fp32", "*.2.*=keep"])


def test_a_version_that_is_none_is_no_record(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    edited(out, lambda h: h["__metadata__"].update({KEY: h["__metadata__"][KEY].replace('"0.', '"x.')}))
    assert said(mismatches(out, source)) == [("record", None)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes")
def test_a_pipe_or_a_dead_link_in_a_model_is_a_mismatch_and_a_report_that_is_a_pipe_is_refused(
    pair: tuple[Path, Path],
) -> None:
    source, out = pair
    (out / "link").symlink_to("nowhere")
    (found,) = mismatches(out, source)
    assert (found.kind, found.file) == ("unreadable", "link")
    (out / "link").unlink()
    os.mkfifo(out / "pipe")
    (found,) = mismatches(out, source)
    assert (found.kind, found.file) == ("unreadable", "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        precconv.verify(out, against=source, report=out / "pipe")


def test_an_empty_name_is_not_the_working_directory(source: Path) -> None:
    assert run("verify", "", "--against", source).exit_code == 2
    assert run("verify", source, "--against", "").exit_code == 2


def test_a_report_of_a_refusal_proves_nothing(tmp_path: Path) -> None:
    source, report = tmp_path / "in.safetensors", tmp_path / "report.json"
    save_file({"big": torch.tensor([1e6])}, source)
    with pytest.raises(precconv.NumericError):
        precconv.convert(source, to="fp16", report=report)
    with pytest.raises(InputError, match="was refused"):
        precconv.verify(source, against=source, report=report)


def test_a_file_without_floats_needs_a_dtype(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    save_file({"ids": torch.arange(4)}, source, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="nothing says what it should be"):
        precconv.verify(source, against=source)
    proven(source, source, to="bf16")


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_says_what_is_proven_and_exits_with_0(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    result = run("verify", out, "--against", source)
    assert result.exit_code == 0
    assert f"{out} is --to bf16 of {source}, every byte (options: its record)" in result.stdout
    assert run("verify", out, "--against", source, "-q").stdout == ""


def test_the_command_says_what_is_not_and_exits_with_4(pair: tuple[Path, Path]) -> None:
    source, out = pair
    (out / "README.md").write_text("# Mine\n")
    result = run("verify", out, "--against", source)
    assert result.exit_code == 4
    assert f"{out} is not --to bf16 of {source}" in result.stdout
    assert "README.md: is not as the conversion writes it" in result.stdout
    assert "--ignore 'README.md'" in result.stdout
    ignoring = run("verify", out, "--against", source, "--ignore", "README.md", "--ignore", "nothing*").stdout
    assert "every byte but what was to be ignored" in ignoring
    assert "ignored: README.md" in ignoring
    assert "--ignore 'nothing*' left nothing out" in ignoring
    assert run("verify", out, "--against", source, "--ignore", "README.md").exit_code == 0
    found = json.loads(run("verify", out, "--against", source, "--json").stdout)
    assert (found["proven"], found["mismatches"][0]["file"]) == (False, "README.md")
    assert run("verify", out, "--against", source, "-q").exit_code == 4


def test_the_command_takes_the_options_of_a_conversion(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    words = ["--to", "fp16", "--norms", "cast", "--rule", "*.1.*=bf16", "--keep", "*.2.*", "--no-provenance"]
    assert run(source, "-o", out, *words).exit_code == 0
    assert run("verify", out, "--against", source, *words[:-1]).exit_code == 0
    assert run("verify", out, "--against", source, "--to", "fp16").exit_code == 4
    assert run("verify", out, "--against", source, "--to", "fp17").exit_code == 2
    assert run("verify", tmp_path / "nosuch", "--against", source).exit_code == 1
    assert run("verify", out, "--against", tmp_path / "nosuch.safetensors").exit_code == 1
    assert run("verify", out).exit_code == 2


def test_the_command_names_the_options_and_says_where_values_are_right(source: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out.safetensors", tmp_path / "other.safetensors"
    words = [
        "--to",
        "bf16",
        "--on-overflow",
        "clamp",
        "--rule",
        "*.1.*=keep",
        "--rounding",
        "stochastic",
        "--seed",
        "7",
    ]
    assert run(source, "-o", out, *words).exit_code == 0
    said = run("verify", out, "--against", source).stdout
    options = "--to bf16 --keep '*.1.*' --on-overflow clamp --rounding stochastic --seed 7"
    assert f"{out} is {options} of {source}, every byte (options: its record)" in said
    save_file(tensors(), other, metadata={"format": "np", "note": "kept"})
    said = run("verify", out, "--against", other).stdout
    assert "hint: every value is the one that belongs there; the words about them differ" in said
    edited(out, lambda h: h.update({A: dict(reversed(h[A].items()))}))
    assert "the bytes around them differ" in run("verify", out, "--against", source).stdout
    bare = tmp_path / "bare.pt"
    precconv.convert(source, to="bf16", output=bare, norms="cast")
    said = run("verify", bare, "--against", source).stdout
    assert "(the target: by its dtypes)" in said
    assert "hint: it does not say how it was made" in said


def test_many_mismatches_are_counted_and_the_first_shown(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    save_file({f"w{i}": weight(i) for i in range(30)}, out)
    result = run("verify", out, "--against", source, "--top", "3")
    assert result.exit_code == 4
    assert len([line for line in result.stdout.splitlines() if line.startswith("  tensor")]) == 3
    assert " more" in result.stdout
