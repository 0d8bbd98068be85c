"""The formats that the tests' own Hub reads by itself, from bytes written down here, and parts of files."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .hub import lz4, web, xet, xorbs
from .hub.objects import Objects
from .hub.refusals import Refused

HEAD = b"\x04\x22\x4d\x18\x60\x40\x82"  # independent blocks, no checksums


def words(*sizes: int) -> bytes:
    return b"".join(size.to_bytes(4, "little") for size in sizes)


BLOCKS = {
    "literals only": (b"\x50hello", b"hello"),
    "a match that repeats itself": (b"\x1fa\x01\x00\x05\x10b", b"a" * 25 + b"b"),
    "a match of what is before": (b"\x40abcd\x04\x00\x20xy", b"abcdabcdxy"),
    "a long run of literals": (b"\xf0\x05" + bytes(20), bytes(20)),
    "a length of exactly 15 + 255": (b"\xf0\xff\x00" + bytes(270), bytes(270)),
}


@pytest.mark.parametrize(("block", "content"), [*BLOCKS.values()], ids=[*BLOCKS])
def test_a_block_is_unpacked(block: bytes, content: bytes) -> None:
    assert lz4.frame(HEAD + words(len(block)) + block + words(0)) == content


def test_a_frame_may_have_checksums_its_size_raw_blocks_and_matches_across_blocks() -> None:
    flags = 0x04 | 0x08 | 0x10  # checksum of the content, its size, checksums of the blocks; blocks that depend
    head = b"\x04\x22\x4d\x18" + bytes([0x40 | flags, 0x40]) + struct.pack("<Q", 14) + b"\x00"
    raw = words(4 | 1 << 31) + b"abcd" + b"sum1"
    back = words(9) + b"\x02\x04\x00\x50hello"[:9] + b"sum2"
    assert lz4.frame(head + raw + back + words(0) + b"sum3") == b"abcd" + b"abcdab" + b"hello"


def test_what_is_no_frame_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not an LZ4 frame"):
        lz4.frame(b"hello world")


def packed(scheme: int, data: bytes, size: int) -> bytes:
    return b"\0" + len(data).to_bytes(3, "little") + bytes([scheme]) + size.to_bytes(3, "little") + data


def test_a_chunk_may_have_its_bytes_sorted_by_their_place_in_groups_of_four() -> None:
    content = bytes(range(11))
    grouped = b"".join(content[place::4] for place in range(4))
    frame = HEAD + words(len(grouped) | 1 << 31) + grouped + words(0)
    assert xorbs.unpacked(packed(2, frame, 11)) == content
    assert xorbs.unpacked(packed(1, frame, 11)) == grouped
    assert xorbs.unpacked(packed(0, content, 11)) == content


def test_what_follows_the_chunks_of_a_xorb_is_left_alone() -> None:
    data = packed(0, b"abc", 3) + packed(0, b"de", 2)
    assert list(xorbs.chunks_of(data + b"XETBLOB footer")) == [xorbs.Chunk(0, 11, 3), xorbs.Chunk(11, 21, 2)]
    assert list(xorbs.chunks_of(data[:-1])) == [xorbs.Chunk(0, 11, 3)]


def test_a_file_offered_through_xet_is_put_together_again(tmp_path: Path) -> None:
    data = bytes(range(251)) * 800
    cas, objects = xorbs.Cas(tmp_path / "xorbs"), Objects(tmp_path / "objects")
    sha256 = objects.put([data])
    name = xorbs.adopt(cas, sha256, objects.path(sha256))
    assert b"".join(xorbs.content(cas, name)) == data
    objects.path(sha256).unlink()
    xorbs.materialise(cas, objects, sha256)
    assert objects.read(sha256) == data


def test_an_object_with_another_hash_than_expected_is_not_kept(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    with pytest.raises(Refused, match="SHA-256"):
        objects.put([b"abc"], expected="0" * 64)
    assert list(tmp_path.iterdir()) == []
    assert objects.put([b"a", b"bc"]) == hashlib.sha256(b"abc").hexdigest()


def rebuilt(plan: dict[str, Any], cas: xorbs.Cas, size: int) -> bytes:
    """What a client makes of a plan: the chunks of every term, from the one range of its xorb that holds them."""
    out = b""
    for term in plan["terms"]:
        begin, end = term["range"]["start"], term["range"]["end"]
        (place,) = (
            f for f in plan["fetch_info"][term["hash"]] if f["range"]["start"] <= begin and end <= f["range"]["end"]
        )
        where = place["url_range"]
        data = cas.path(term["hash"]).read_bytes()[where["start"] : where["end"] + 1]
        chunks = [xorbs.unpacked(data[c.start : c.stop]) for c in xorbs.chunks_of(data)]
        first = place["range"]["start"]
        out += b"".join(chunks[begin - first : end - first])
    return out[plan["offset_into_first_range"] :][:size]


SEGMENTS = [("a", 0, 3), ("b", 1, 4), ("a", 3, 5), ("a", 0, 2), ("b", 0, 5)]


@pytest.fixture(scope="module")
def cas(tmp_path_factory: pytest.TempPathFactory) -> xorbs.Cas:
    made = xorbs.Cas(tmp_path_factory.mktemp("xorbs"))
    for name in "ab":
        pieces = [bytes([65 + n]) * (3 + n) for n in range(5)]
        xorbs.put_xorb(made, name, b"".join(packed(0, p, len(p)) for p in pieces))
    rows = [(n, sum(c.size for c in made.chunks[n][i:j]), i, j) for n, i, j in SEGMENTS]
    made.files["file"] = tuple(xorbs.Segment(*row) for row in rows)
    return made


@given(start=st.integers(0, 71), length=st.integers(1, 100))
def test_the_plan_for_any_range_of_a_file_gives_its_bytes(cas: xorbs.Cas, start: int, length: int) -> None:
    whole = b"".join(xorbs.content(cas, "file"))
    site = cast(Any, SimpleNamespace(cas=cas, storage=""))
    headers = {"Authorization": "Bearer xet-read", "Range": f"bytes={start}-{start + length - 1}"}
    request = web.Request("GET", "/", headers, cast(Any, None), {"file": "file"})
    answer = xet.reconstruction(site, request)
    assert isinstance(answer.body, bytes)
    assert rebuilt(json.loads(answer.body), cas, min(length, len(whole) - start)) == whole[start : start + length]


def test_ranges_that_touch_are_one() -> None:
    assert xet.merged([(4, 6), (0, 2), (2, 3), (5, 9)]) == [(0, 3), (4, 9)]


RANGES = {
    "bytes=0-0": (206, b"a", "bytes 0-0/10"),
    "bytes=3-5": (206, b"def", "bytes 3-5/10"),
    "bytes=7-": (206, b"hij", "bytes 7-9/10"),
    "bytes=7-99": (206, b"hij", "bytes 7-9/10"),
    "bytes=-2": (206, b"ij", "bytes 8-9/10"),
    "bytes=-99": (206, b"abcdefghij", "bytes 0-9/10"),
    "bytes=-": (200, b"abcdefghij", None),
    "lines=1-2": (200, b"abcdefghij", None),
    "": (200, b"abcdefghij", None),
}


@pytest.mark.parametrize("asked", RANGES)
def test_a_range_is_what_was_asked_for(asked: str, tmp_path: Path) -> None:
    request = web.Request("GET", "/", {"Range": asked}, cast(Any, None))
    status, content, text = RANGES[asked]
    answer = web.part_of(b"abcdefghij", request, {})
    assert (answer.status, answer.body, answer.headers.get("Content-Range")) == (status, content, text)
    part = web.part_of(web.Part(tmp_path, 100, 110), request, {}).body
    assert isinstance(part, web.Part)
    assert (part.start - 100, len(part)) == (b"abcdefghij".index(content), len(content))


def test_a_range_past_the_end_is_refused() -> None:
    request = web.Request("GET", "/", {"Range": "bytes=10-"}, cast(Any, None))
    with pytest.raises(Refused) as caught:
        web.part_of(b"abcdefghij", request, {})
    assert (caught.value.status, caught.value.headers["Content-Range"]) == (416, "bytes */10")
