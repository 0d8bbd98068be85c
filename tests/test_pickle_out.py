"""Inert graphs as pickles again: what loads from them, what they cost, and what they never do."""

from __future__ import annotations

import collections
import io
import os
import pickle
import pickletools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.errors import InputError
from precconv.formats.pickle_out import pickle_bytes
from precconv.formats.pickled import Elements, Global, Key, Persistent, Placeholder
from precconv.formats.unpickle import unpickle

from .test_unpickle import ORDINARY, PROTOCOLS, Plain, cyclic, shape_of

#: All that ``torch.load(weights_only=True)`` understands.
SAFE_OPCODES = {
    *("NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MARK", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BINPERSID"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "GLOBAL"),
    *("BINUNICODE", "SHORT_BINSTRING", "LONG1", "PROTO", "STOP"),
}


def again(data: bytes) -> bytes:
    """A pickle read as inert data and written again."""
    inert = unpickle(data)
    return pickle_bytes(inert.root, protocol=inert.protocol, discarded=inert.discarded)


def opcodes(data: bytes) -> set[str]:
    return {op.name for op, _, _ in pickletools.genops(data)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", ORDINARY, ids=lambda v: type(v).__name__)
def test_what_loads_is_what_loads_from_the_source(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert shape_of(pickle.loads(again(data))) == shape_of(pickle.loads(data))


@pytest.mark.parametrize("value", ORDINARY, ids=lambda v: type(v).__name__)
def test_protocol_2_stays_within_the_opcodes_that_weights_only_knows(value: Any) -> None:
    data = pickle.dumps(value, 2)
    assert opcodes(again(data)) - SAFE_OPCODES <= opcodes(data) - SAFE_OPCODES


class Reduced:
    """Made by a call, then given everything a reduce tuple can give."""

    def __init__(self, *args: object) -> None:
        self.log: list[object] = [("init", args)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if len(self.log) == 1:
            return Reduced, self.log[0][1]  # type: ignore[index]
        return Reduced, (1, [2]), {"log": self.log}, iter([3, 4]), iter([(5, 6)])

    def append(self, item: object) -> None:
        self.log.append(("append", item))

    def extend(self, items: list[object]) -> None:
        self.log.append(("extend", list(items)))

    def __setitem__(self, key: object, value: object) -> None:
        self.log.append(("set", key, value))

    def __setstate__(self, state: dict[str, object]) -> None:
        self.log.append(("state", state))


class Setter:
    """Given its state by a function, whose result the pickle throws away."""

    def __reduce__(self) -> Any:
        return Setter, (), {"x": [1]}, None, None, set_state


def set_state(target: Any, state: dict[str, object]) -> None:
    vars(target).update(state, was_set=True)


def test_every_part_of_a_reduced_object_comes_in_its_order() -> None:
    value = Reduced()
    value.log = [0, 1]
    data = pickle.dumps(value, 2)
    assert pickle.loads(again(data)).log == pickle.loads(data).log


def test_a_state_setter_is_called_on_the_object() -> None:
    loaded = pickle.loads(again(pickle.dumps([Setter(), Setter()])))
    assert [vars(item) for item in loaded] == [{"x": [1], "was_set": True}] * 2


def test_calls_made_for_their_effect_alone_are_written_after_the_object() -> None:
    inert = unpickle(b"\x80\x04}q\x00cbuiltins\nsetattr\n(ctests.test_pickle_out\nSetter\nX\x01\x00\x00\x00nK\x05tR0.")
    assert len(inert.discarded) == 1
    pickle.loads(pickle_bytes(inert.root, protocol=4, discarded=inert.discarded))
    assert Setter.n == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler])
def test_cycles_come_out_as_cycles(pickler: type[pickle.Pickler], protocol: int) -> None:
    inner: list[object] = []
    outer = (inner, 1, 2, 3)
    small = (inner,)
    frozen = frozenset([Hashed(inner)])
    inner += [outer, small, frozen, cyclic()]
    for value in (outer, inner, small, frozen, Reduced(inner)):
        buffer = io.BytesIO()
        pickler(buffer, protocol).dump(value)
        loaded = pickle.loads(again(buffer.getvalue()))
        assert shape_of(loaded) == shape_of(pickle.loads(buffer.getvalue()))


class Hashed:
    """Hashable, whatever it holds."""

    def __init__(self, inner: object) -> None:
        self.inner = inner


def test_a_call_on_a_list_that_gets_its_result() -> None:
    source = b"\x80\x02ctests.test_pickle_out\nHashed\n]q\x00\x85Rq\x01h\x00h\x01a0."
    for data in (source, again(source)):
        loaded = pickle.loads(data)
        assert loaded.inner == [loaded]
    early = b"\x80\x02]q\x00ctests.test_pickle_out\nCounted\nh\x00\x85Ra0h\x00."
    for data in (early, again(early)):
        [made] = pickle.loads(data)
        assert made.size == 0


class Counted:
    def __init__(self, items: list[object]) -> None:
        self.size = len(items)


def test_a_tuple_in_a_cycle_is_itself() -> None:
    inner: list[object] = []
    outer = (inner, 1, 2, 3)
    inner.append(outer)
    loaded = pickle.loads(again(pickle.dumps(outer, 2)))
    assert loaded[0][0] is loaded


def test_shared_objects_stay_shared_and_equal_ones_stay_apart() -> None:
    shared: list[object] = [1]
    value = [shared, shared, [1], bytearray(b"x"), *([bytearray(b"y")] * 2)]
    loaded = pickle.loads(again(pickle.dumps(value, 5)))
    assert loaded == value
    assert loaded[0] is loaded[1]
    assert loaded[0] is not loaded[2]
    assert loaded[4] is loaded[5]


def test_old_opcodes_make_old_objects() -> None:
    source = b"(lp0\n(itests.test_unpickle\nPlain\np1\n(dp2\nS'a'\nI1\nsba(ctests.test_unpickle\nPlain\noa."
    first, second = pickle.loads(again(source))
    assert isinstance(first, Plain)
    assert vars(first) == {"a": 1}
    assert isinstance(second, Plain)
    assert {"INST", "OBJ"} <= opcodes(again(source))


def test_text_of_python_2_is_left_to_the_loader() -> None:
    data = again(b"\x80\x02]q\x00(U\x02\xc3\xa9U\x01ae.")
    assert pickle.loads(data, encoding="utf-8") == ["\xe9", "a"]
    assert pickle.loads(data, encoding="bytes") == [b"\xc3\xa9", "a"]
    long = again(b"\x80\x02T\x2c\x01\x00\x00" + b"\xff" * 300 + b".")
    assert pickle.loads(long, encoding="latin-1") == "\xff" * 300


def test_names_of_python_2_are_spelled_as_they_were() -> None:
    data = again(pickle.dumps([set(), complex(1, 2), collections.OrderedDict], 2))
    assert b"c__builtin__\nset\n" in data
    assert pickle.loads(data) == [set(), complex(1, 2), collections.OrderedDict]


def test_names_that_lines_cannot_hold_are_written_as_text() -> None:
    source = pickle.dumps([Outer.Inner, Outer.Inner], 4)
    assert pickle.loads(again(source)) == [Outer.Inner, Outer.Inner]
    odd = pickle_bytes([Global("a\nb", "c"), Global("", "d"), Global("a", "\ud800")], protocol=4)
    names = [op.name for op, _, _ in pickletools.genops(odd)]
    assert names.count("STACK_GLOBAL") == 3


class Outer:
    class Inner:
        pass


@pytest.mark.parametrize("value", [10**700, -(2**2040), 2**31, -(2**31) - 1, 255, 256, 65535, 65536, -1, -128, 128])
def test_integers_of_any_size(value: int) -> None:
    assert pickle.loads(again(pickle.dumps(value, 2))) == value


def test_containers_of_any_length() -> None:
    for size in (0, 1, 2, 3, 4, 999, 1000, 1001, 2500):
        value = [list(range(size)), {i: str(i) for i in range(size)}, tuple(range(size)), set(range(size))]
        assert pickle.loads(again(pickle.dumps(value, 4))) == value


def test_keys_that_are_no_plain_values_are_keys_again() -> None:
    value = {(1, 2): 1, 2**70: 2, (): 3, frozenset([1]): 4, b"k": 5, None: 6, 1.5: 7}
    assert pickle.loads(again(pickle.dumps(value, 4))) == value
    assert pickle.loads(pickle_bytes({Key((1,)): Elements(frozen=False, items=[])}, protocol=4)) == {(1,): set()}


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KINDS = st.sampled_from(["list", "tuple", "dict", "set", "ordered", "object", "bytearray", "bag", "frozen", "deque"])


@st.composite
def graphs(draw: st.DrawFn) -> list[object]:
    """Objects that hold any of each other, cycles included."""
    nodes: list[Any] = []
    for kind in draw(st.lists(KINDS, min_size=1, max_size=12)):
        some = [draw(plain | st.sampled_from(nodes) if nodes else plain) for _ in range(draw(st.integers(0, 5)))]
        keys = [x for x in some if isinstance(x, str | int | bytes | float | None)]
        made: dict[str, Any] = {
            "list": some,
            "tuple": tuple(some),
            "dict": dict(zip(keys, some, strict=False)),
            "set": set(keys),
            "ordered": collections.OrderedDict(zip(keys, some, strict=False)),
            "object": Plain(x=some),
            "bytearray": bytearray(b"ab"),
            "bag": collections.defaultdict(list, zip(keys, some, strict=False)),
            "frozen": frozenset(keys),
            "deque": collections.deque(some),
        }
        nodes.append(made[kind])
    for source in nodes:  # edges back, where they can be
        back = draw(st.sampled_from(nodes))
        if isinstance(source, list | collections.deque):
            source.append(back)
        elif isinstance(source, dict):
            source["back"] = back
        elif isinstance(source, Plain):
            source.back = back  # type: ignore[attr-defined]
    return nodes


@given(value=graphs(), protocol=st.sampled_from(PROTOCOLS))
@settings(deadline=None, max_examples=300)
def test_random_graphs_come_out_as_they_were(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert shape_of(pickle.loads(again(data))) == shape_of(pickle.loads(data))


@given(value=graphs(), protocol=st.sampled_from(PROTOCOLS))
@settings(deadline=None, max_examples=100)
def test_writing_twice_changes_nothing(value: Any, protocol: int) -> None:
    once = again(pickle.dumps(value, protocol))
    assert again(once) == once


def test_any_depth_without_recursion() -> None:
    depth = 200_000
    data = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    assert again(data).count(b"a") >= depth - 1
    tuples = b"\x80\x02N" + b"\x85" * depth + b"."
    assert again(tuples) == tuples


def test_time_grows_with_the_graph() -> None:
    def seconds(count: int) -> float:
        items = [[i, str(i), (i, "x")] for i in range(count)]
        inert = unpickle(pickle.dumps({"a": items, "b": items}, 2))
        started = time.process_time()
        pickle_bytes(inert.root)
        return time.process_time() - started

    seconds(1000)
    assert seconds(100_000) < 40 * max(seconds(10_000), 0.01)


def test_a_tuple_of_lists_that_all_hold_it_is_refused_before_it_takes_forever() -> None:
    lists: list[list[object]] = [[] for _ in range(4000)]
    whole = tuple(lists)
    for item in lists:
        item.append(whole)
    with pytest.raises(InputError, match="in too many circles"):
        pickle_bytes(whole)


def test_nothing_of_a_hostile_pickle_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    source = b"cos\nsystem\n(X" + bytes([len(f"touch {canary}")]) + b"\0\0\0" + f"touch {canary}".encode() + b"tR."
    written = again(b"\x80\x02" + source)
    assert not canary.exists()
    assert b"cos\nsystem\n" in written
    pickle.loads(written)
    assert canary.exists()


def test_writing_imports_nothing_that_the_file_names(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    script = (
        "import sys\n"
        "from precconv.formats.unpickle import unpickle\n"
        "from precconv.formats.pickle_out import pickle_bytes\n"
        "inert = unpickle(b'\\x80\\x02cevil\\nThing\\n)R}X\\x01\\0\\0\\0aK\\x01sb.')\n"
        "out = pickle_bytes(inert.root)\n"
        "assert b'cevil\\nThing' in out\n"
        "assert 'evil' not in sys.modules and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)
    assert not (tmp_path / "canary").exists()


def test_a_module_that_an_old_model_refers_to_is_its_class() -> None:
    node = Persistent(("module", Global("collections", "OrderedDict"), "a.py", "source"))
    assert pickle.loads(pickle_bytes([node, node])) == [collections.OrderedDict] * 2


@pytest.mark.parametrize("pid", ["12", 12, ("file", "x"), None])
def test_persistent_ids_that_torch_does_not_know_are_refused(pid: object) -> None:
    with pytest.raises(InputError, match="persistent id"):
        pickle_bytes([Persistent(pid)])


def test_a_replaced_node_is_replaced_everywhere_and_once() -> None:
    inert = unpickle(pickle.dumps([Plain(a=1)] * 2 + [Plain(a=1)], 2))
    root: Any = inert.root
    other = Placeholder("reduce", Global("collections", "Counter"), (), None, root[0].edits)
    loaded = pickle.loads(pickle_bytes(root, replace={id(root[0]): other}))
    assert type(loaded[0]) is collections.Counter
    assert loaded[0] is loaded[1]
    assert type(loaded[2]) is Plain


def test_weights_only_loads_what_it_loaded(tmp_path: Path) -> None:
    value = {
        "a": collections.OrderedDict([("x", 1)]),
        "b": [1, 2.5, None, True, 2**70, "\u20ac", (1, (2, 3, 4, 5)), bytearray(b"abc"), b"bytes"],
        "c": {1, 2},
        "d": torch.Size([1, 2]),
        "e": torch.device("cpu"),
        "f": torch.float16,
        "g": collections.Counter("aab"),
        "h": complex(1, 2),
    }
    torch.save(value, tmp_path / "a.pt")
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        data = archive.read("a/data.pkl")
    from torch._weights_only_unpickler import load

    assert load(io.BytesIO(again(data)), encoding="utf-8") == load(io.BytesIO(data), encoding="utf-8") == value
