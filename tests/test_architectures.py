"""Models built by the libraries themselves, small and random: converted, they are what their own classes want.

What a class keeps in FP32 is not written down here but asked of it: the model is loaded in the target's dtype and
saved again, and the dtypes in that file are the truth.  Norms are found by the class of their module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import precconv

from .tiny_models import (
    bert,
    deepseek_v3,
    flux,
    llama,
    logits,
    mamba2,
    mixtral,
    qwen3_next,
    random,
    run_flux,
    run_unet,
    run_vae,
    run_wan,
    t5,
    t5_logits,
    tokens,
    train,
    unet,
    vae,
    wan,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings are not this project's

Tensors = Mapping[str, torch.Tensor]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Steps of the target's precision, of the largest output, that rounded weights and activations may be off.
TOLERANCE = 8


@dataclass(frozen=True)
class Case:
    """A model to build, and what the universal table keeps on purpose beside what its class and norms ask for."""

    name: str
    build: Callable[[], Any]
    run: Callable[[Any], Any]  #: an output for a fixed input
    adds: Mapping[str, str] = field(default_factory=dict)  #: a pattern of names -> why it is kept
    adds_fp16: Mapping[str, str] = field(default_factory=dict)  #: for FP16 alone

    def added(self, to: str) -> Mapping[str, str]:
        return self.adds if to == "bf16" else {**self.adds, **self.adds_fp16}


# torchvision and timm: plain modules, which keep nothing themselves


def resnet18() -> Any:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def convnext() -> Any:
    import timm

    return timm.create_model(
        "convnext_atto", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), ls_init_value=1e-6
    )


def run_image(model: Any) -> Any:
    return model(random(1, 2, 3, 64, 64))


STATE = "recurrent state enters exp or softplus at every step; mamba_ssm itself keeps it in FP32"

LAYER_SCALE = "it starts at 1e-6, an FP16 subnormal, and is one number a channel"

CASES = {
    "transformers": (
        Case("llama", llama, logits),
        Case("mixtral", mixtral, logits),
        Case("deepseek_v3", deepseek_v3, logits),
        Case("mamba2", mamba2, logits, {r"mixer\.(A_log|D|dt_bias)$": STATE}),
        Case("t5", t5, t5_logits),
        Case("bert", bert, lambda model: model(input_ids=tokens()).last_hidden_state),
        Case("qwen3_next", qwen3_next, logits, {r"linear_attn\.(A_log|dt_bias)$": STATE}),
    ),
    "diffusers": (
        Case("unet", unet, run_unet),
        Case("flux", flux, run_flux),
        Case("wan", wan, run_wan),
        Case("vae", vae, run_vae),
    ),
    "torchvision": (Case("resnet18", resnet18, run_image),),
    "timm": (Case("convnext", convnext, run_image, adds_fp16={r"blocks\.\d+\.gamma$": LAYER_SCALE}),),
}

# What a class wants, asked of the class


@dataclass(frozen=True)
class Built:
    """A model in FP32 and its checkpoint."""

    case: Case
    library: str
    model: Any
    folder: Path
    norms: frozenset[str]  #: the tensors of modules whose class is a norm's, as they are called in the file

    @property
    def file(self) -> Path:
        return weights(self.folder)


def weights(folder: Path) -> Path:
    [file] = folder.glob("*.safetensors")
    return file


def save(model: Any, folder: Path) -> Path:
    """As the library publishes a model: with its config, where it has one."""
    folder.mkdir(parents=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def load(built: Built, folder: Path, dtype: torch.dtype | str) -> tuple[Any, Mapping[str, Any]]:
    """With the library's own loader, and what that has to say about the keys."""
    if not hasattr(built.model, "save_pretrained"):
        model = built.case.build().eval()
        missing, unexpected = model.load_state_dict(load_file(weights(folder)), strict=False)
        return model, {"missing_keys": missing, "unexpected_keys": unexpected}
    key = "dtype" if built.library == "transformers" else "torch_dtype"
    model, told = type(built.model).from_pretrained(folder, **{key: dtype}, output_loading_info=True)
    return model.eval(), told


def fp32_names(file: Path) -> set[str]:
    return {t.name for t in precconv.inspect(file) if t.dtype == "fp32"}


