"""Pipelines that diffusers saved, converted: each component by its own rules, and all of it loads as a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import precconv

from .command import run
from .loading import HALVES, assert_close, assert_same_state, dtypes, loaded, one_thread, stored
from .tiny_pipelines import flux_like, image, quiet, sd_like

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings are not this project's

KINDS: Mapping[str, Callable[[], Any]] = {"sd": sd_like, "flux": flux_like}


class Saved:
    """A pipeline in FP32 and the directories it was saved to, made when first asked for."""

    def __init__(self, kind: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.pipeline = folder, KINDS[kind]()
        self.models = {name: c for name, c in self.pipeline.components.items() if isinstance(c, torch.nn.Module)}

    def saved(self, name: str, **options: Any) -> Path:
        path = self.folder / name
        if not path.exists():
            self.pipeline.save_pretrained(path, **options)
        return path

    @property
    def plain(self) -> Path:
        return self.saved("plain")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Saved]]:
    made: dict[str, Saved] = {}

    def make(kind: str) -> Saved:
        if kind not in made:
            made[kind] = Saved(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    with one_thread():
        yield make


@pytest.fixture(params=list(KINDS))
def saved(request: pytest.FixtureRequest, pipelines: Callable[[str], Saved]) -> Saved:
    return pipelines(str(request.param))


def load(folder: Path, **options: Any) -> Any:
    from diffusers import DiffusionPipeline

    return quiet(DiffusionPipeline.from_pretrained(folder, **options))


def assert_is_the_cast(saved: Saved, folder: Path, to: str, **options: Any) -> None:
    """It loads as the libraries' own cast of the source: bit for bit, images too."""
    got, reference = (load(f, torch_dtype=HALVES[to], **o) for f, o in ((folder, options), (saved.plain, {})))
    for name, model in saved.models.items():
        assert_same_state(getattr(got, name).state_dict(), getattr(reference, name).state_dict())
        loaded(model, folder / name, **options)
    output = image(got)
    assert torch.equal(output, image(reference))
    assert_close(output, image(saved.pipeline), to)


