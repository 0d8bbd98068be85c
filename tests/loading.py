"""Converted models in the hands of the libraries that load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

__all__ = ["HALVES", "assert_close", "assert_same_state", "dtypes", "loaded", "one_thread", "stored"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Steps of the target's precision, of the largest output, that rounded weights and activations may be off.
TOLERANCE = 8


@contextmanager
def one_thread() -> Iterator[None]:
    """For models so small that torch's threads do little but wait for each other, the more so beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loaded(like: Any, folder: Path, **options: Any) -> Any:
    """The model in ``folder`` by the class of ``like``, with no key missing, left over or of another shape."""
    model, told = type(like).from_pretrained(folder, output_loading_info=True, **options)
    assert {key: value for key, value in told.items() if value} == {}
    return model.eval()


def stored(folder: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """All tensors of the files right in a directory, each name once."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(pattern)):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    assert found
    return found


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def assert_same_state(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """The same names with the same dtypes and the same values."""
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in want.items()}
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def assert_close(got: torch.Tensor, exact: torch.Tensor, to: str) -> None:
    """Off by what rounding to the target's precision explains, and not equal: something was rounded."""
    error = float((got.float() - exact.float()).abs().max() / exact.float().abs().max())
    assert 0 < error < TOLERANCE * torch.finfo(HALVES[to]).eps
