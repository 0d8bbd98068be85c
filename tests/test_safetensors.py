"""safetensors in and out, against the format's own library: what is accepted, what is refused, what is written."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import precconv
from fixtures import broken, build, make
from precconv.dtypes import CASTABLE, DTYPES, DType, by_code
from precconv.fileio import InputFile
from precconv.formats import Layout, Source
from precconv.formats import safetensors as fmt
from precconv.provenance import KEY
from precconv.tensors import TensorInfo

from .processes import assert_refused, posix, run, tree

HOSTILE = list(broken.hostile())
GOOD = [f for maker in (make.good, make.numeric) for f in maker()]

#: What both sides say of a file: (name, dtype code, shape) in the order of the bytes, and the metadata.
View = tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, str]]


def library_view(path: Path) -> View | None:
    """The library's view of a file; None when it refuses it."""
    try:
        with safe_open(path, framework="pt") as f:
            names = f.offset_keys()
            parts = [(name, f.get_slice(name)) for name in names]
            return [(n, p.get_dtype(), tuple(p.get_shape())) for n, p in parts], f.metadata() or {}
    except SafetensorError:
        return None


def our_view(path: Path) -> View:
    found = precconv.inspect(path)
    return [(t.name, t.dtype.code, t.shape) for t in found], dict(found.metadata)


def by_name(view: View) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, str]]:
    """Without the order, which the library leaves to chance among tensors at one offset."""
    return sorted(view[0]), view[1]


# The whole format, rule by rule


@pytest.mark.parametrize("fixture", HOSTILE, ids=lambda f: Path(f.path).stem)
def test_a_hostile_file_gives_its_error_and_its_sentence(fixture: build.Fixture, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(fixture.data)
    with pytest.raises(precconv.InputError) as caught:
        precconv.inspect(path)
    assert fixture.error == type(caught.value).__name__
    assert fixture.message is not None
    assert re.search(fixture.message, caught.value.message)
    assert str(caught.value) == f"{path}: {caught.value.message}"
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 700


@posix
@pytest.mark.parametrize("fixture", HOSTILE, ids=lambda f: Path(f.path).stem)
def test_converting_a_hostile_file_fails_in_bounded_time_and_memory_and_writes_nothing(
    fixture: build.Fixture, tmp_path: Path
) -> None:
    (tmp_path / "m.safetensors").write_bytes(fixture.data)
    before = tree(tmp_path)
    done = run("m.safetensors", "--to", "bf16", "--force", cwd=tmp_path, limits="AS=300000000 CPU=30")
    assert_refused(done, 1, "error: m.safetensors: ")
    assert fixture.message is not None
    assert re.search(fixture.message, done.stderr.splitlines()[0].removeprefix("error: m.safetensors: "))
    assert tree(tmp_path) == before


@posix
def test_a_shape_of_very_many_huge_dimensions_is_refused_without_computing_their_product(tmp_path: Path) -> None:
    shape = ",".join(["18446744073709551615"] * 200_000)
    header = f'{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}}}'
    (tmp_path / "m.safetensors").write_bytes(build.raw(header, bytes(4)))
    done = run("inspect", "m.safetensors", cwd=tmp_path, limits="CPU=30")
    assert_refused(done, 1, "tensor 'a' has a shape whose size overflows")


@posix
def test_a_length_near_the_limit_reserves_no_memory_for_what_the_file_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build.raw("{}", length=99_999_999))
    os.truncate(path, 1000)
    assert_refused(run("inspect", path, cwd=tmp_path, limits="AS=100000000"), 1, "truncated")


#: The library takes these files, precconv refuses them; each is a fixture.
STRICTER = {
    "name-twice",
    "name-twice-escaped",
    "metadata-key-twice",
    "entry-list",
    "header-leading-space",
    "header-leading-newline",
}


