"""Rules and checks over several components and shards: which they reach, and what they do to the output's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import precconv

from . import command
from .processes import tree
from .repos import INDEX, files, layers, load, pipeline, read_index, shard, sharded, stages, weight

COMPONENT = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Two components with a tensor of one name, and one of its own each."""
    return pipeline(
        tmp_path / "p",
        unet={"conv.a": weight(1), "conv.u": weight(2)},
        vae={"conv.a": weight(3), "conv.v": weight(4)},
    )


def dtypes(root: Path) -> dict[str, str]:
    """Of every tensor of a pipeline, ``component/name``."""
    return {
        f"{path.parent.name}/{name}": str(x.dtype).removeprefix("torch.")
        for path in sorted(root.glob("*/*.safetensors"))
        for name, x in load_file(path).items()
    }


ALL_BF16 = dict.fromkeys(("unet/conv.a", "unet/conv.u", "vae/conv.a", "vae/conv.v"), "bfloat16")

# Which tensors a rule reaches


@pytest.mark.parametrize(("options", "changed"), [
    ({}, {}),
    ({"rule": ["vae/conv.a=fp32"]}, {"vae/conv.a": "float32"}),
    ({"rule": ["vae/*=fp16"]}, {"vae/conv.a": "float16", "vae/conv.v": "float16"}),
    ({"rule": ["conv.a=fp32"]}, {"unet/conv.a": "float32", "vae/conv.a": "float32"}),
    ({"rule": ["conv.u=fp32"]}, {"unet/conv.u": "float32"}),
    ({"rule": ["unet/conv.a=fp16", "conv.a=fp32"]}, {"unet/conv.a": "float16", "vae/conv.a": "float32"}),
    ({"rule": ["conv.a=fp32", "unet/conv.a=fp16"]}, {"unet/conv.a": "float32", "vae/conv.a": "float32"}),
    ({"keep": ["vae/*.v"]}, {"vae/conv.v": "float32"}),
    ({"component": {"vae": "fp16"}}, {"vae/conv.a": "float16", "vae/conv.v": "float16"}),
    ({"component": ["vae=keep"]}, {"vae/conv.a": "float32", "vae/conv.v": "float32"}),
    ({"component": {"vae": "keep"}, "rule": ["vae/conv.v=fp16"]}, {"vae/conv.a": "float32", "vae/conv.v": "float16"}),
    ({"rule": ["vae/conv.a=drop"]}, {"vae/conv.a": None}),
])  # fmt: skip
def test_a_rule_reaches_the_tensors_of_every_component_or_of_the_one_it_begins_with(
    pipe: Path, options: dict[str, Any], changed: dict[str, str | None]
) -> None:
    planned = precconv.plan(pipe, to="bf16", **options)
    report = precconv.convert(pipe, to="bf16", **options)
    want = {name: to for name, to in {**ALL_BF16, **changed}.items() if to is not None}
    assert dtypes(pipe.with_name("p-bf16")) == want
    assert {t.name: t.item.to.torch for t in report.tensors} == want
    assert planned.items == report.plan.items
    assert {i.src.name for i in planned.dropped} == {name for name, to in changed.items() if to is None}


def test_a_regular_expression_can_be_about_one_component_and_is_shown_as_it_was_given(pipe: Path) -> None:
    planned = precconv.plan(pipe, to="bf16", rule=["re:^vae/conv.a=fp16"])
    assert [(i.src.name, i.to.name) for i in planned.items if i.why == "rule re:^vae/conv.a"] == [
        ("vae/conv.a", "fp16")
    ]


@pytest.mark.parametrize(("rule", "hint"), [
    ("vae/conv.u=fp32", "conv.u"), ("conv.x=fp32", "conv."), ("vea/conv.a=keep", "vae/conv.a"),
    ("re:^vae/conv.x=keep", ""), ("vae/=keep", ""),
])  # fmt: skip
def test_a_rule_that_reaches_no_tensor_of_any_component_is_an_error_that_names_the_nearest(
    pipe: Path, rule: str, hint: str
) -> None:
    before = tree(pipe.parent)
    for convert in (precconv.plan, precconv.convert):
        with pytest.raises(precconv.RuleError, match="matches no tensor") as caught:
            convert(pipe, to="bf16", rule=[rule])
        assert hint in (caught.value.hint or "")
    done = command.run(pipe, "--to", "bf16", "--rule", rule)
    assert (done.exit_code, done.stdout) == (2, "")
    assert tree(pipe.parent) == before


