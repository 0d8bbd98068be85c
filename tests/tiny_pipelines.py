"""Pipelines as diffusers builds them, with every component small and random: of Stable Diffusion's kind and of Flux's.

They make an image of 16 x 16 pixels in two steps.
"""

from __future__ import annotations

from typing import Any

import torch

from .tiny_models import clip_text, flux, t5_encoder, train, unet, vae

__all__ = ["flux_like", "image", "sd_like"]


def sd_like() -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    none: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    parts = {"vae": trained(vae()), "text_encoder": trained(clip_text()), "unet": trained(unet())}
    return quiet(StableDiffusionPipeline(**parts, tokenizer=_clip_tokenizer(), scheduler=scheduler, **none))


def flux_like() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("▁b", -1.0)]
    texts = {"text_encoder": trained(clip_text()), "text_encoder_2": trained(t5_encoder())}
    tokenizers = {"tokenizer": _clip_tokenizer(), "tokenizer_2": T5Tokenizer(vocab=pieces, extra_ids=0)}
    parts = {"vae": trained(vae(latent_channels=2, shift_factor=0.1)), "transformer": trained(flux())}
    return quiet(FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), **parts, **texts, **tokenizers))


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    words = ["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>", "a", "b"]
    return CLIPTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=8)


def trained(model: Any) -> Any:
    train(model)
    return model.eval()


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline: Any) -> torch.Tensor:
    """What it makes of a fixed prompt and noise."""
    options: dict[str, Any] = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt"}
    if "text_encoder_2" in pipeline.components:
        options["max_sequence_length"] = 8
    found = pipeline("a b", generator=torch.Generator().manual_seed(0), **options).images
    assert isinstance(found, torch.Tensor)
    return found