def files(folder: Path) -> Iterator[str]:
    return (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def others(folder: Path) -> dict[str, bytes]:
    """What is neither weights nor the config of a component with weights."""
    with_weights = {p.parent for p in folder.rglob("*.safetensors")}
    found = (p for p in folder.rglob("*") if p.is_file() and p.parent not in with_weights)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


@pytest.mark.parametrize("to", list(HALVES))
def test_a_pipeline_loads_as_the_librarys_own_cast_of_it(saved: Saved, to: str, tmp_path: Path) -> None:
    precconv.convert(saved.plain, to=to, output=tmp_path / "out")
    assert_is_the_cast(saved, tmp_path / "out", to)
    assert sorted(files(tmp_path / "out")) == sorted(files(saved.plain))
    assert {"model_index.json", "tokenizer/tokenizer.json"} < others(saved.plain).keys()
    assert others(tmp_path / "out") == others(saved.plain)


def test_configs_name_the_new_dtype_where_they_named_one_and_else_are_untouched(saved: Saved, tmp_path: Path) -> None:
    precconv.convert(saved.plain, to="bf16", output=tmp_path / "out")
    for name in saved.models:
        before, after = ((f / name / "config.json").read_text("utf-8") for f in (saved.plain, tmp_path / "out"))
        assert after == before.replace('"dtype": "float32"', '"dtype": "bfloat16"')
        assert ("bfloat16" in after) == name.startswith("text_encoder")


def test_a_variant_of_a_sharded_pipeline_goes_in_and_the_same_shards_come_out(saved: Saved, tmp_path: Path) -> None:
    source = saved.saved("sharded-fp16", variant="fp16", max_shard_size="40KB")
    part = next(name for name in ("unet", "transformer") if name in saved.models)
    index = "diffusion_pytorch_model.safetensors.index.fp16.json"
    assert (source / part / index).exists()
    precconv.convert(source, to="fp16", output=tmp_path / "same", from_variant="fp16", variant="fp16")
    assert sorted(files(tmp_path / "same")) == sorted(files(source))
    assert_is_the_cast(saved, tmp_path / "same", "fp16", variant="fp16")
    made = json.loads((tmp_path / "same" / part / index).read_text("utf-8"))
    assert made["weight_map"] == json.loads((source / part / index).read_text("utf-8"))["weight_map"]
    assert made["metadata"]["total_size"] == sum(t.nbytes for t in stored(tmp_path / "same" / part).values())


def test_the_only_variant_of_a_pipeline_is_converted_and_loads_without_one(saved: Saved, tmp_path: Path) -> None:
    source = saved.saved("fp16", variant="fp16")
    precconv.convert(source, to="bf16", output=tmp_path / "out")
    assert_is_the_cast(saved, tmp_path / "out", "bf16")
    assert [name for name in files(tmp_path / "out") if "fp16" in name] == []


def test_an_output_variant_loads_as_one(saved: Saved, tmp_path: Path) -> None:
    precconv.convert(saved.plain, to="bf16", output=tmp_path / "out", variant="bf16")
    assert_is_the_cast(saved, tmp_path / "out", "bf16", variant="bf16")
    weights = [name for name in files(tmp_path / "out") if name.endswith(".safetensors")]
    assert len(weights) == len(saved.models)
    assert all(name.endswith("model.bf16.safetensors") for name in weights)


def test_a_pipeline_is_cut_into_shards_that_diffusers_finds(saved: Saved, tmp_path: Path) -> None:
    precconv.convert(saved.plain, to="bf16", output=tmp_path / "out", shard_size="20KB")
    assert_is_the_cast(saved, tmp_path / "out", "bf16")
    names = set(files(tmp_path / "out"))
    part = next(name for name in ("unet", "transformer") if name in saved.models)
    assert f"{part}/diffusion_pytorch_model.safetensors.index.json" in names
    assert f"{part}/diffusion_pytorch_model.safetensors" not in names
    assert "text_encoder/model.safetensors" in names or "text_encoder/model.safetensors.index.json" in names


# Components


def test_each_component_gets_exactly_what_is_asked_for_it(pipelines: Callable[[str], Saved], tmp_path: Path) -> None:
    saved, out = pipelines("sd"), tmp_path / "out"
    options = ("--to", "bf16", "--component", "unet=fp16,vae=fp32,text_encoder=keep")
    assert run(saved.plain, *options, "-o", out).exit_code == 0
    for name in ("vae", "text_encoder"):
        for path in (saved.plain / name).iterdir():
            assert (out / name / path.name).read_bytes() == path.read_bytes()
    halves = stored(out / "unet")
    assert {t.dtype for t in halves.values()} == {torch.float16, torch.float32}
    precconv.convert(saved.plain / "unet", to="fp16", output=tmp_path / "unet-alone")
    assert_same_state(halves, stored(tmp_path / "unet-alone"))
    assert (out / "model_index.json").read_bytes() == (saved.plain / "model_index.json").read_bytes()
    kinds = {"unet": torch.float16, "default": torch.float32}
    pipeline = load(out, torch_dtype=kinds)
    assert {name: getattr(pipeline, name).dtype for name in saved.models} == {
        "unet": torch.float16, "vae": torch.float32, "text_encoder": torch.float32,
    }  # fmt: skip
    assert set(dtypes(pipeline.vae).values()) == {torch.float32}


def test_a_components_config_says_its_own_target(pipelines: Callable[[str], Saved], tmp_path: Path) -> None:
    saved = pipelines("flux")
    targets = {"text_encoder": "fp16", "text_encoder_2": "fp32", "vae": "keep"}
    precconv.convert(saved.plain, to="bf16", output=tmp_path / "out", component=targets)
    said = {
        name: json.loads((tmp_path / "out" / name / "config.json").read_text("utf-8")).get("dtype")
        for name in saved.models
    }
    assert said == {"text_encoder": "float16", "text_encoder_2": "float32", "transformer": None, "vae": None}
    assert torch.bfloat16 in {t.dtype for t in stored(tmp_path / "out/transformer").values()}


def test_an_unknown_component_is_a_usage_error_with_the_nearest_name(
    pipelines: Callable[[str], Saved], tmp_path: Path
) -> None:
    for asked, hint in (("unnet=fp16", "did you mean 'unet'?"), ("foo=fp16", "text_encoder, unet, vae")):
        done = run(pipelines("sd").plain, "--to", "bf16", "--component", asked, "-o", tmp_path / "out")
        assert done.exit_code == 2
        assert f"there is no component {asked.partition('=')[0]!r}" in done.stderr
        assert hint in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rule_with_a_components_name_is_about_that_one_alone(
    pipelines: Callable[[str], Saved], tmp_path: Path
) -> None:
    precconv.convert(pipelines("sd").plain, to="bf16", output=tmp_path / "out", rule=["unet/conv_in.*=fp32"])
    assert stored(tmp_path / "out/unet")["conv_in.weight"].dtype is torch.float32
    assert stored(tmp_path / "out/vae")["encoder.conv_in.weight"].dtype is torch.bfloat16
