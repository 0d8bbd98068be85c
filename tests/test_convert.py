"""Whole conversions: the same bytes as load, cast and save; every policy end to end; nothing left after a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from precconv import convert, plan, readback
from precconv.dtypes import CASTABLE, DTYPES, FP16, FP32, TARGETS, DType, dtype
from precconv.errors import NumericError, OutputError, PrecconvError, UsageError, VerificationError
from precconv.fileio import PartFile
from precconv.provenance import KEY
from precconv.report import SCHEMA
from precconv.runs import CHUNK_BYTES
from precconv.stats import Stats

from .samples import (
    PROPERTY,
    STORABLE,
    assert_same_values,
    bits_of,
    from_bits,
    random_tensor,
    specials,
    torch_dtype,
    write_checkpoint,
)

#: What decides by names, shapes and shares is for other tests; here everything castable is cast.
PLAIN: dict[str, Any] = {"preset": "none", "norms": "cast", "mixed": "cast"}
CHUNK = CHUNK_BYTES // 4  # elements of a chunk of FP32


def cast(x: torch.Tensor, to: DType) -> torch.Tensor:
    """What a user would write: castable floats to the target, once from FP64; scalars and the rest as they are."""
    if dtype(x.dtype) not in CASTABLE or (x.dim() == 0 and not (to is FP32 and x.element_size() == 2)):
        return x
    return x.to(torch_dtype(to))


def listing(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def byte_order(path: Path) -> list[str]:
    with safe_open(path, "pt") as f:
        return list(f.offset_keys())


def metadata(path: Path) -> dict[str, str] | None:
    with safe_open(path, "pt") as f:
        found: dict[str, str] | None = f.metadata()
        return found


def assert_holds(path: Path, want: Mapping[str, torch.Tensor]) -> None:
    got = load_file(path)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].shape == x.shape, name
        if dtype(x.dtype) in CASTABLE:
            assert_same_values(got[name], x, dtype(x.dtype))
        else:
            assert got[name].dtype == x.dtype, name
            assert bits_of(got[name]).tolist() == bits_of(x).tolist(), name


# --- the same as load, .to(), save ------------------------------------------------------------------------

shapes = st.sampled_from([(), (1,), (3,), (0,), (2, 0, 3), (5, 7), (1, 1, 2, 9), (257,)])


@st.composite
def checkpoints(
    draw: st.DrawFn, of: tuple[DType, ...] = STORABLE, specials_too: bool = True
) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text('ab.é"\\\n0', min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
    found = {}
    for i, name in enumerate(n for n in names if n != "__metadata__"):
        d, shape = draw(st.sampled_from(of)), draw(shapes)
        x = random_tensor(d, shape, draw(st.integers(0, 99)) + i)
        if specials_too and d in CASTABLE and x.numel() and draw(st.booleans()):
            pool = from_bits([b for b in specials(d)], d)  # noqa: C416
            flat = x.reshape(-1)
            at = draw(st.integers(0, flat.numel() - 1))
            flat[at] = pool[draw(st.integers(0, len(pool) - 1))]
            x = flat.reshape(shape)
        found[name] = x
    return found


@PROPERTY
@given(tensors=checkpoints(), to=st.sampled_from(TARGETS), mode=st.sampled_from(["none", "sample", "full"]))
def test_a_file_of_any_dtypes_converts_as_load_cast_and_save_would(
    tmp_path: Path, tensors: dict[str, torch.Tensor], to: DType, mode: Any
) -> None:
    source, output, theirs = tmp_path / "in.safetensors", tmp_path / "out.safetensors", tmp_path / "theirs.safetensors"
    save_file(tensors, source)
    before = source.read_bytes()
    convert(source, to=to, output=output, force=True, **PLAIN, on_overflow="ieee", verify=mode, workers=1)
    want = {n: cast(x, to) for n, x in load_file(source).items()}
    assert_holds(output, want)
    assert source.read_bytes() == before
    save_file(want, theirs, metadata={"format": "pt"})
    assert byte_order(output) == byte_order(theirs) or any(x.numel() == 0 for x in tensors.values())


# an FP64 value rounded twice, a NaN at the end of a vector: there torch's own bytes are not these
ordinary = checkpoints((*(d for d in STORABLE if d.name != "fp64"),), specials_too=False)


@PROPERTY
@given(tensors=ordinary, to=st.sampled_from(TARGETS), workers=st.sampled_from([1, 2]))
def test_the_file_is_byte_for_byte_the_librarys(
    tmp_path: Path, tensors: dict[str, torch.Tensor], to: DType, workers: int
) -> None:
    source, output, theirs = tmp_path / "in.safetensors", tmp_path / "out.safetensors", tmp_path / "theirs.safetensors"
    save_file(tensors, source)
    options = {**PLAIN, "on_overflow": "ieee", "provenance": False}
    convert(source, to=to, output=output, force=True, workers=workers, **options)
    save_file({n: cast(x, to) for n, x in load_file(source).items()}, theirs, metadata={"format": "pt"})
    assert output.read_bytes() == theirs.read_bytes()


def test_an_order_that_is_not_the_librarys_is_kept(tmp_path: Path) -> None:
    names = ["z", "m.1", "a", "m.0"]
    source = write_checkpoint(tmp_path / "in.safetensors", {n: torch.randn(8) for n in names})
    convert(source, to="bf16", output=tmp_path / "out.safetensors")
    assert byte_order(tmp_path / "out.safetensors") == names


# --- workers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many tensors with sizes around the chunk's, of every castable type, specials at their ends and at chunks'."""
    tensors: dict[str, torch.Tensor] = {}
    for i, d in enumerate(CASTABLE):
        step = CHUNK_BYTES // d.itemsize
        pool = from_bits(specials(d), d)
        for j, n in enumerate((1, 63, step - 1, step, step + 1, 2 * step + 65)):
            x = random_tensor(d, (n,), 10 * i + j)
            for at in {0, n - 1, n // 2, min(step, n) - 1, min(step, n - 1)}:
                x[at] = pool[(at + j) % len(pool)]
            tensors[f"{d}.{j}.weight"] = x
        tensors |= {f"{d}.small.{k}": pool[k : k + 5].clone() for k in range(0, len(pool) - 5, 5)}
    tensors["ids"] = random_tensor(dtype("int64"), (300_000,), 1)
    tensors["mask"] = random_tensor(dtype("bool"), (7,), 1)
    path = tmp_path_factory.mktemp("awkward") / "in.safetensors"
    return write_checkpoint(path, tensors, {"a": "1"})


@pytest.mark.parametrize("policy", ["ieee", "clamp", "keep", "bf16"])
def test_any_number_of_workers_writes_the_same_bytes_and_sees_the_same(
    tmp_path: Path, awkward: Path, policy: Any
) -> None:
    # what FP64 and FP32 hold does not all fit BF16 either
    rules = ["fp64.*=keep", "fp32.*=keep"] if policy == "bf16" else []
    outputs, counts = [], []
    for workers in (1, 2, 7):
        output = tmp_path / f"{workers}.safetensors"
        done = convert(awkward, to="fp16", output=output, on_overflow=policy, rule=rules, workers=workers, **PLAIN)
        outputs.append(output.read_bytes())
        counts.append(([t.to_dict() for t in done.tensors], done.findings))
    assert outputs[0] == outputs[1] == outputs[2]
    assert counts[0] == counts[1] == counts[2]
    if policy == "ieee":
        want = {n: x if x.dtype != torch.float64 else None for n, x in load_file(awkward).items()}
        got = load_file(tmp_path / "1.safetensors")
        for name, x in want.items():
            if x is not None:
                target = cast(x, FP16)
                if dtype(target.dtype) in CASTABLE:
                    assert_same_values(got[name], target, dtype(target.dtype))
                else:
                    assert torch.equal(got[name], x)


def test_a_tensor_of_many_chunks_is_cast_whole(tmp_path: Path) -> None:
    n = 5 * CHUNK + 17
    x = torch.arange(n, dtype=torch.float32)
    save_file({"x": x.reshape(1, -1)}, tmp_path / "in.safetensors")
    report = tmp_path / "r.json"
    done = convert(tmp_path / "in.safetensors", to="bf16", verify="full", workers=2, report=report)
    assert torch.equal(load_file(tmp_path / "in.bf16.safetensors")["x"][0], x.bfloat16())
    assert done.verified_bytes == 2 * n
    assert done.stats == Stats(n, zero=1, norms=done.stats.norms)
    assert done.stats.norms is not None
    assert done.stats.norms.square_sum == pytest.approx(n * (n - 1) * (2 * n - 1) / 6, rel=1e-12)


@pytest.mark.parametrize("to", TARGETS, ids=str)
def test_neighbours_of_the_same_size_are_not_taken_for_one(tmp_path: Path, to: DType) -> None:
    """Side by side in the source and in the output, with as many bits before and after, but of other types."""
    order = ["bf16", "fp16", "int16", "bf16", "fp16", "bf16", "int32", "fp32", "uint32", "fp64", "int64", "fp64"]
    tensors = {f"{i:02}": random_tensor(dtype(d), (4, 16), i) for i, d in enumerate(order)}
    source = write_checkpoint(tmp_path / "in.safetensors", tensors)
    done = convert(source, to=to, verify="full")
    assert_holds(Path(str(done.output)), {n: cast(x, to) for n, x in tensors.items()})
    assert byte_order(Path(str(done.output))) == list(tensors)


# --- overflow ---------------------------------------------------------------------------------------------


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """``big`` and ``z.big`` do not fit FP16; ``fits``, ``norm.weight`` and ``ids`` have nothing to do with it."""
    big = torch.ones(CHUNK + 100)
    big[[3, CHUNK, CHUNK + 99]] = torch.tensor([70000.0, -1.2e5, 65520.0])
    tensors = {
        "big": big,
        "fits": torch.full((33,), 65519.0),
        "ids": torch.arange(5),
        "norm.weight": torch.full((4,), 1e6),
        "z.big": torch.tensor([[1e38, -1e38, 1.0]]),
    }
    return write_checkpoint(tmp_path / "in.safetensors", tensors)


def test_overflow_names_every_tensor_and_leaves_nothing(tmp_path: Path, overflowing: Path) -> None:
    before = listing(tmp_path)
    with pytest.raises(NumericError) as e:
        convert(overflowing, to="fp16", workers=2)
    assert listing(tmp_path) == before
    assert str(e.value) == (
        f"{overflowing}: tensor 'big': 3 of {CHUNK + 100} finite values do not fit fp16 "
        "(largest |x| 1.2e+05, limit 65520)\n"
        f"{overflowing}: tensor 'z.big': 2 of 3 finite values do not fit fp16 (largest |x| 1e+38, limit 65520)"
    )
    assert e.value.report is not None
    assert not e.value.report.ok
    assert e.value.report.output is None
    assert {t.name: t.stats.overflow for t in e.value.report.tensors if t.stats.overflow} == {"big": 3, "z.big": 2}


def test_once_a_value_does_not_fit_the_rest_is_only_read(
    tmp_path: Path, overflowing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of writing what will be thrown away, for a large file."""
    written: list[int] = []
    monkeypatch.setattr(PartFile, "write", lambda _self, _data, offset: written.append(offset))
    with pytest.raises(NumericError):
        convert(overflowing, to="fp16", workers=1)
    assert written == [0]  # the header
    written.clear()
    assert convert(overflowing, to="fp16", on_overflow="ieee", workers=1, verify="none").ok
    assert len(written) > 3
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors", "in.fp16.safetensors"}


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_overflow_at_the_very_last_element_leaves_nothing(tmp_path: Path, workers: int) -> None:
    tensors = {f"t{i:02}": torch.ones(CHUNK // 3) for i in range(10)}
    tensors["t09"][-1] = 65520
    source = write_checkpoint(tmp_path / "in.safetensors", tensors)
    before = listing(tmp_path)
    with pytest.raises(NumericError, match="tensor 't09': 1 of"):
        convert(source, to="fp16", workers=workers)
    assert listing(tmp_path) == before
    (tmp_path / "out.safetensors").write_bytes(b"precious")  # nor is an output that is there already touched
    with pytest.raises(NumericError):
        convert(source, to="fp16", output=tmp_path / "out.safetensors", force=True, workers=workers)
    assert listing(tmp_path) == {**before, "out.safetensors": b"precious"}


@pytest.mark.parametrize(("policy", "to"), [("keep", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_pass_writes_what_a_plan_made_so_from_the_start_would(
    tmp_path: Path, overflowing: Path, policy: Any, to: str, workers: int
) -> None:
    amended, planned = tmp_path / "amended.safetensors", tmp_path / "planned.safetensors"
    options: dict[str, Any] = {"on_overflow": policy, "workers": workers, "verify": "full", "provenance": False}
    done = convert(overflowing, to="fp16", output=amended, **options)
    convert(overflowing, to="fp16", output=planned, rule=[f"big={to}", f"z.big={to}"], provenance=False)
    assert amended.read_bytes() == planned.read_bytes()
    items = {i.src.name: (str(i.to), i.why) for i in done.plan.items}
    assert items["big"] == items["z.big"] == (to, "overflow in fp16")
    assert items["fits"] == ("fp16", "target")
    assert items["norm.weight"] == ("fp32", "norm")
    assert [(f.check, f.level, f.tensor) for f in done.findings] == [
        ("overflow", "warning", "big"),
        ("overflow", "warning", "z.big"),
    ]
    assert done.findings[1].text.endswith(f"do not fit fp16 (largest |x| 1e+38, limit 65520); {to} instead")
    assert done.stats.overflow == 0  # in what was written


def test_clamping_writes_the_largest_value(tmp_path: Path, overflowing: Path) -> None:
    done = convert(overflowing, to="fp16", output=tmp_path / "out.safetensors", on_overflow="clamp", verify="full")
    got = load_file(tmp_path / "out.safetensors")
    assert got["z.big"].tolist() == [[65504.0, -65504.0, 1.0]]
    assert got["big"][[3, CHUNK, CHUNK + 99]].tolist() == [65504.0, -65504.0, 65504.0]
    assert [f.text.rpartition("; ")[2] for f in done.warnings] == ["clamped to 65504"] * 2
    assert done.ok


def test_ieee_writes_infinity(tmp_path: Path, overflowing: Path) -> None:
    done = convert(overflowing, to="fp16", output=tmp_path / "out.safetensors", on_overflow="ieee", verify="full")
    got = load_file(tmp_path / "out.safetensors")
    assert got["z.big"].tolist() == [[torch.inf, -torch.inf, 1.0]]
    assert got["big"].isinf().sum() == 3
    assert [f.text.rpartition("; ")[2] for f in done.warnings] == ["now Inf"] * 2


def test_a_policy_whose_dtype_does_not_hold_it_either_refuses(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.tensor([3.4e38, 1.0])})
    before = listing(tmp_path)
    with pytest.raises(NumericError, match=r"tensor 'x': 1 of 2 finite values do not fit bf16"):
        convert(source, to="fp16", on_overflow="bf16")
    assert listing(tmp_path) == before
    assert convert(source, to="fp16", on_overflow="fp32").ok


def test_a_fallback_that_changes_the_size_moves_what_follows(tmp_path: Path) -> None:
    """FP64 kept: four times the bytes that were planned, in the middle of the file."""
    tensors = {f"t{i}": torch.full((1000 + i,), 1.5, dtype=torch.float64) for i in range(5)}
    tensors["t2"][7] = 1e300
    source = write_checkpoint(tmp_path / "in.safetensors", tensors)
    done = convert(source, to="fp16", on_overflow="keep", verify="full")
    assert_holds(Path(str(done.output)), {n: x if n == "t2" else x.half() for n, x in tensors.items()})
    assert done.output_bytes == os.path.getsize(str(done.output))


# --- NaN, Inf, underflow ----------------------------------------------------------------------------------


def test_nan_and_inf_of_the_source_pass_with_a_warning_or_are_refused(tmp_path: Path) -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": x, "kept": x.bfloat16(), "y": torch.ones(2)})
    done = convert(source, to="bf16", output=tmp_path / "out.safetensors", verify="full")
    assert [(f.tensor, f.text) for f in done.warnings] == [
        ("x", "the source holds 1 NaN and 2 Inf among 4 values"),
        ("kept", "the source holds 1 NaN and 2 Inf among 4 values"),
    ]
    assert_holds(tmp_path / "out.safetensors", {"x": x.bfloat16(), "kept": x.bfloat16(), "y": torch.ones(2).bfloat16()})
    (tmp_path / "out.safetensors").unlink()
    before = listing(tmp_path)
    with pytest.raises(NumericError, match="tensor 'x': the source holds 1 NaN") as e:
        convert(source, to="bf16", on_nonfinite="error")
    assert e.value.hint == "accept NaN and Inf of the source (--on-nonfinite warn)"
    assert listing(tmp_path) == before


@pytest.mark.parametrize("place", [0, 5 * CHUNK // 2, 4 * CHUNK + 16])
@pytest.mark.parametrize("reported", [False, True])
def test_shares_are_of_the_whole_tensor_and_not_of_the_chunks_that_stand_out(
    tmp_path: Path, place: int, reported: bool
) -> None:
    n = 4 * CHUNK + 17
    x, y = torch.ones(n), torch.ones(n)
    x[place], y[place] = 7e4, 1e-9
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": x, "y": y})
    options: dict[str, Any] = {"report": tmp_path / "r.json"} if reported else {}
    with pytest.raises(NumericError, match=f"tensor 'x': 1 of {n} finite values do not fit"):
        convert(source, to="fp16", **options)
    done = convert(source, to="fp16", on_overflow="keep", max_underflow=1.5 / n, **options)
    assert [f.text.partition(" (")[0] for f in done.findings] == [f"1 of {n} finite values do not fit fp16"]
    with pytest.raises(NumericError, match=r"tensor 'y': 1 nonzero values \(0\.00%\) become 0 in fp16"):
        convert(source, to="fp16", keep=["x"], force=True, max_underflow=0.5 / n, **options)


def test_too_much_underflow_is_refused(tmp_path: Path) -> None:
    x = torch.full((100,), 0.5)
    x[:5], x[5:10] = 1e-9, 0
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": x})
    before = listing(tmp_path)
    with pytest.raises(NumericError, match=r"5 nonzero values \(5\.26%\) become 0 in fp16, more than 5\.00%"):
        convert(source, to="fp16", max_underflow=0.05)
    assert listing(tmp_path) == before
    done = convert(source, to="fp16", max_underflow=0.06)
    assert [f.check for f in done.warnings] == ["underflow"]
    assert (done.stats.zero, done.stats.underflow) == (5, 5)


# --- verification -----------------------------------------------------------------------------------------


def test_each_verification_reads_what_it_says(tmp_path: Path) -> None:
    n = 10 * readback.WINDOW
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.ones(n), "y": torch.ones(5)})
    for mode, want in (("none", 0), ("full", 2 * (n + 5)), ("sample", 3 * readback.WINDOW // 2 + 10)):
        done = convert(source, to="bf16", output=tmp_path / "out.safetensors", force=True, verify=mode)  # type: ignore[arg-type]
        assert done.verified_bytes == want
        assert done.options["verify"] == mode


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_a_byte_that_changed_on_its_way_is_found_and_nothing_published(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"w": torch.ones(100), "x": torch.ones(50)})
    before = listing(tmp_path)
    write = PartFile.write

    def faulty(self: PartFile, data: memoryview, offset: int) -> None:
        flipped = bytearray(data)
        if len(data) == 300:
            flipped[2 * 107] ^= 1
        write(self, memoryview(flipped), offset)

    monkeypatch.setattr(PartFile, "write", faulty)
    with pytest.raises(VerificationError, match="tensor 'x': element 7 on disk is not the cast") as e:
        convert(source, to="bf16", verify=mode, workers=1)
    assert listing(tmp_path) == before
    assert e.value.report is not None
    assert not e.value.report.ok
    assert convert(source, to="bf16", verify="none", workers=1).ok


# --- the report -------------------------------------------------------------------------------------------

TENSOR_KEYS = {"name", "from", "to", "why", "shape", "nan", "inf", "zero", "overflow", "underflow", "subnormal"}
NORM_KEYS = {"max_abs", "max_abs_error", "square_sum", "square_error_sum", "relative_rms_error"}


def test_the_report_is_versioned_json_with_every_tensor(tmp_path: Path) -> None:
    x = torch.tensor([1.0, 2.0**-24, 1e-9, 0.0, 3.14159])
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": x, "ids": torch.arange(3), "d": torch.ones(2)})
    path = tmp_path / "report.json"
    done = convert(source, to="fp16", rule=["d=drop"], report=path, max_underflow=0.5)
    data = json.loads(path.read_text("ascii"))
    assert data == json.loads(done.to_json()) == json.loads(json.dumps(done.to_dict()))
    assert data.keys() == {
        "schema", "tool", "source", "output", "ok", "options", "source_bytes", "output_bytes", "verified_bytes",
        "seconds", "totals", "to", "metadata", "notes", "warnings", "groups", "dropped", "findings", "files",
        "published", "tensors",
    }  # fmt: skip
    assert data["schema"] == SCHEMA == 1
    assert data["tool"].startswith("precconv ")
    assert (data["source"], data["output"], data["ok"]) == (str(source), str(tmp_path / "in.fp16.safetensors"), True)
    assert data["output_bytes"] == os.path.getsize(data["output"])
    assert data["source_bytes"] == os.path.getsize(source)
    assert data["options"] == {
        "to": "fp16",
        "preset": "auto",
        "norms": "fp32",
        "mixed": "keep",
        "rules": [{"match": "d", "to": "drop"}],
        "on_overflow": "error",
        "on_nonfinite": "warn",
        "max_underflow": 0.5,
        "rounding": "nearest",
        "seed": None,
        "verify": "sample",
        "weights": "auto",
        "select": None,
        "strip_wrappers": False,
        "shared": "clone",
        "provenance": True,
    }
    assert data["totals"] == {
        "n": 8, "nan": 0, "inf": 0, "zero": 1, "overflow": 0, "underflow": 1, "subnormal": 1,
    }  # fmt: skip
    assert [d["name"] for d in data["dropped"]] == ["d"]
    row, ids = data["tensors"]
    assert row.keys() == TENSOR_KEYS | NORM_KEYS
    assert ids.keys() == TENSOR_KEYS
    assert (row["from"], row["to"], row["why"], row["shape"]) == ("fp32", "fp16", "target", [5])
    error = x.half().double() - x.double()
    assert row["max_abs"] == x.max().item()
    assert row["max_abs_error"] == error.abs().max().item()
    assert row["square_error_sum"] == pytest.approx(float((error**2).sum()), rel=1e-12)
    assert data["findings"] == [
        {
            "check": "underflow",
            "level": "warning",
            "tensor": "x",
            "text": "1 nonzero values (25.00%) become 0 in fp16",
        }
    ]


def test_a_refusal_writes_the_report_and_nothing_else(tmp_path: Path, overflowing: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(NumericError) as e:
        convert(overflowing, to="fp16", report=path)
    data = json.loads(path.read_text())
    assert e.value.report is not None
    assert data == e.value.report.to_dict()
    assert (data["ok"], data["output"], data["verified_bytes"]) == (False, None, 0)
    assert [f["level"] for f in data["findings"]] == ["error", "error"]
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors", "report.json"}


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.full((9,), 1e200, dtype=torch.float64)})
    convert(source, to="fp32", keep=["x"], report=tmp_path / "r.json")
    row = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["tensors"][0]
    assert (row["max_abs"], row["square_sum"], row["relative_rms_error"]) == (1e200, None, 0.0)


@pytest.mark.parametrize(
    "name", ["in.safetensors", "link.safetensors", "out.safetensors", "sub/../out.safetensors", "sub", "none/r.json"]
)
def test_a_report_is_refused_where_it_would_replace_a_checkpoint_or_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.ones(3)})
    (tmp_path / "link.safetensors").symlink_to(source)
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(OutputError) as e:
        convert(source, to="bf16", output=tmp_path / "out.safetensors", report=f"{tmp_path}/{name}")
    assert e.value.hint is not None
    assert {p.name for p in tmp_path.iterdir()} == before


def test_a_report_that_cannot_be_written_stops_the_output_from_appearing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import precconv.report as module

    def full(*_: object) -> None:
        raise OutputError("cannot be written: no space left on device")

    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.ones(3)})
    before = listing(tmp_path)
    monkeypatch.setattr(module.Report, "to_json", full)
    with pytest.raises(OutputError, match="no space left"):
        convert(source, to="bf16", report=tmp_path / "r.json")
    assert listing(tmp_path) == before


def test_an_output_that_cannot_appear_has_no_report(tmp_path: Path) -> None:
    """Somebody else took the name while the conversion ran."""
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.ones(3)})
    output = tmp_path / "out.safetensors"

    def progress(*_: int) -> None:
        output.write_bytes(b"theirs")

    with pytest.raises(OutputError, match="exists"):
        convert(source, to="bf16", output=output, report=tmp_path / "r.json", progress=progress)
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors"}
    assert output.read_bytes() == b"theirs"


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names are Unicode there")
def test_a_name_that_is_not_unicode_does_not_stop_the_report(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / os.fsdecode(b"in\xff.safetensors"), {"x": torch.ones(3)})
    convert(source, to="bf16", output=tmp_path / "out.safetensors", report=tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["source"] == str(source)


# --- metadata and names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "want"),
    [
        (None, {"format": "pt"}),
        ({"format": "tf"}, {"format": "tf"}),
        ({"b": "", "a": '"\\\n\x1b\x00é😀'}, {"b": "", "a": '"\\\n\x1b\x00é😀', "format": "pt"}),
    ],
)
def test_metadata_is_kept_word_for_word_and_says_pt_where_it_said_nothing(
    tmp_path: Path, given_: dict[str, str] | None, want: dict[str, str]
) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.ones(3)}, given_)
    convert(source, to="bf16", output=tmp_path / "out.safetensors")
    found = metadata(tmp_path / "out.safetensors") or {}
    assert found.pop(KEY)
    assert found == want


@pytest.mark.parametrize(
    ("name", "to", "want"),
    [
        ("model.safetensors", "bf16", "model.bf16.safetensors"),
        ("model.safetensors", "float16", "model.fp16.safetensors"),
        ("model.fp32.safetensors", "bf16", "model.bf16.safetensors"),
        ("model.FP16.safetensors", "bf16", "model.bf16.safetensors"),
        ("model.float.safetensors", "half", "model.fp16.safetensors"),
        ("v1.5-pruned.safetensors", "fp16", "v1.5-pruned.fp16.safetensors"),
        ("model-00001-of-00002.safetensors", "bf16", "model-00001-of-00002.bf16.safetensors"),
        ("model.sft", "bf16", "model.bf16.sft"),
        ("model", "bf16", "model.bf16.safetensors"),
        ("fp32.safetensors", "bf16", "fp32.bf16.safetensors"),
    ],
)
def test_the_output_is_named_after_the_source_and_the_target(tmp_path: Path, name: str, to: str, want: str) -> None:
    source = write_checkpoint(tmp_path / name, {"x": torch.ones(3, dtype=torch.float64)})
    assert convert(source, to=to).output == str(tmp_path / want)
    (tmp_path / "out").mkdir()
    assert convert(source, to=to, output=tmp_path / "out").output == str(tmp_path / "out" / want)
    assert {p.name for p in tmp_path.iterdir()} == {name, want, "out"}


def test_an_output_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"x": torch.ones(3)})
    (tmp_path / "in.bf16.safetensors").write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists") as e:
        convert(source, to="bf16")
    assert e.value.hint == "replace it with --force, or give another name with -o"
    assert (tmp_path / "in.bf16.safetensors").read_bytes() == b"precious"
    assert convert(source, to="bf16", force=True).ok
    assert load_file(tmp_path / "in.bf16.safetensors")["x"].dtype == torch.bfloat16


# --- sizes at the edge ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_tensors_without_elements_and_with_one_are_kept(tmp_path: Path, workers: int) -> None:
    tensors = {
        "empty": torch.empty(0),
        "flat": torch.empty(3, 0, 2, dtype=torch.float64),
        "none.ids": torch.empty(0, dtype=torch.int32),
        "one": torch.tensor([1.5]),
        "scalar": torch.tensor(1e9),
    }
    source = write_checkpoint(tmp_path / "in.safetensors", tensors)
    done = convert(source, to="fp16", verify="full", workers=workers, report=tmp_path / "r.json")
    assert_holds(Path(str(done.output)), {n: cast(x, FP16) for n, x in tensors.items()})
    assert [t.stats.n for t in done.tensors] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_file_of_empty_tensors_alone_is_converted(tmp_path: Path, workers: int) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"a": torch.empty(0), "b": torch.empty(2, 0)})
    calls: list[tuple[int, int]] = []
    done = convert(source, to="fp16", workers=workers, progress=lambda *c: calls.append(c))
    assert_holds(Path(str(done.output)), {"a": torch.empty(0).half(), "b": torch.empty(2, 0).half()})
    assert all(c == (0, 0) for c in calls)


def test_dropping_everything_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"a": torch.ones(1)})
    with pytest.raises(UsageError, match="the rules drop every tensor"):
        convert(source, to="fp16", rule=["*=drop"])
    with pytest.raises(UsageError, match="the rules drop every tensor"):
        plan(source, to="fp16", rule=["*=drop"])


@pytest.mark.parametrize("d", [d for d in DTYPES if d not in CASTABLE], ids=str)
def test_every_type_that_is_not_cast_passes_byte_for_byte(tmp_path: Path, d: DType) -> None:
    """Also those that torch has not: the file is written by hand."""
    import struct

    raw = bytes(range(48))
    header = json.dumps(
        {
            "q": {"dtype": d.code, "shape": [48 * 8 // d.bits], "data_offsets": [0, 48]},
            "w": {"dtype": "F32", "shape": [2], "data_offsets": [48, 56]},
        }
    ).encode()
    source = tmp_path / "in.safetensors"
    source.write_bytes(struct.pack("<Q", len(header)) + header + raw + struct.pack("<2f", 1, 2))
    done = convert(source, to="bf16", verify="full")
    data = Path(str(done.output)).read_bytes()
    assert raw in data
    assert len(data) - data.index(raw) in (48, 52)
    assert done.plan.items[0].why == f"{d} is not cast"


# --- progress ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", ["none", "sample", "full"])
@pytest.mark.parametrize("policy", ["ieee", "keep"])
def test_progress_grows_to_exactly_its_total(overflowing: Path, workers: int, mode: Any, policy: Any) -> None:
    calls: list[tuple[int, int]] = []
    convert(
        overflowing, to="fp16", on_overflow=policy, verify=mode, workers=workers, progress=lambda *c: calls.append(c)
    )
    done, totals = [c[0] for c in calls], [c[1] for c in calls]
    assert done == sorted(done)
    assert totals == sorted(totals)
    assert all(d <= t for d, t in calls)
    assert done[-1] == totals[-1]
    source = sum(i.src.nbytes for i in plan(overflowing, to="fp16").items)
    assert totals[0] >= source
    assert (totals[0] == source) == (mode == "none")
    assert (totals[0] == totals[-1]) == (policy == "ieee")  # unless a second pass was needed, known from the start


class Stop(Exception):  # noqa: N818  nothing of precconv's, nor an error of the system's
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("at", ["first", "last"])
def test_what_the_callback_raises_arrives_and_nothing_is_left(
    tmp_path: Path, overflowing: Path, error: type[BaseException], workers: int, at: str
) -> None:
    before = listing(tmp_path)

    def progress(done: int, total: int) -> None:
        if at == "first" or done == total:
            raise error("from the callback")

    with pytest.raises(error, match="from the callback") as e:
        convert(overflowing, to="fp16", on_overflow="keep", workers=workers, progress=progress)
    assert not isinstance(e.value, PrecconvError)
    assert listing(tmp_path) == before


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_a_gigabyte_is_converted_in_a_quarter_of_it(tmp_path: Path) -> None:
    import struct

    size = 1 << 30
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    source = tmp_path / "in.safetensors"
    with source.open("wb") as f:  # sparse: a gigabyte of zeros
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(8 + len(header) + size)
    code = """
        import resource, sys, torch
        unit = 1 if sys.platform == "darwin" else 1024
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        before = peak()
        import precconv
        done = precconv.convert(sys.argv[1], to="bf16", workers=2)
        assert done.stats.zero == 1 << 28
        print(peak() - before)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(source)], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) <= 256 << 20
    source.unlink()
    (tmp_path / "in.bf16.safetensors").unlink()
