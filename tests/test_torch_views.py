"""Views, ties and gaps: what a planned torch output does with memory that tensors share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.dtypes import BF16, FP16, FP32

from .torch_files import saved
from .torch_writing import (
    check_archive,
    check_same,
    fill,
    load,
    planned,
    values,
    written,
)


def test_tied_tensors_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    x = values(1000)
    path = saved({"a": x, "b": x, "view": x.view(10, 100), "part": x[100:200]}, tmp_path / "a.pt")
    out = written(path)
    check_same(path, out)
    loaded = load(out)
    assert loaded["a"] is loaded["b"]
    loaded["a"][100] = 7
    assert loaded["part"][0] == 7 == loaded["view"][1, 0]
    assert out.stat().st_size < 2000 + 2500


def test_a_large_storage_shrinks_to_what_is_seen_of_it(tmp_path: Path) -> None:
    big = values(100_000)
    path = saved({"a": big[500:600], "b": big[90_000:90_010], "c": big[550:650]}, tmp_path / "a.pt")
    for out in (written(path), written(path, choose=lambda *_: False, target=tmp_path / "kept.pt")):
        loaded = load(out)
        assert loaded["a"].untyped_storage().nbytes() == 160 * loaded["a"].element_size()
        assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1
        loaded["a"][60] = 1234
        assert loaded["c"][10] == loaded["a"][60]
    check_same(path, tmp_path / "a-out.pt")


def test_disjoint_views_with_different_fates_get_storages_of_their_own(tmp_path: Path) -> None:
    flat = values(300)
    path = saved({"norm": flat[:100], "w": flat[100:250].view(10, 15), "b": flat[250:]}, tmp_path / "a.pt")
    out = written(path, choose=lambda n, _: n != ".norm")
    loaded = load(out)
    assert [t.dtype for t in loaded.values()] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert torch.equal(loaded["norm"], flat[:100])
    assert torch.equal(loaded["w"], flat[100:250].view(10, 15).bfloat16())
    assert loaded["w"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()
    assert loaded["norm"].untyped_storage().nbytes() == 400


def test_views_that_overlap_keep_the_source_when_one_of_them_is_kept(tmp_path: Path) -> None:
    x = values(100)
    path = saved({"a": x, "deep": [{"b": x[10:20]}], "free": values(5)}, tmp_path / "a.pt")
    with planned(path, {".a": BF16, ".free": BF16}) as (file, out):
        [amended] = out.amended
        assert (amended.name, amended.wanted, amended.got) == (".a", BF16, FP32)
        assert amended.why == "it shares memory with 'deep.0.b'"
        fill(file, out, tmp_path / "out.pt")
    loaded = load(tmp_path / "out.pt")
    assert loaded["a"].dtype == loaded["deep"][0]["b"].dtype == torch.float32
    assert loaded["a"].data_ptr() + 40 == loaded["deep"][0]["b"].data_ptr()
    assert loaded["free"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("source", "first", "second", "got"),
    [
        (torch.float32, BF16, FP16, FP32),
        (torch.float64, BF16, FP16, FP32),
        (torch.float64, BF16, FP32, FP32),
        (torch.float16, BF16, FP32, FP32),
        (torch.float32, BF16, FP32, FP32),
        (torch.float16, FP16, FP32, FP16),
    ],
)
def test_views_that_overlap_get_a_dtype_that_holds_what_was_wanted(
    tmp_path: Path, source: torch.dtype, first: Any, second: Any, got: Any
) -> None:
    x = values(10, dtype=source)
    path = saved({"a": x, "b": x[2:]}, tmp_path / "a.pt")
    with planned(path, {".a": first, ".b": second}) as (file, out):
        assert {a.name: a.got for a in out.amended} == {
            n: got for n, wanted in ((".a", first), (".b", second)) if wanted is not got
        }
        fill(file, out, tmp_path / "out.pt")
    loaded = load(tmp_path / "out.pt")
    assert str(loaded["a"].dtype) == f"torch.{got.torch}"
    assert torch.equal(loaded["b"], x[2:].to(loaded["b"].dtype))
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


def test_one_tensor_chosen_under_two_names(tmp_path: Path) -> None:
    x = values(10)
    path = saved({"a": x, "b": x}, tmp_path / "a.pt")
    with planned(path, {".a": BF16, ".b": FP32}) as (_, out):
        assert [(a.name, a.got, a.why) for a in out.amended] == [(".a", FP32, "it shares memory with '.b'")]
    with planned(path, {".a": BF16, ".b": BF16}) as (_, out):
        [piece] = out.pieces
        assert [(s.name, s.first, s.end) for s in piece.tensors] == [(".a", 0, 10), (".b", 0, 10)]


def test_elements_that_no_tensor_shows_become_zeros(tmp_path: Path) -> None:
    x = values(64, 6)
    x[:, 1::2] = 1e38  # would overflow fp16
    path = saved({"a": x[:, ::2]}, tmp_path / "a.pt")
    out = written(path, to=FP16)
    check_same(path, out, to=FP16)
    storage = load(out)["a"]
    whole = torch.as_strided(storage, (64 * 6 - 1,), (1,), 0)
    assert torch.equal(whole[1::2], torch.zeros(191, dtype=torch.float16))


@pytest.mark.parametrize(
    ("view", "gaps"),
    [
        (lambda x: x[:, ::2], True),
        (lambda x: x.t(), False),
        (lambda x: x[3:9], False),
        (lambda x: x[:, :5], True),
        (lambda x: x[0].expand(4, 6), False),
        (lambda x: x.as_strided((4, 3), (1, 2), 5), False),
        (lambda x: x.as_strided((2, 2, 2), (1, 1, 5), 0), True),
        (lambda x: x.unfold(0, 3, 2), False),
        (lambda x: x.permute(1, 0)[::3], True),
    ],
)
def test_what_is_shown_is_known_element_by_element(tmp_path: Path, view: Any, gaps: bool) -> None:
    x = values(20, 6)
    seen = view(x)
    path = saved({"a": seen}, tmp_path / "a.pt")
    mark = torch.zeros(120)
    at = torch.arange(120.0).view(20, 6)
    mark[view(at).reshape(-1).long()] = 1
    first, last = mark.nonzero()[0, 0], mark.nonzero()[-1, 0]
    expected = bytes(mark[first : last + 1].to(torch.uint8).tolist())
    with planned(path, {".a": BF16}) as (_, out):
        [piece] = out.pieces
        assert piece.has_gaps == gaps == (0 in expected)
        for step in (1, 7, 64, 120):
            parts = [piece.shown(i, min(step, piece.numel - i)) for i in range(0, piece.numel, step)]
            assert b"".join(parts) == expected
    check_same(path, written(path))


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...], int, Any]]:
    """Views of one storage of 60 elements: shape, stride, offset, fate."""
    views = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        stride = tuple(draw(st.integers(0, 9)) for _ in shape)
        span = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True)) + 1
        if span <= 60:
            views.append(
                (shape, stride, draw(st.integers(0, 60 - span)), draw(st.sampled_from([BF16, FP16, FP32, None])))
            )
    return views


@given(views=layouts(), use_zip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_random_views_with_random_fates(tmp_path_factory: pytest.TempPathFactory, views: Any, use_zip: bool) -> None:
    folder = tmp_path_factory.mktemp("views")
    x = values(60)
    value = {str(i): x.as_strided(*view[:3]) for i, view in enumerate(views)}
    path = saved(value, folder / "a.pt", use_zip=use_zip)
    with planned(path, {f".{i}": v[3] for i, v in enumerate(views) if v[3] is not None}) as (file, out):
        fill(file, out, folder / "out.pt")
        changed = {a.name: a.got for a in out.amended}
    check_archive(folder / "out.pt")
    loaded = load(folder / "out.pt")
    for i, view in enumerate(views):
        kind = changed.get(f".{i}", view[3] or FP32)
        assert str(loaded[str(i)].dtype) == f"torch.{kind.torch}"
        assert loaded[str(i)].stride() == value[str(i)].stride()
        assert torch.equal(loaded[str(i)], value[str(i)].to(loaded[str(i)].dtype))
        if view[3] is None:
            assert kind is FP32
    total = sum(
        t.nbytes() for t in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in loaded.values()}.values()
    )
    assert total <= 240
