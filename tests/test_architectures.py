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


def tokens() -> torch.Tensor:
    return torch.arange(1, 25).reshape(2, 12)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits(model: Any) -> Any:
    return model(input_ids=tokens()).logits


# transformers

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4))


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    moe = {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, **heads, **experts, **moe))


def mamba2() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
    )
    return Mamba2ForCausalLM(config)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return T5ForConditionalGeneration(config)


def t5_logits(model: Any) -> Any:
    return model(input_ids=tokens(), decoder_input_ids=tokens()).logits


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SMALL))


def qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL,
            **linear,
            **experts,
            num_key_value_heads=2,
            head_dim=8,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        )
    )


# diffusers


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def run_unet(model: Any) -> Any:
    sample, text = random(1, 1, 4, 8, 8).to(model.dtype), random(2, 1, 5, 16).to(model.dtype)
    return model(sample, torch.tensor([500]), text).sample


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=True,
    )


def run_flux(model: Any) -> Any:
    return model(
        hidden_states=random(1, 1, 16, 8).to(model.dtype),
        encoder_hidden_states=random(2, 1, 5, 16).to(model.dtype),
        pooled_projections=random(3, 1, 16).to(model.dtype),
        timestep=torch.tensor([0.5]).to(model.dtype),
        guidance=torch.tensor([3.5]).to(model.dtype),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(5, 3),
    ).sample


def wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        cross_attn_norm=True,
    )


def run_wan(model: Any) -> Any:
    text = random(2, 1, 5, 16).to(model.dtype)
    return model(random(1, 1, 4, 2, 8, 8).to(model.dtype), torch.tensor([500]), text).sample


def vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def run_vae(model: Any) -> Any:
    return model(random(1, 1, 3, 16, 16).to(model.dtype)).sample


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


def train(model: Any) -> None:
    """Values as training leaves them: nothing is all ones or zeros, and a routing bias has a large offset."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            offset = 7 if name.endswith("e_score_correction_bias") else 0
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(tensor + offset + 0.02 * (noise.abs() if "running_var" in name else noise))


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
