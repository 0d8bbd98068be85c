"""The inert unpickler: what it understands, what it never does, and what it costs to lie to it."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import os
import pickle
import pickletools
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv.errors import CorruptCheckpointError, PrecconvError
from precconv.formats.opstream import OpStream
from precconv.formats.pickled import Elements, Global, Key, Persistent, Placeholder, mapping, sequence, walk
from precconv.formats.unpickle import Budget, unpickle

from .realise import realise

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
SMALL = Budget(memory=1 << 22)


class Plain:
    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class Bag(dict[str, int]):
    note = ""


class Row(list[int]):
    pass


class Keyworded:
    def __new__(cls, *, size: int) -> Keyworded:
        self = super().__new__(cls)
        self.size = size
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": self.size}

    size: int


def shape_of(value: Any) -> Any:
    """A comparable form of an object: types, contents, and which parts are the same object."""
    return pickletools.optimize(pickle.dumps(value, 4))


def cyclic() -> list[object]:
    ring: list[object] = [1]
    ring.append({"back": ring, "tuple": (ring,)})
    return ring


ORDINARY: list[Any] = [
    None,
    [True, False, 0, 255, 256, -1, 2**31, -(2**31), 2**63, -(2**200), 1.5, -0.0, float("inf")],
    ["", "é", "\U0001f600", "a\nb\\u0041", "\ud800", b"", b"\x00\xff", bytearray(b"xyz")],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [[]], {}, {"a": {1: {None: ()}}}, {(1, 2): 3}],
    [{1, 2}, frozenset({"a"}), complex(1, -2), slice(1, None, 2), range(4), Ellipsis],
    collections.OrderedDict([("b", 1), ("a", [2])]),
    [collections.defaultdict(list, {"x": [1]}), collections.Counter("aab"), collections.deque([1, 2])],
    argparse.Namespace(lr=1e-4, betas=(0.9, 0.95)),
    [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), Path("a/b"), int, print],
    [Plain(a=1, b=Plain(c=[2])), Bag(x=1), Row([1, 2, 3]), Keyworded(size=3)],
    [np.float64(1.5), np.int64(7), np.arange(6, dtype=np.float32).reshape(2, 3), np.dtype("float16")],
    np.random.RandomState(3).get_state(),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", ORDINARY, ids=lambda v: type(v).__name__)
def test_everything_pickle_writes_is_understood_well_enough_to_make_it_again(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert shape_of(realise(unpickle(data).root)) == shape_of(pickle.loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_aliases_and_cycles_are_the_same_objects(protocol: int) -> None:
    shared = [1]
    root: Any = unpickle(pickle.dumps([shared, shared, cyclic()], protocol)).root
    assert root[0] is root[1]
    assert root[2][1]["back"] is root[2]
    assert root[2][1]["tuple"][0] is root[2]


@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler])
def test_a_recursive_tuple_comes_out_recursive(pickler: type[pickle.Pickler]) -> None:
    inner: list[object] = []
    outer = (inner, 1, 2, 3)
    inner.append(outer)
    buffer = io.BytesIO()
    pickler(buffer, 2).dump(outer)
    root: Any = unpickle(buffer.getvalue()).root
    assert root[0][0] is root


simple = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
nested = st.recursive(
    simple,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
        | st.tuples(inner, inner)
        | st.frozensets(st.text() | st.integers())
    ),
    max_leaves=20,
)


@given(nested, st.sampled_from(PROTOCOLS))
def test_nested_plain_values_come_back_equal(value: Any, protocol: int) -> None:
    assert realise(unpickle(pickle.dumps(value, protocol)).root) == value


@pytest.mark.parametrize(
    "data",
    [
        b"S'abc'\np0\n.",
        b"U\x03abc.",
        b"T\x03\x00\x00\x00abc.",
        b'S"a\\x62c"\n.',
        b"S'a\\142c'\n.",
        b"Vabc\n.",
    ],
)
def test_python_2_strings_are_text_when_ascii(data: bytes) -> None:
    assert unpickle(data).root == "abc"


def test_python_2_bytes_stay_bytes_and_long_suffixes_are_read() -> None:
    assert unpickle(b"U\x02\xff\x00.").root == b"\xff\x00"
    assert unpickle(b"S'\\xff\\n\\q'\n.").root == b"\xff\n\\q"
    assert unpickle(b"L12345678901234567890L\n.").root == 12345678901234567890
    assert unpickle(b"I01\n.").root is True


def test_old_instances_keep_class_and_arguments() -> None:
    for data, how in [(b"(I1\nI2\nicollections\nThing\n.", "inst"), (b"(cmod\nThing\nI1\nI2\no.", "obj")]:
        root = unpickle(data).root
        assert isinstance(root, Placeholder)
        assert (root.how, root.args) == (how, (1, 2))
        assert root.kind.endswith("Thing")


def test_a_placeholder_remembers_how_it_was_made_and_changed() -> None:
    bag = Bag(x=1, y=2)
    bag.note = "n"
    root = unpickle(pickle.dumps(bag, 2)).root
    assert isinstance(root, Placeholder)
    assert root.kind.endswith("_reconstructor") or root.how == "newobj"
    assert root.pairs == [("x", 1), ("y", 2)]
    assert root.state == {"note": "n"}
    assert mapping(root) == {"x": 1, "y": 2}
    row = unpickle(pickle.dumps(Row([1, 2]), 4)).root
    assert isinstance(row, Placeholder)
    assert row.items == [1, 2] == sequence(row)


def test_a_state_setter_call_is_remembered_on_its_object() -> None:
    data = b"cmod\nTarget\n)\x81q\x00cmod\nsetter\nh\x00K\x01\x86R0."
    root = unpickle(data).root
    assert isinstance(root, Placeholder)
    [(kind, call)] = root.edits or []
    assert kind == "call"
    assert isinstance(call, Placeholder)
    assert call.kind == "mod.setter"
    assert call.args == (root, 1)


def test_a_call_for_its_effect_alone_is_reported_and_lost_nowhere() -> None:
    loaded = unpickle(b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R0N.")
    assert loaded.root is None
    assert [p.kind for p in loaded.discarded] == ["os.system"]


def test_names_are_listed_once_in_order() -> None:
    loaded = unpickle(pickle.dumps([collections.OrderedDict(), Plain(), collections.OrderedDict()], 2))
    assert [str(g) for g in loaded.globals] == ["collections.OrderedDict", f"{__name__}.Plain"]
    assert Global("numpy.core.multiarray", "scalar").canonical == "numpy._core.multiarray.scalar"


def test_python_2_ordered_dicts_and_persistent_ids_are_read() -> None:
    data = b"ccollections\nOrderedDict\n((lp0\n(lp1\nS'a'\naI1\naatR."
    assert mapping(unpickle(data).root) == {"a": 1}
    root = unpickle(b"P17\n.").root
    assert isinstance(root, Persistent)
    assert root.pid == "17"


def test_a_stream_goes_on_after_each_pickle_and_reads_no_further_than_it_must() -> None:
    fetched: list[tuple[int, int]] = []
    data = pickle.dumps("one", 2) + pickle.dumps([2] * 10, 0) + bytes(1 << 22)

    def fetch(offset: int, size: int) -> bytes:
        fetched.append((offset, size))
        return data[offset : offset + size]

    stream = OpStream(fetch, len(data))
    assert unpickle(stream).root == "one"
    assert unpickle(stream).root == [2] * 10
    assert stream.tell() == len(data) - (1 << 22)
    assert sum(size for _, size in fetched) < 1 << 20


def test_values_cross_the_edges_of_the_window() -> None:
    value = ["x" * 300_000, b"y" * 1_000_000, list(range(100_000)), "é" * 200_000]
    for protocol in PROTOCOLS:
        assert realise(unpickle(pickle.dumps(value, protocol)).root) == value


class Canary:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.target,)


DANGEROUS = {
    "os.system": b"cos\nsystem\nX%s%s\x85R.",
    "posix.mkdir": b"cposix\nmkdir\nX%s%s\x85R.",
    "os.mkdir by stack": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93X%s%s\x85R.",
    "builtins.eval": b"cbuiltins\neval\nX%s__import__('os').mkdir('%s')\x85R.",
    "torch.load": b"ctorch\nload\nX%s%s\x85R.",
    "an import of a submodule": b"cantigravity\nfly\n(X%s%stR.",
    "inst": b"(X%s%sios\nmkdir\n.",
    "obj": b"(cos\nmkdir\nX%s%so.",
    "getattr": b"cbuiltins\ngetattr\ncos\n__dict__\nX%s%s\x86R.",
}


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_dangerous_name_is_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    template = DANGEROUS[name]
    size = len("__import__('os').mkdir('CANARY')" if b"eval" in template else "CANARY")
    before = set(sys.modules)
    loaded = unpickle(template % (struct.pack("<I", size), b"CANARY"))
    assert isinstance(loaded.root, Placeholder)
    assert list(tmp_path.iterdir()) == []
    assert not {m for m in set(sys.modules) - before if "antigravity" in m}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_canary_that_runs_under_pickle_stays_dead_here(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"model": Canary(str(tmp_path / "ran"))}, protocol)
    unpickle(data)
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists()  # the canary sings when it is let out


DAMAGED = {
    "empty": b"",
    "no stop": b"K\x01",
    "only a stop": b".",
    "two values": b"K\x01K\x02.",
    "an open mark": b"(K\x01.",
    "stack underflow": b"R.",
    "tuple underflow": b"K\x01\x87.",
    "no mark": b"K\x01t.",
    "unknown opcode": b"\xff.",
    "text": b"version https://git-lfs.github.com/spec/v1\n",
    "missing memo": b"h\x05.",
    "negative memo": b"K\x01p-1\n.",
    "memo of nothing": b"q\x00.",
    "huge long": b"\x8b\xff\xff\xff\x7f.",
    "negative long": b"\x8b\xff\xff\xff\xff.",
    "huge string": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "huge bytes": b"\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
    "huge bytearray": b"\x96\xff\xff\xff\xff\xff\xff\xff\xff.",
    "negative string": b"T\xff\xff\xff\xffab.",
    "bad utf-8": b"X\x02\x00\x00\x00\xff\xff.",
    "bad escape": b"V\\u12\n.",
    "bad number": b"Iabc\n.",
    "bad float": b"Fx\n.",
    "not ascii": b"I\xff\n.",
    "too many digits": b"I" + b"9" * 10_000 + b"\n.",
    "no quotes": b"Sabc\n.",
    "a line without end": b"S'" + b"a" * 100,
    "odd dict": b"(K\x01d.",
    "items in a number": b"K\x01(K\x01K\x02u.",
    "append to a tuple": b")K\x01a.",
    "add to a list": b"\x80\x04](K\x01\x90.",
    "state on a list": b"]}b.",
    "call of a number": b"K\x01)R.",
    "arguments not a tuple": b"cos\nsystem\n]R.",
    "class without a name": b"K\x01K\x02\x93.",
    "empty obj": b"(o.",
    "extension": b"\x82\x01.",
    "out of band buffer": b"\x97.",
    "protocol 9": b"\x80\x09N.",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_one_error_that_says_where(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^damaged pickle at byte \d+: [^\n]+$"):
        unpickle(DAMAGED[name])


BOMBS = {
    "stack": b"N" * 10_000_000,
    "marks": b"(" * 10_000_000,
    "lists": b"]" * 10_000_000,
    "sets": b"\x8f" * 10_000_000,
    "dups": b"N" + b"2" * 10_000_000,
    "memo": b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(2_000_000)),
    "memoize": b"N" + b"\x94" * 10_000_000,
    "bytes": b"B\x00\x00\x00\x04" + bytes(1 << 26),
    "wide text": b"X\x00\x00\x20\x00" + "\U0001f600".encode() * (1 << 19),
    "names": b"".join(b"cm\nn%d\n" % i for i in range(1_000_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_an_error_before_they_cost_more_than_the_budget(name: str) -> None:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpointError, match="more memory than any checkpoint"):
        unpickle(BOMBS[name], budget=SMALL)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    assert time.process_time() - start < 2


def test_deep_nesting_is_read_walked_and_freed_without_recursion() -> None:
    tuples = b")" + b"\x85" * 1_000_000 + b"."
    lists = b"]" * 1_000_000 + b"a" * 999_999 + b"."
    calls = b"ca\nb\nq\x000)" + b"q\x010h\x00h\x01R\x85" * 200_000 + b"."
    for data in (tuples, lists, calls):
        root = unpickle(data).root
        assert sum(1 for _ in walk(root)) >= 200_000
        del root


def test_shared_containers_are_walked_once() -> None:
    data = b"]q\x00"
    for _ in range(100):  # each list holds the one before twice: 2**100 paths, 101 lists, the last one empty
        data += b"q\x000](h\x00h\x00e"
    assert sum(1 for _ in walk(unpickle(data + b".").root)) == 102


def test_keys_cannot_be_made_to_collide() -> None:
    modulus = (1 << 61) - 1
    numbers = b"".join(pickle.dumps(i * modulus, 2)[2:-1] + b"N" for i in range(1, 20_000))
    start = time.process_time()
    root = unpickle(b"}(" + numbers + b"u.").root
    assert time.process_time() - start < 2
    assert isinstance(root, dict)
    assert all(isinstance(key, Key) for key in list(root)[2:])


def test_unhashable_and_repeated_keys_are_no_error() -> None:
    root = unpickle(b"}(]N]NK\x01K\x02K\x01K\x03u.").root
    assert isinstance(root, dict)
    assert list(root.values()) == [None, None, 3]


def test_sets_may_hold_what_cannot_be_hashed() -> None:
    root = unpickle(b"\x80\x04\x8f(]]\x90.").root
    assert isinstance(root, Elements)
    assert root.items == [[], []]


SEEDS = [pickle.dumps(value, protocol) for value in ORDINARY for protocol in (0, 2, 4, 5)]


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6),
    st.integers(0, 400),
)
def test_damaged_pickles_raise_nothing_but_our_own_errors(data: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray(data)
    for place, value in edits:
        raw[place % len(raw)] = value
    try:
        loaded = unpickle(bytes(raw[: len(raw) - cut]), budget=SMALL)
    except PrecconvError:
        return
    for node in walk(loaded.root):
        mapping(node), sequence(node)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_our_own_errors(data: bytes) -> None:
    try:
        unpickle(data, budget=SMALL)
    except PrecconvError:
        return


def test_nothing_but_the_standard_library_is_imported_to_read_a_pickle() -> None:
    code = (
        "import sys; import precconv.formats.unpickle;"
        "bad = {'torch', 'numpy', 'pickle'} & set(sys.modules); print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_opcode_table_covers_every_opcode_of_pickletools() -> None:
    from precconv.formats.opcodes import STOP, TABLE, _unknown

    known = {i for i, handler in enumerate(TABLE) if handler is not _unknown} | {STOP}
    assert known == {ord(op.code) for op in pickletools.opcodes}
