"""Wrapper prefixes: what is seen through, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv.names import WRAPPERS, canonical


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_goes_wherever_it_stands(wrapper: str) -> None:
    assert canonical(f"{wrapper}.fc.weight") == "fc.weight"
    assert canonical(f"layers.0.{wrapper}.fc.{wrapper}.weight") == "layers.0.fc.weight"
    assert canonical(f"{wrapper}.{wrapper}.weight") == "weight"


@pytest.mark.parametrize(
    "name", ["fc.weight", "modules.0.weight", "my_module.weight", "module", "a.module", "_orig_mod", "", "."]
)
def test_other_names_stay(name: str) -> None:
    assert canonical(name) == name


PARTS = st.sampled_from([*WRAPPERS, "fc", "0", "modules", "", "weight"])


@given(st.lists(PARTS, min_size=1, max_size=6).map(".".join))
def test_the_canonical_name_has_no_wrappers_but_the_same_rest(name: str) -> None:
    *owners, leaf = canonical(name).split(".")
    assert not set(owners) & set(WRAPPERS)
    assert [*owners, leaf] == [*(p for p in name.split(".")[:-1] if p not in WRAPPERS), leaf]
    assert canonical(canonical(name)) == canonical(name)