def test_a_component_that_is_not_there_is_an_error_with_the_nearest(pipe: Path) -> None:
    with pytest.raises(precconv.UsageError, match="there is no component 'uent'") as caught:
        precconv.convert(pipe, to="bf16", component={"uent": "fp16"})
    assert caught.value.hint == "did you mean 'unet'?"


def test_a_component_that_is_kept_is_the_same_tensors_with_the_config_it_had(pipe: Path) -> None:
    (pipe / "vae/config.json").write_text('{"_class_name": "Toy", "torch_dtype": "float32"}')
    (pipe / "unet/config.json").write_text('{"_class_name": "Toy", "torch_dtype": "float32"}')
    precconv.convert(pipe, to="bf16", component={"vae": "keep"})
    old, new = files(pipe), files(pipe.with_name("p-bf16"))
    weights = {f"unet/{COMPONENT}", f"vae/{COMPONENT}"}  # whose headers are aligned in another way
    assert {n for n in old if old[n] != new[n]} - weights == {"unet/config.json"}
    kept = [load_file(root / "vae" / COMPONENT) for root in (pipe, pipe.with_name("p-bf16"))]
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(x, kept[1][name]) and kept[1][name].dtype == x.dtype for name, x in kept[0].items())
    assert json.loads(new["unet/config.json"])["torch_dtype"] == "bfloat16"