@pytest.mark.parametrize("fixture", HOSTILE, ids=lambda f: Path(f.path).stem)
def test_the_library_refuses_every_hostile_file_but_those_where_precconv_is_stricter(
    fixture: build.Fixture, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(fixture.data)
    assert (library_view(path) is not None) == (Path(fixture.path).stem in STRICTER)


@pytest.mark.parametrize("fixture", GOOD, ids=lambda f: Path(f.path).stem)
def test_a_good_file_reads_as_the_library_reads_it(fixture: build.Fixture, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(fixture.data)
    theirs = library_view(path)
    assert theirs is not None
    assert by_name(our_view(path)) == by_name(theirs)


def test_the_tensors_of_a_file_lie_where_their_infos_say() -> None:
    path = make.ROOT / "good/source-order.safetensors"
    data = path.read_bytes()
    tensors = {t[0]: t for t in make.every_dtype()}
    for info in precconv.inspect(path):
        assert data[info.offset : info.offset + info.nbytes] == tensors[info.name][3]


def test_unknown_keys_of_an_entry_are_noted_and_not_refused() -> None:
    found = precconv.inspect(make.ROOT / "good/unknown-keys.safetensors")
    assert found.notes == ("unknown keys in its header are not carried over: 'note', 'stride'",)


def test_opening_100_000_tensors_costs_three_reads_and_work_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precconv import fileio

    reads: list[int] = []
    read = fileio._Positional.read

    def counted(file: fileio._Positional, view: memoryview, offset: int) -> int:
        reads.append(offset)
        return read(file, view, offset)

    monkeypatch.setattr(fileio._Positional, "read", counted)

    def calls(n: int) -> int:
        path = tmp_path / f"{n}.safetensors"
        path.write_bytes(build.file_of([(f"layers.{i}.w", "F32", (1, 1), bytes(4)) for i in range(n)]))
        count = 0

        def profile(_frame: FrameType, event: str, _arg: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        reads.clear()
        sys.setprofile(profile)
        try:
            reader = precconv.open_checkpoint(path)
        finally:
            sys.setprofile(None)
        with reader:
            assert len(reader.infos) == n
        assert len(reads) == 3  # what tells the format, the length, the header
        return count

    assert calls(100_000) <= 101 * calls(1000)


# Mutated headers


def outcome(path: Path) -> View | precconv.InputError:
    try:
        return our_view(path)
    except precconv.InputError as e:
        return e


class _DuplicateError(Exception): ...


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise _DuplicateError
    return dict(pairs)


def is_stricter(data: bytes) -> bool:
    """Whether a file that the library takes breaks a rule that precconv adds: the documented list, and no other."""
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length]
    if header[:1] in (b" ", b"\t", b"\n", b"\r"):
        return True
    try:
        found = json.loads(header, object_pairs_hook=_no_duplicates)
    except _DuplicateError:
        return True
    entries = [entry for name, entry in found.items() if name != "__metadata__"]
    return any(not isinstance(e, dict) or not isinstance(e["dtype"], str) for e in entries)


def compare(path: Path, data: bytes) -> None:
    """The library and precconv agree on a file, down to names, dtypes, shapes and metadata."""
    path.write_bytes(data)
    theirs, ours = library_view(path), outcome(path)
    if theirs is None:
        assert isinstance(ours, precconv.InputError), f"the library refuses it, precconv finds {ours}"
    elif isinstance(ours, precconv.InputError):
        assert is_stricter(data), f"the library finds {theirs}, precconv says: {ours}"
    else:
        assert by_name(ours) == by_name(theirs)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


_NUMBERS = st.sampled_from(
    ["0", "1", "2", "4", "8", "-0", "-1", "00", "1.0", "1e0", "0.5", "true", "null", '"1"', "[]", "{}", "NaN", "1e999",
     "-1e999", "4294967296", "9223372036854775808", "18446744073709551615", "18446744073709551616", "9" * 308,
     "9" * 309, "9" * 5000]
)  # fmt: skip
_SMALL = st.sampled_from(["0", "1", "2", "3", "4", "8"])
_LISTS = st.lists(st.one_of(_SMALL, _SMALL, _SMALL, _NUMBERS), max_size=4).map(lambda v: f"[{','.join(v)}]")
_ODD = st.sampled_from(
    ["null", "1", '""', "{}", "[]", "[[]]", '{"F32":null}', "[" * 125 + "]" * 125, "[" * 126 + "]" * 126]
)
_DTYPE = st.sampled_from([*(f'"{d.code}"' for d in DTYPES), '"F31"', '"f32"', '{"F32":null}', "null", "0"])
_STRINGS = st.sampled_from(
    ['"a"', '"b"', r'"\u0061"', '"dtype"', '"__metadata__"', '""', r'"\ud800"', r'"\ud83e\udd17"', r'"\udd17\ud83e"',
     r'"\x"', '"\\\\ud800"', '"\t"', '"é"', r'"\u0000"', '"layer-0"', "a", "'a'"]
)  # fmt: skip
_SPACE = st.sampled_from(["", "", "", " ", "\n", "\r\t", "\f", "\0", "\ufeff", "//", "\u00a0"])


@st.composite
def entries(draw: st.DrawFn, at: int) -> tuple[str, int]:
    """An entry that starts at ``at``, most of the time a valid one, and where it ends."""
    dtype = draw(st.sampled_from([d for d in DTYPES if d.bits >= 8]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = dtype.itemsize
    for d in shape:
        size *= d
    pairs = {"dtype": f'"{dtype.code}"', "shape": json.dumps(shape), "data_offsets": f"[{at},{at + size}]"}
    broken_key = draw(st.sampled_from([None, None, None, *pairs]))
    if broken_key is not None:
        pairs[broken_key] = draw(st.one_of(_LISTS, _ODD, _DTYPE))
    items = list(pairs.items())
    if draw(st.integers(0, 4)) == 0:
        items.append(("x", draw(st.one_of(_NUMBERS, _ODD, _LISTS, _STRINGS))))
    if draw(st.integers(0, 9)) == 0:
        items.append(draw(st.sampled_from(items)))
    if draw(st.integers(0, 9)) == 0:
        items.remove(draw(st.sampled_from(items)))
    order = draw(st.permutations(items))
    if draw(st.integers(0, 19)) == 0:
        return f"[{','.join(v for _, v in items)}]", at + size
    space = draw(_SPACE)
    return "{" + f",{space}".join(f'"{k}":{space}{v}' for k, v in order) + "}", at + size


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Files that are nearly right: some valid, most wrong in one place."""
    at, members = 0, []
    for name in draw(st.lists(st.sampled_from("abcdé"), max_size=4)):
        text, at = draw(entries(at))
        members.append(f"{draw(_STRINGS) if draw(st.integers(0, 9)) == 0 else json.dumps(name)}:{text}")
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(_STRINGS, st.one_of(_STRINGS, _NUMBERS)), max_size=2))
        value = "{" + ",".join(f"{k}:{v}" for k, v in pairs) + "}"
        members.append(f'"__metadata__":{draw(st.one_of(st.just(value), st.just("{}"), _ODD))}')
    header = "{" + ",".join(draw(st.permutations(members))) + "}"
    if draw(st.integers(0, 4)) == 0:
        header = draw(_SPACE) + header + draw(_SPACE)
    length = len(header.encode()) + draw(st.sampled_from([0] * 12 + [-1, 1, 2**63]))
    return build.raw(header, bytes(max(0, at + draw(st.sampled_from([0] * 9 + [-1, 1])))), length=max(0, length))


#: An empty tensor at the place of another one, named after it in the header.
EMPTY_AFTER = (
    '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
)


@settings(max_examples=500, deadline=None)
@given(data=files())
@example(data=build.raw('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'))
@example(data=build.raw('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":-0}}'))
@example(data=build.raw(EMPTY_AFTER, bytes(4)))
@example(data=build.raw('{"a-0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'))
@example(data=build.raw('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":' + "9" * 309 + "}}"))
@example(data=build.raw('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":' + "[" * 126 + "]" * 126 + "}}"))
@example(data=build.raw('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":' + "[" * 125 + "]" * 125 + "}}"))
@example(data=build.raw('{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":{"y":1,"y":2}}}'))
def test_a_nearly_right_file_is_accepted_exactly_when_the_library_accepts_it(data: bytes, scratch: Path) -> None:
    compare(scratch, data)


_SEEDS = [f.data for f in GOOD if len(f.data) < 3000]


@settings(max_examples=500, deadline=None)
@given(
    seed=st.sampled_from(_SEEDS),
    edits=st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from(["put", "insert", "remove", "move"]),
            st.one_of(
                st.sampled_from(sorted(b'{}[]",:0123456789-+.eE\\u/ \n\r\ttrfn\0\x7f\x80\xed\xf0\xff')),
                st.integers(0, 255),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    keep_length=st.booleans(),
)
def test_bytes_changed_in_a_header_are_accepted_exactly_when_the_library_accepts_them(
    seed: bytes, edits: list[tuple[int, str, int]], keep_length: bool, scratch: Path
) -> None:
    (length,) = struct.unpack("<Q", seed[:8])
    header = bytearray(seed[8 : 8 + length])
    for at, kind, byte in edits:
        at %= len(header) or 1
        if kind == "put":
            header[at : at + 1] = bytes([byte])
        elif kind == "insert":
            header[at:at] = bytes([byte])
        elif kind == "remove":
            del header[at : at + 1]
        else:
            header[at : at + 2] = header[at : at + 2][::-1]
    compare(scratch, build.raw(bytes(header), seed[8 + length :], length=length if keep_length else None))


@settings(max_examples=200, deadline=None)
@given(seed=st.sampled_from(_SEEDS), at=st.integers(0, 7), byte=st.integers(0, 255), cut=st.integers(0, 12))
def test_a_changed_length_or_end_is_accepted_exactly_when_the_library_accepts_it(
    seed: bytes, at: int, byte: int, cut: int, scratch: Path
) -> None:
    data = bytearray(seed)
    data[at] = byte
    compare(scratch, bytes(data[: len(data) - cut]))


# What is written


FP4 = getattr(torch, "float4_e2m1fn_x2", None)


def torch_dtypes() -> list[torch.dtype]:
    """Every type of the format that this torch has."""
    found = (getattr(torch, d.torch, None) for d in DTYPES)
    return [t for t in found if isinstance(t, torch.dtype)]


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bytes for types that are not cast; small values, exact in every float, for those that are."""
    generator = torch.Generator().manual_seed(seed)
    if any(dtype is getattr(torch, d.torch) for d in CASTABLE):
        return (torch.randint(-64, 64, shape, generator=generator).double() / 8).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    width = dtype.itemsize
    raw = torch.randint(0, 256, [*shape, width], generator=generator, dtype=torch.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape)


_NAMES = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")
_DICTS = st.dictionaries(
    _NAMES,
    st.tuples(
        st.sampled_from([*torch_dtypes(), torch.float32, torch.float32, torch.float16]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=120, deadline=None)
@given(shapes=_DICTS, to=st.sampled_from(["fp32", "fp16", "bf16"]))
@example(shapes={str(d): (d, [2, 3]) for d in torch_dtypes()}, to="bf16")
@example(shapes={"b": (torch.float32, [3]), "a": (torch.uint8, [3]), "c": (torch.float16, [2])}, to="fp16")
def test_a_file_of_the_library_becomes_byte_for_byte_what_the_library_would_write(
    shapes: dict[str, tuple[torch.dtype, list[int]]], to: str, scratch: Path
) -> None:
    state = {name: tensor(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(shapes.items())}
    state = {name: t for name, t in state.items() if t.dim() or t.dtype is not FP4}  # half a byte cannot be stored
    assume(state)
    wanted, out = scratch.with_name("wanted.safetensors"), scratch.with_name("out.safetensors")
    save_file(state, scratch, metadata={"format": "pt"})
    target = getattr(torch, precconv.dtype(to).torch)
    castable = {getattr(torch, d.torch) for d in CASTABLE}
    # scalars are only ever widened, see the rules
    cast_names = {
        n for n, t in state.items() if t.dtype in castable and (t.dim() or (to == "fp32" and t.dtype.itemsize < 4))
    }
    save_file({n: t.to(target) if n in cast_names else t for n, t in state.items()}, wanted, metadata={"format": "pt"})
    precconv.convert(
        scratch, to=to, output=out, norms="cast", mixed="cast", preset="none", provenance=False, workers=1, force=True,
        verify="full",
    )  # fmt: skip
    assert out.read_bytes() == wanted.read_bytes()


def source_order(path: Path) -> list[str]:
    return list(json.loads(header_text(path)))


def header_text(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + struct.unpack("<Q", data[:8])[0]]


def test_an_order_of_the_sources_own_is_kept_and_its_metadata_stays_first_and_verbatim(tmp_path: Path) -> None:
    tensors: list[build.Tensor] = [
        ("z.weight", "F32", (2, 4), build.f32(*range(8))),
        ("ids", "I64", (2,), struct.pack("<2q", 1, 2)),
        ("a.weight", "F32", (4,), build.f32(*range(4))),
    ]
    metadata = {"zeta": 'quote " and \\', "alpha": "", "licence": "© 数\n\u2028", "b": "</script>"}
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(build.file_of(tensors, metadata))
    precconv.convert(source, to="bf16", output=out, workers=1)
    assert source_order(out) == ["__metadata__", "z.weight", "ids", "a.weight"]
    found = json.loads(header_text(out))
    assert found["__metadata__"].popitem()[0] == KEY
    assert list(found["__metadata__"].items()) == [*metadata.items(), ("format", "pt")]
    library = library_view(out)
    assert library is not None
    assert [name for name, *_ in library[0]] == ["z.weight", "ids", "a.weight"]


def test_metadata_that_states_a_format_is_not_changed(tmp_path: Path) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(build.file_of([("w", "F32", (1,), build.f32(1))], {"format": "np", "a": "b"}))
    precconv.convert(source, to="fp16", output=out, workers=1, provenance=False)
    assert json.loads(header_text(out))["__metadata__"] == {"format": "np", "a": "b"}


def test_an_order_that_would_misalign_a_tensor_gives_way_to_the_librarys(tmp_path: Path) -> None:
    source, out = make.ROOT / "good/misaligned.safetensors", tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out, workers=1, provenance=False)
    assert source_order(out) == ["__metadata__", "d", "w", "mask"]
    reference = tmp_path / "reference.safetensors"
    state = {n: t.bfloat16() if t.is_floating_point() else t for n, t in load_file(source).items()}
    save_file(state, reference, metadata={"format": "pt"})
    assert out.read_bytes() == reference.read_bytes()


def layout(path: Path, infos: Sequence[TensorInfo], dtypes: Sequence[DType], metadata: dict[str, str]) -> Layout:
    """The layout of an output with these tensors, from a safetensors file, whichever it is."""
    with InputFile(path) as file:
        return fmt.layout(
            Source(fmt.SafetensorsReader(file, {}, infos, (), "sha256:"), infos), infos, dtypes, metadata, ""
        )


def test_every_tensor_of_an_output_starts_on_its_own_element_size() -> None:
    for fixture in GOOD:
        path = make.ROOT / fixture.path
        infos = precconv.inspect(path).tensors
        for to in CASTABLE:
            dtypes = [to if t.dtype.is_castable else t.dtype for t in infos]
            for place in layout(path, infos, dtypes, {}).places:
                assert place.offset % max(1, place.to.bits // 8) == 0, (fixture.path, place.to)


def test_elements_smaller_than_a_byte_lie_anywhere_and_keep_the_sources_order(tmp_path: Path) -> None:
    source, out = tmp_path / "m.safetensors", tmp_path / "out.safetensors"
    tensors: list[build.Tensor] = [("u", "U8", (1,), b"u"), ("six", "F6_E2M3", (4,), b"six"), ("a", "U8", (1,), b"a")]
    source.write_bytes(build.file_of(tensors, {"format": "pt"}))
    precconv.convert(source, to="bf16", output=out, workers=1)
    assert out.read_bytes() == source.read_bytes()


def test_an_order_of_the_sources_own_is_kept_with_every_dtype(tmp_path: Path) -> None:
    source, out = make.ROOT / "good/source-order.safetensors", tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out, workers=1)
    assert source_order(out) == source_order(source)


_LAYOUTS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=2)), min_size=1, max_size=7)


@settings(max_examples=300, deadline=None)
@given(tensors=_LAYOUTS, to=st.sampled_from(CASTABLE))
def test_a_planned_header_is_valid_and_says_what_was_planned(tensors: list[tuple[DType, list[int]]], to: DType) -> None:
    infos, at = [], 0
    for n, (dtype, shape) in enumerate(tensors):
        bits = dtype.bits
        for d in shape:
            bits *= d
        if bits % 8 == 0:
            infos.append(TensorInfo(f"t{n}", dtype, tuple(shape), at, bits // 8))
            at += bits // 8
    dtypes = [to if t.dtype.is_castable else t.dtype for t in infos]
    made = layout(make.ROOT / GOOD[0].path, infos, dtypes, {"k": "v"})
    ((_, header),) = made.start
    assert len(header) % 8 == 0
    metadata, found, notes = fmt.validate(fmt.parse(header[8:]), base=len(header))
    assert (metadata, notes) == ({"k": "v"}, [])
    planned = {p.src.name: (p.to, p.src.shape, p.offset) for p in made.places}
    assert {t.name: (t.dtype, t.shape, t.offset) for t in found} == planned
    assert [t for t in infos if planned[t.name][0] != dtypes[infos.index(t)]] == []
    assert made.size == len(header) + sum(t.nbytes for t in found)


def test_the_reader_and_the_library_name_the_same_dtypes() -> None:
    data = (make.ROOT / "good/every-dtype.safetensors").read_bytes()
    for dtype in DTYPES:
        assert by_code(dtype.code) is dtype
        assert dtype.code.encode() in data