def norm_names(case: Case, folder: Path) -> frozenset[str]:
    """A file is asked for its FP64 tensors after every norm was made FP64: names on disk are not those of modules."""
    model = case.build()
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.double()
    return frozenset(t.name for t in precconv.inspect(weights(save(model, folder))) if t.dtype == "fp64")


@pytest.fixture(scope="module", params=[pytest.param((k, c), id=c.name) for k, cases in CASES.items() for c in cases])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    library, case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    torch.manual_seed(0)
    model = case.build().eval()
    train(model)
    return Built(case, library, model, save(model, folder / "source"), norm_names(case, folder / "norms"))


@pytest.fixture(scope="module", params=list(HALVES))
def to(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def converted(built: Built, to: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the converted model: the weights under their own name, the config with the new dtype."""
    folder = tmp_path_factory.mktemp(f"{built.case.name}-{to}")
    precconv.convert(built.file, to=to, output=folder / built.file.name, verify="full")
    for path in built.folder.glob("*.json"):
        config = json.loads(path.read_text("utf-8"))
        if "dtype" in config:
            config["dtype"] = str(HALVES[to]).removeprefix("torch.")
        (folder / path.name).write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="module")
def reference(built: Built, to: str) -> Any:
    """The FP32 checkpoint, loaded in the target's dtype by its own class."""
    return load(built, built.folder, HALVES[to])[0]


def kept_by_class(reference: Any, tmp_path: Path) -> set[str]:
    if not hasattr(reference, "save_pretrained"):
        return set()
    return fp32_names(weights(save(reference, tmp_path / "reference")))


# The tests


def test_exactly_what_the_class_its_norms_and_the_tables_want_stays_fp32(
    built: Built, to: str, converted: Path, reference: Any, tmp_path: Path
) -> None:
    wanted = kept_by_class(reference, tmp_path) | built.norms
    names = {t.name for t in precconv.inspect(built.file) if t.dtype == "fp32"}
    for pattern in built.case.added(to):
        found = {name for name in names if re.search(pattern, name)}
        assert found - wanted, f"{pattern} adds nothing"
        wanted |= found
    assert built.norms
    assert fp32_names(weights(converted)) == wanted


def test_every_value_is_the_source_s_or_its_cast(built: Built, to: str, converted: Path) -> None:
    source, output = load_file(built.file), load_file(weights(converted))
    assert source.keys() == output.keys()
    for name, tensor in source.items():
        assert output[name].dtype in (tensor.dtype, HALVES[to])
        assert torch.equal(output[name], tensor.to(output[name].dtype)), name


def test_the_converted_model_loads_without_missing_or_unexpected_keys(built: Built, to: str, converted: Path) -> None:
    told = load(built, converted, HALVES[to])[1]
    assert {key: value for key, value in told.items() if value} == {}


def test_the_converted_model_computes_what_its_library_computes_in_that_dtype(
    built: Built, to: str, converted: Path, reference: Any
) -> None:
    model, _ = load(built, converted, "auto" if built.library == "transformers" else HALVES[to])
    assert dtypes(model) == dtypes(reference)
    with torch.inference_mode():
        exact, got = built.case.run(built.model), built.case.run(model).float()
        if built.library in ("transformers", "diffusers"):
            assert torch.equal(got, built.case.run(reference).float())
    error = float((got - exact).abs().max() / exact.abs().max())
    assert 0 < error < TOLERANCE * torch.finfo(HALVES[to]).eps


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def test_the_uniform_way_gives_every_float_one_dtype(built: Built, to: str, tmp_path: Path) -> None:
    output = tmp_path / "uniform.safetensors"
    precconv.convert(built.file, to=to, output=output, norms="cast", preset="none", mixed="cast")
    assert {t.dtype.name for t in precconv.inspect(output) if t.dtype.kind == "float" and t.shape} == {to}


def test_transformers_rounds_fp32_norms_while_loading_a_class_that_does_not_keep_them(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder = save(llama(), tmp_path / "llama")
    norms = norm_names(Case("llama", llama, logits), tmp_path / "norms")
    loaded = dtypes(LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    assert norms <= fp32_names(weights(folder))
    assert {loaded[name] for name in norms} == {torch.bfloat16}