def test_the_report_on_components_names_their_tensors_and_findings_with_the_component(
    tmp_path: Path, pipe: Path
) -> None:
    big = {"conv.a": torch.full((2, 2), 1e6), "conv.b": weight(1)}
    root = pipeline(tmp_path / "q", unet=big, vae=big)
    report = precconv.convert(root, to="fp16", on_overflow="keep", report=tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert [t["name"] for t in data["tensors"]] == ["unet/conv.a", "unet/conv.b", "vae/conv.a", "vae/conv.b"]
    assert [t["overflow"] for t in data["tensors"]] == [0] * 4, "as they were written"
    assert [f["tensor"] for f in data["findings"]] == ["unet/conv.a", "vae/conv.a"]
    assert {f["path"] for f in data["files"] if f["action"] == "converted"} == {f"unet/{COMPONENT}", f"vae/{COMPONENT}"}
    assert report.plan.groups()
    with pytest.raises(precconv.NumericError) as caught:
        precconv.convert(root, to="fp16", output=pipe.with_name("q2"))
    assert caught.value.report is not None
    assert [f.tensor for f in caught.value.report.findings] == ["unet/conv.a", "vae/conv.a"]
    assert "tensor 'unet/conv.a': 4 of 4" in str(caught.value)
    assert "tensor 'vae/conv.a': 4 of 4" in str(caught.value)


# Shards of which something is dropped


def test_a_shard_of_which_nothing_is_left_is_gone_and_the_others_are_counted_anew(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", layers(3))
    report = precconv.convert(root, to="bf16", rule=["layer.1.*=drop"])
    out = root.with_name("m-bf16")
    assert set(read_index(out)["weight_map"].values()) == {shard(1, 2), shard(2, 2)}
    assert files(out).keys() == {shard(1, 2), shard(2, 2), INDEX, "config.json"}
    assert load(out).keys() == {"layer.0.a", "layer.0.b", "layer.2.a", "layer.2.b"}
    assert [i.src.name for i in report.plan.dropped] == ["layer.1.a", "layer.1.b"]


def test_a_shard_of_which_something_is_left_keeps_its_name(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", layers(2), names=["x.safetensors", "y.safetensors"])
    precconv.convert(root, to="bf16", rule=["layer.1.b=drop"])
    assert set(read_index(root.with_name("m-bf16"))["weight_map"].values()) == {"x.safetensors", "y.safetensors"}


def test_one_shard_that_is_left_of_several_still_has_an_index(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", layers(3))
    precconv.convert(root, to="bf16", keep=["layer.2.a"], rule=["layer.[01].*=drop"])
    index = read_index(root.with_name("m-bf16"))
    assert index["weight_map"] == {"layer.2.a": shard(1, 1), "layer.2.b": shard(1, 1)}


@pytest.mark.parametrize("rule", ["*=drop", "re:layer.*=drop"])
def test_rules_that_drop_everything_are_refused(tmp_path: Path, rule: str) -> None:
    root = sharded(tmp_path / "m", layers(2))
    before = tree(tmp_path)
    done = command.run(root, "--to", "bf16", "--rule", rule)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the rules drop every tensor" in done.stderr
    assert tree(tmp_path) == before


# Numbers that do not fit


def too_large() -> list[dict[str, torch.Tensor]]:
    """Three shards; two hold tensors that fp16 cannot."""
    big = torch.full((2, 3), 1e6)
    return [{"a.big": big, "a.w": weight(1)}, {"b.w": weight(2)}, {"c.big": -big, "c.huge": big * 1e6}]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_tensor_of_every_shard_that_does_not_fit_is_named_and_nothing_is_left(
    tmp_path: Path, workers: int
) -> None:
    root = sharded(tmp_path / "m", too_large())
    before = tree(tmp_path)
    done = command.run(root, "--to", "fp16", "--workers", workers)
    assert (done.exit_code, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert [line.removeprefix("error: ").split(": ")[1] for line in lines if " do not fit fp16 " in line] == [
        "tensor 'a.big'", "tensor 'c.big'", "tensor 'c.huge'",
    ]  # fmt: skip
    assert lines[-1].startswith("hint: keep them (--keep ")
    assert tree(tmp_path) == before
    done = command.run(root, "--to", "fp16", "--report", tmp_path / "r.json", "--json")
    assert done.exit_code == 3
    report = json.loads((tmp_path / "r.json").read_text())
    assert json.loads(done.stdout) == report
    assert (report["ok"], report["output"], len(report["findings"]), len(report["tensors"])) == (False, None, 3, 5)
    assert tree(tmp_path).keys() - {"r.json"} == before.keys()


@pytest.mark.parametrize(("choice", "to"), [("keep", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("options", [{}, {"shard_size": 60}])
def test_tensors_that_get_another_dtype_count_as_they_were_written(
    tmp_path: Path, choice: Any, to: torch.dtype, options: dict[str, Any]
) -> None:
    root = sharded(tmp_path / "m", too_large())
    report = precconv.convert(root, to="fp16", on_overflow=choice, **options)
    out = root.with_name("m-fp16")
    index = read_index(out)  # compares total_size with the shards
    got = load(out)
    big = {"a.big", "c.big", "c.huge"}
    assert {name: x.dtype for name, x in got.items()} == {n: to if n in big else torch.float16 for n in got}
    assert index["metadata"]["total_size"] == 2 * 64 + 3 * 6 * to.itemsize
    assert report.output_bytes == sum(len(data) for name, data in files(out).items() if "-of-" in name)
    assert {t.name for t in report.tensors if t.item.why == "overflow in fp16"} == big
    assert [f.tensor for f in report.warnings if f.check == "overflow"] == ["a.big", "c.big", "c.huge"]
    assert all(torch.equal(got[n], x.to(got[n].dtype)) for p in too_large() for n, x in p.items())


def test_clamped_and_infinite_values_keep_the_planned_size(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", too_large())
    for choice, value in (("clamp", 65504.0), ("ieee", float("inf"))):
        precconv.convert(root, to="fp16", on_overflow=choice, output=tmp_path / choice)  # type: ignore[arg-type]
        assert read_index(tmp_path / choice)["metadata"]["total_size"] == 2 * (64 + 18)
        assert load(tmp_path / choice)["c.big"].tolist() == [[-value] * 3] * 2
    assert stages(tmp_path) == []


def test_too_much_underflow_in_any_shard_refuses(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", [{"a": weight(1)}, {"b": torch.full((4, 4), 1e-12)}])
    before = tree(tmp_path)
    with pytest.raises(precconv.NumericError, match=r"tensor 'b': 16 nonzero values \(100.00%\) become 0 in fp16"):
        precconv.convert(root, to="fp16", max_underflow=0.5)
    assert tree(tmp_path) == before
