"""Reading the index of a sharded checkpoint, which may come from anybody."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv.errors import CorruptCheckpointError, InputError, PrecconvError
from precconv.repo import index as index_module
from precconv.repo import survey
from precconv.repo.doors import unsafe
from precconv.repo.index import Index, check_shards, read_index

from .samples import PROPERTY

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"


def read(raw: bytes | str | object, *, where: str = "", suffix: str = ".safetensors") -> Index:
    """Read an index given as bytes, as text or as what its JSON says."""
    if not isinstance(raw, bytes):
        raw = (raw if isinstance(raw, str) else json.dumps(raw)).encode()
    return read_index(raw, path="repo/x.index.json", where=where, suffix=suffix)


def test_an_index_gives_its_shards_in_order_and_everything_its_metadata_says() -> None:
    found = read({"metadata": {"total_size": 8, "x": [1.5, None]}, "weight_map": {"b": OTHER, "a": SHARD, "c": OTHER}})
    assert found.shards == (SHARD, OTHER)
    assert dict(found.weight_map) == {"b": OTHER, "a": SHARD, "c": OTHER}
    assert found.metadata == {"total_size": 8, "x": [1.5, None]}


def test_metadata_may_be_absent_and_paths_are_given_from_the_root() -> None:
    found = read({"weight_map": {"a": "x/b.bin", "b": "a.bin"}}, where="unet", suffix=".bin")
    assert found == Index({"a": "unet/x/b.bin", "b": "unet/a.bin"}, {}, ("unet/a.bin", "unet/x/b.bin"))


def test_shards_are_ordered_by_number_however_it_is_padded() -> None:
    names = [f"m-{n:05d}-of-100000.safetensors" for n in (99999, 2)] + ["m-100000-of-100000.safetensors"]
    assert read({"weight_map": dict(enumerate(names))}).shards == (names[1], names[0], names[2])


MAPPING = "an index maps every tensor's name to a shard"
BROKEN: dict[str, tuple[bytes | str | object, str, str | None]] = {
    "empty": (b"", "not valid JSON", "download it again"),
    "not JSON": (b"version https://git-lfs.github.com/spec/v1\n", "not valid JSON", "download it again"),
    "cut": (b'{"weight_map": {"a": "model-0', "not valid JSON", "download it again"),
    "not UTF-8": (b'{"weight_map": {"\xff": "a.safetensors"}}', "not valid JSON", "download it again"),
    "UTF-16": ('{"weight_map": {"a": "a.safetensors"}}'.encode("utf-16"), "not valid JSON", "download it again"),
    "NaN": ('{"metadata": {"total_size": NaN}, "weight_map": {}}', "not valid JSON", "download it again"),
    "a long number": (b'{"metadata": {"n": ' + b"9" * 10_000 + b"}}", "not valid JSON", "download it again"),
    "deep": (b'{"weight_map": ' + b"[" * 200_000, "its JSON nests too deeply", None),
    "a list": ([1], "its JSON is not an object", None),
    "null": (None, "its JSON is not an object", None),
    "no weight map": ({"metadata": {}}, "it has no 'weight_map'", MAPPING),
    "a weight map that is a list": ({"weight_map": [SHARD]}, "its 'weight_map' is not an object", MAPPING),
    "a weight map that is null": ({"weight_map": None}, "its 'weight_map' is not an object", MAPPING),
    "an empty weight map": ({"weight_map": {}}, "its 'weight_map' is empty", None),
    "metadata that is no object": (
        {"metadata": [1], "weight_map": {"a": SHARD}}, "its 'metadata' is not an object", None,
    ),
    "a tensor twice": (
        f'{{"weight_map": {{"a": "{SHARD}", "b": "{SHARD}", "a": "{OTHER}"}}}}', "its JSON has the key 'a' twice", None,
    ),
    "a weight map twice": ('{"weight_map": {}, "weight_map": {}}', "its JSON has the key 'weight_map' twice", None),
    "a long key twice": (
        f'{{"{"k" * 5000}": 1, "{"k" * 5000}": 2}}', f"its JSON has the key '{'k' * 100}…' twice", None,
    ),
    "a shard that is a number": (
        {"weight_map": {"t": 1}}, "tensor 't': its shard is int, not a file name", None,
    ),
    "a shard that is a list": (
        {"weight_map": {"t": [SHARD]}}, "tensor 't': its shard is list, not a file name", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_index_is_refused_with_what_is_wrong(case: str) -> None:
    raw, message, hint = BROKEN[case]
    with pytest.raises(CorruptCheckpointError) as e:
        read(raw)
    assert str(e.value) == f"repo/x.index.json: {message}"
    assert e.value.hint == hint


PATHS = {
    "": "is empty",
    "../x.safetensors": "leaves the directory",
    "a/../../x.safetensors": "leaves the directory",
    "..": "leaves the directory",
    "/x.safetensors": "is absolute",
    "//host/x.safetensors": "is absolute",
    "C:x.safetensors": "is absolute",
    "c:/x.safetensors": "is absolute",
    "a\\x.safetensors": "holds a backslash",
    "..\\x.safetensors": "holds a backslash",
    "\\\\host\\x.safetensors": "holds a backslash",
    "x\0.safetensors": "holds a control character",
    "x\n.safetensors": "holds a control character",
    "x\x1b[2J.safetensors": "holds a control character",
    "x\x9b.safetensors": "holds a control character",
    "x\ud800.safetensors": "holds a control character",
    "./x.safetensors": "is not a plain path",
    "a//x.safetensors": "is not a plain path",
    "x.safetensors/": "is not a plain path",
    "a/C:x.safetensors": "holds a colon",
    "x.bin": "does not end in .safetensors, as the index's own name says",
    "x.safetensors:y": "holds a colon",
    "config.json": "does not end in .safetensors, as the index's own name says",
}


@pytest.mark.parametrize("shard", PATHS)
def test_a_shard_that_must_not_be_opened_is_refused_by_name(shard: str) -> None:
    with pytest.raises(CorruptCheckpointError) as e:
        read({"weight_map": {"a": SHARD, "t": shard}})
    assert str(e.value) == f"repo/x.index.json: tensor 't': its shard {shard!r} {PATHS[shard]}"
    assert e.value.tensor == "t"


def test_a_long_name_is_cut_in_the_message() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"its shard 'a{200}…' is too long$"):
        read({"weight_map": {"t": "a" * 100_000}})


def test_an_index_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_INDEX", 1000)
    with pytest.raises(CorruptCheckpointError) as e:
        read(b"{" * 1001)
    assert str(e.value) == "repo/x.index.json: 1,001 bytes are too many for this file (limit 1,000)"


@PROPERTY
@given(st.text(st.sampled_from("a./\\:C\0\n"), max_size=8))
def test_a_path_that_passes_stays_below_its_directory(path: str) -> None:
    if unsafe(path) is None:
        parts = path.split("/")
        assert all(part not in ("", ".", "..") for part in parts)
        assert not set(path) & set("\\\0\n")
        assert path[1:2] != ":" or path[0] in ".:"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weight_map", "metadata", "a", "x.safetensors"]), inner, max_size=3)
    ),
)


@PROPERTY
@given(JSON | st.dictionaries(st.just("weight_map"), st.dictionaries(st.text(), JSON | st.just(SHARD))))
def test_whatever_the_json_says_the_answer_is_an_index_or_one_error(value: object) -> None:
    try:
        found = read(value)
    except CorruptCheckpointError:
        return
    assert set(found.weight_map.values()) == set(found.shards) != set()


# Against the files that are there


def check(shards: list[str], there: list[str]) -> None:
    made = read({"weight_map": {f"t{n}": shard for n, shard in enumerate(shards)}})
    check_shards(made, path="repo/x.index.json", exists=there.__contains__, beside=lambda _: there)


def test_every_missing_shard_is_named_at_once() -> None:
    names = [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    with pytest.raises(InputError) as e:
        check(names, [names[1]])
    assert type(e.value) is InputError
    assert str(e.value) == f"repo/x.index.json: 3 of its 4 shards not found: {names[0]}, {names[2]}, {names[3]}"
    assert e.value.hint == "download the whole checkpoint"


def test_of_very_many_missing_shards_the_first_hundred_are_named() -> None:
    names = [f"s{n:04d}.safetensors" for n in range(1000)]
    with pytest.raises(InputError, match=r"1,000 of its 1,000 shards not found: .*s0099\.safetensors and 900 more$"):
        check(names, [])


def test_a_file_of_the_same_numbering_that_the_index_does_not_name_is_refused() -> None:
    with pytest.raises(InputError) as e:
        check([SHARD], [SHARD, OTHER])
    assert str(e.value) == f"repo/x.index.json: it does not name {OTHER}, numbered as its own shards are"
    assert e.value.hint == "the index or the shards are from another save; download the whole checkpoint again"


@pytest.mark.parametrize(
    "beside",
    ["model-00002-of-00003.safetensors", "model.fp16-00002-of-00002.safetensors", "other-00002-of-00002.safetensors",
     "model-00002-of-00002.bin", "model.safetensors"],
)  # fmt: skip
def test_a_file_of_another_numbering_is_no_contradiction(beside: str) -> None:
    check([SHARD], [SHARD, beside])


def test_names_without_numbers_contradict_nothing() -> None:
    check(["a.safetensors"], ["a.safetensors", "b.safetensors"])


def outcome(raw: bytes) -> str:
    """What a survey says of two shards with this index: their files, or the error."""
    path = "model.safetensors.index.json"
    try:
        return " ".join(survey([SHARD, OTHER, path], lambda _: raw, root="repo").sets[0].files)
    except PrecconvError as e:
        return str(e)


def test_no_index_however_damaged_does_more_than_fail_with_one_error() -> None:
    good = json.dumps({"metadata": {"total_size": 8}, "weight_map": {"a": SHARD, "b": OTHER}}).encode()
    assert outcome(good) == f"{SHARD} {OTHER}"
    for at in range(len(good)):
        for new in (b"", b"\0", b'"', b"}", b"../", b"\xff"):
            said = outcome(good[:at] + new + good[at + 1 :])
            assert said == f"{SHARD} {OTHER}" or said.startswith("repo/model.safetensors.index.json: ")
