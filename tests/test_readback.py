"""A damaged output is found before it gets its name, and the finding says where."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import precconv
from fixtures import build, make
from precconv.checks import OnOverflow
from precconv.cli import cli
from precconv.dtypes import BF16, FP32, dtype
from precconv.fileio import PartFile
from precconv.formats import Place
from precconv.plan import Item
from precconv.readback import WINDOW, VerifyMode, sample_chunks
from precconv.runs import CHUNK_BYTES, make_runs
from precconv.tensors import TensorInfo

from .processes import tree

#: (offset in the file, the bytes to write there) to the bytes that are written instead.
Damage = Callable[[int, bytes], bytes]


@contextmanager
def damaged(damage: Damage) -> Iterator[None]:
    """Let every write of a checkpoint go wrong: what a bad disk, cable or bit of memory does."""
    write = PartFile.write

    def wrong(part: PartFile, buffer: memoryview, offset: int) -> None:
        if part.final.suffix == ".safetensors":
            buffer = memoryview(damage(offset, bytes(buffer)))
        write(part, buffer, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartFile, "write", wrong)
        yield


def flip(position: int, mask: int = 1, length: int = 1) -> Damage:
    """Flip the bits of ``mask`` in ``length`` bytes of the file."""

    def damage(offset: int, data: bytes) -> bytes:
        changed = bytearray(data)
        for at in range(max(position, offset), min(position + length, offset + len(data))):
            changed[at - offset] ^= mask
        return bytes(changed)

    return damage


def in_header(old: str, new: str) -> Damage:
    """Write another text of the same length in the header."""
    assert len(old) == len(new)

    def damage(offset: int, data: bytes) -> bytes:
        return data if offset else data.replace(old.encode(), new.encode())

    return damage


def mixed(path: Path) -> Path:
    """Small tensors of several kinds, cast and kept, with an empty one and a scalar among them."""
    path.write_bytes(
        build.file_of(
            [
                ("a.weight", "F32", (5, 8), build.f32(*range(1, 41))),
                ("b.weight", "F32", (8, 5), build.f32(*range(2, 42))),
                ("norm.weight", "F32", (4,), build.f32(*range(1, 5))),
                ("none", "F32", (0, 3), b""),
                ("ids", "I64", (3,), struct.pack("<3q", 7, 8, 9)),
                ("wide", "F64", (3,), build.f64(1, 2, 3)),
                ("half", "BF16", (4,), bytes(range(8))),
                ("scale", "F32", (), build.f32(2)),
                ("mask", "BOOL", (3,), bytes((1, 0, 1))),
            ],
            {"format": "pt", "note": "kept"},
        )
    )
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed(tmp_path_factory.mktemp("verify") / "m.safetensors")


@pytest.fixture(scope="module")
def wanted(source: Path) -> Path:
    """The whole output."""
    out = source.with_name("wanted.safetensors")
    precconv.convert(source, to="bf16", output=out)
    return out


def refused(source: Path, damage: Damage, **options: VerifyMode | int) -> precconv.VerificationError:
    """Convert while writes go wrong; the error, after nothing was left behind."""
    out = source.with_name("out.safetensors")
    before = tree(source.parent)
    with damaged(damage), pytest.raises(precconv.VerificationError) as caught:
        precconv.convert(source, to="bf16", output=out, **options)  # type: ignore[arg-type]
    assert tree(source.parent) == before
    assert caught.value.path == out
    return caught.value


def test_damage_is_published_when_nothing_is_verified(source: Path, wanted: Path) -> None:
    out = source.with_name("unverified.safetensors")
    last = wanted.stat().st_size - 1
    with damaged(flip(last)):
        precconv.convert(source, to="bf16", output=out, verify="none")
    assert out.read_bytes() == flip(last)(0, wanted.read_bytes()) != wanted.read_bytes()
    out.unlink()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), workers=st.sampled_from([1, 1, 1, 2]))
@example(at=0.0, mask=1, workers=1)
@example(at=1 - 2**-53, mask=128, workers=1)
@pytest.mark.parametrize("verify", ["full", "sample"])
def test_any_single_wrong_byte_of_a_small_file_is_found(
    source: Path, wanted: Path, verify: VerifyMode, at: float, mask: int, workers: int
) -> None:
    refused(source, flip(int(at * wanted.stat().st_size), mask), verify=verify, workers=workers)


def test_any_wrong_byte_of_a_header_is_found_even_where_the_library_does_not_look(source: Path, wanted: Path) -> None:
    data = wanted.read_bytes()
    assert b'"note":"kept"' in data
    error = refused(source, in_header('"note":"kept"', '"note":"lost"'), verify="sample")
    assert re.fullmatch(r"byte \d+, outside the tensor data, is not what was written", error.message)
    error = refused(source, in_header("} ", "}\n"), verify="sample")  # its padding
    assert re.fullmatch(r"byte \d+, outside the tensor data, is not what was written", error.message)


@pytest.mark.parametrize("verify", ["full", "sample"])
@pytest.mark.parametrize(("old", "new", "tensor", "sentence"), [
    ('"a.weight":{"dtype":"BF16"', '"a.weight":{"dtype":"F16" ', "a.weight",
     "planned as BF16 [5, 8], the safetensors library finds F16 [5, 8]"),
    ('"dtype":"BF16","shape":[5,8]', '"dtype":"BF16","shape":[8,5]', "a.weight",
     "planned as BF16 [5, 8], the safetensors library finds BF16 [8, 5]"),
    ('"ids"', '"idz"', "ids", "planned as I64 [3], the safetensors library finds nothing"),
    ('"shape":[0,3]', '"shape":[3,0]', "none", "planned as BF16 [0, 3], the safetensors library finds BF16 [3, 0]"),
    ('"BOOL"', '"BOOM"', None, "the safetensors library refuses the output: "),
])  # fmt: skip
def test_a_header_that_says_something_else_is_found_with_both_sides(
    source: Path, verify: VerifyMode, old: str, new: str, tensor: str | None, sentence: str
) -> None:
    error = refused(source, in_header(old, new), verify=verify)
    assert error.message.startswith(sentence)
    assert error.tensor == tensor


def swapped(offset: int, data: bytes) -> bytes:
    """Exchange two tensors of one shape in the header."""
    if offset:
        return data
    return data.replace(b'"q.weight"', b'"?.weight"').replace(b'"k.weight"', b'"q.weight"').replace(b'"?.', b'"k.')


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_two_tensors_that_changed_places_in_the_header_are_found(tmp_path: Path, verify: VerifyMode) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build.file_of([(n, "F32", (4,), build.f32(1, 2, 3, 4)) for n in ("k.weight", "q.weight")]))
    error = refused(path, swapped, verify=verify)
    assert error.message == "its tensors are not those planned, in the planned order"


def test_the_error_names_the_tensor_and_the_element_and_carries_the_report(source: Path, wanted: Path) -> None:
    for info in precconv.inspect(wanted):
        for element in range(info.numel):
            error = refused(source, flip(info.offset + element * info.dtype.itemsize), verify="full", workers=1)
            at = element if info.dtype.is_castable else element * info.dtype.itemsize
            unit = "element" if info.dtype.is_castable else "byte"
            assert error.tensor == info.name
            assert error.message == f"{unit} {at} on disk is not the cast of the source"
    assert error.exit_code == 4
    assert error.report is not None
    assert (error.report.ok, error.report.output) == (False, None)


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_every_tensor_is_looked_at(tmp_path: Path, verify: VerifyMode) -> None:
    """Each in turn is wrong all over, small ones and those larger than all of their samples."""
    source, out = tmp_path / "m.safetensors", tmp_path / "wanted.safetensors"
    sizes = {"tiny": 3, "large": 200_000, "small": 40_000, "larger": 300_000, "one": 1, "exact": 3 * WINDOW // 4}
    source.write_bytes(build.file_of([(n, "F32", (s,), build.f32(1.5) * s) for n, s in sizes.items()]))
    precconv.convert(source, to="bf16", output=out)
    infos = precconv.inspect(out).tensors
    assert [t.name for t in infos] == [*sizes]
    for info in infos:
        error = refused(source, flip(info.offset, 1, info.nbytes), verify=verify, workers=1)
        assert error.tensor == info.name
        assert error.message.startswith("element 0 ")


@pytest.mark.parametrize("place", ["first", "last", "edge of the start", "edge of the end"])
def test_a_sample_looks_at_both_ends_of_a_large_tensor(tmp_path: Path, place: str) -> None:
    source, size = tmp_path / "m.safetensors", 300_000
    source.write_bytes(build.file_of([("w", "F32", (size,), build.f32(1.5) * size)]))
    precconv.convert(source, to="bf16", output=tmp_path / "wanted.safetensors")
    (info,) = precconv.inspect(tmp_path / "wanted.safetensors")
    window = WINDOW // 4
    element = {"first": 0, "last": size - 1, "edge of the start": window - 1, "edge of the end": size - window}[place]
    error = refused(source, flip(info.offset + 2 * element), verify="sample")
    assert (error.tensor, error.message.split(" on ")[0]) == ("w", f"element {element}")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_a_write_that_never_reached_the_disk_is_found(tmp_path: Path, workers: int) -> None:
    source, size = tmp_path / "m.safetensors", 3 * CHUNK_BYTES // 4
    source.write_bytes(build.file_of([("w", "F32", (size,), build.f32(1.5) * size)]))

    def lost(offset: int, data: bytes) -> bytes:
        return b"" if CHUNK_BYTES // 2 < offset < CHUNK_BYTES else data

    error = refused(source, lost, verify="full", workers=workers)
    assert error.message.startswith(f"element {CHUNK_BYTES // 4} ")


@pytest.mark.parametrize("policy", ["keep", "fp32", "bf16", "clamp", "ieee"])
@pytest.mark.parametrize("verify", ["full", "sample"])
def test_values_that_overflowed_are_verified_as_the_policy_left_them(
    tmp_path: Path, policy: OnOverflow, verify: VerifyMode
) -> None:
    source, out = make.ROOT / "numeric/overflow-fp16.safetensors", tmp_path / "wanted.safetensors"
    report = precconv.convert(source, to="fp16", output=out, on_overflow=policy, verify=verify)
    data = out.read_bytes()
    infos = precconv.inspect(out).tensors
    assert report.verified_bytes == sum(t.nbytes for t in infos)
    for position in range(infos[0].offset, len(data)):
        with damaged(flip(position, 4)), pytest.raises(precconv.VerificationError):
            precconv.convert(
                source, to="fp16", output=tmp_path / "out.safetensors", on_overflow=policy, verify=verify, workers=1
            )
    assert tree(tmp_path).keys() == {"wanted.safetensors"}


@pytest.mark.parametrize("output", [None, "-o"])
def test_the_command_ends_with_exit_code_4_and_one_sentence(source: Path, wanted: Path, output: str | None) -> None:
    out = source.with_name("cli.safetensors" if output else "m.bf16.safetensors")
    report = source.with_name("report.json")
    args = [str(source), "--to", "bf16", "--report", str(report), *([output, str(out)] if output else [])]
    with damaged(flip(wanted.stat().st_size - 1)):
        result = CliRunner().invoke(cli, args)
    assert result.exit_code == 4
    assert result.stdout == ""
    sentence = rf"error: {re.escape(str(out))}: tensor 'mask': byte 2 on disk is not the cast of the source"
    assert re.match(sentence, result.stderr)
    assert not out.exists()
    assert json.loads(report.read_text())["ok"] is False
    report.unlink()


def test_an_existing_output_survives_a_verification_that_fails(source: Path, wanted: Path) -> None:
    out = source.with_name("old.safetensors")
    out.write_bytes(b"old")
    with damaged(flip(wanted.stat().st_size - 1)), pytest.raises(precconv.VerificationError):
        precconv.convert(source, to="bf16", output=out, force=True)
    assert out.read_bytes() == b"old"
    out.unlink()


# Which chunks a sample takes


_SIZES = st.lists(
    st.tuples(
        st.sampled_from([FP32, BF16, dtype("int64"), dtype("uint8")]),
        st.one_of(st.integers(0, 40), st.integers(0, 400_000), st.sampled_from([3 * WINDOW // 4, 3 * WINDOW // 4 + 1])),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(sizes=_SIZES)
def test_a_sample_is_in_order_in_bounded_chunks_and_holds_small_tensors_whole_and_large_ones_in_part(
    sizes: list[tuple[precconv.DType, int]],
) -> None:
    items, places, at, out = [], [], 0, 0
    for n, (kind, count) in enumerate(sizes):
        info = TensorInfo(f"t{n}", kind, (count,), at, count * kind.itemsize)
        items.append(Item(info, BF16 if kind is FP32 else kind, "target"))
        places.append(Place(info, items[-1].to, out, (n,)))
        at, out = at + info.nbytes, out + items[-1].nbytes
    runs = make_runs(places)
    seen: dict[int, list[tuple[int, int]]] = {n: [] for n in range(len(items))}
    end = 0
    for chunk in sample_chunks(runs, lambda key: items[key].src.name):
        assert chunk.src_offset >= end
        assert 0 < chunk.src_bytes <= CHUNK_BYTES
        end = chunk.src_offset + chunk.src_bytes
        for key, info in enumerate(i.src for i in items):
            first, last = max(info.offset, chunk.src_offset), min(info.offset + info.nbytes, end)
            if first < last:
                seen[key].append((first - info.offset, last - info.offset))
    for key, parts in seen.items():
        info = items[key].src
        total = sum(b - a for a, b in parts)
        if info.nbytes <= 3 * WINDOW:
            assert total == info.nbytes
        else:
            assert parts[0][0] == 0
            assert parts[-1][1] == info.nbytes
            assert 2 * WINDOW <= total <= 3 * WINDOW
