"""Models of every kind that tests convert, as the libraries themselves build them: small and random.

The libraries are imported where a model is built, which takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch


def train(model: Any) -> None:
    """Values as training leaves them: nothing is all ones or zeros, and a routing bias has a large offset."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            offset = 7 if name.endswith("e_score_correction_bias") else 0
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(tensor + offset + 0.02 * (noise.abs() if "running_var" in name else noise))


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


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, **ends))


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


def llava() -> Any:
    """Text and vision with a config each; 4 image tokens an image."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8, dtype="float32")
    text = LlamaConfig(**SMALL, num_key_value_heads=2, dtype="float32")
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=95))


def llava_logits(model: Any) -> Any:
    ids = torch.tensor([[1, *[model.config.image_token_index] * 4, 2, 3]])
    return model(input_ids=ids, pixel_values=random(1, 1, 3, 16, 16).to(model.dtype)).logits


def bert_states(model: Any) -> Any:
    return model(input_ids=tokens()).last_hidden_state


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


def clip_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextModel(CLIPTextConfig(vocab_size=8, max_position_embeddings=8, projection_dim=16, **sizes, **ends))


def t5_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=8, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")
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


def vae(**options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        **options,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def run_vae(model: Any) -> Any:
    return model(random(1, 1, 3, 16, 16).to(model.dtype)).sample
