"""Which component of a pipeline a tensor of a single-file checkpoint belongs to, under diffusers' names.

Such files hold a diffusion model, its VAE and its text encoders side by side, told apart by how names begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Component", "find_components"]


class Component(NamedTuple):
    """A part of a single file."""

    name: str  #: as diffusers' pipelines have it
    prefixes: tuple[str, ...]


class _Family(NamedTuple):
    marks: tuple[str, ...]  #: the family's files have a tensor whose name begins so; none: any file
    components: tuple[Component, ...]


_DENOISER = ("model.diffusion_model.", "model_ema.")
_VAE = Component("vae", ("first_stage_model.", "vae."))

#: Prefixes as diffusers' ``loaders/single_file_utils.py`` (0.35) and ComfyUI's ``supported_models.py`` read and write
#: them; the first family that fits counts.
_FAMILIES: tuple[_Family, ...] = (
    _Family(
        ("model.diffusion_model.double_blocks.",),  # Flux
        (
            Component("transformer", _DENOISER),
            _VAE,
            Component("text_encoder", ("text_encoders.clip_l.",)),
            Component("text_encoder_2", ("text_encoders.t5xxl.",)),
        ),
    ),
    _Family(
        ("model.diffusion_model.joint_blocks.",),  # SD3
        (
            Component("transformer", _DENOISER),
            _VAE,
            Component("text_encoder", ("text_encoders.clip_l.",)),
            Component("text_encoder_2", ("text_encoders.clip_g.",)),
            Component("text_encoder_3", ("text_encoders.t5xxl.",)),
        ),
    ),
    _Family(
        ("conditioner.embedders.",),  # SDXL; its refiner has the second encoder alone, as the first embedder
        (
            Component("unet", _DENOISER),
            _VAE,
            Component("text_encoder", ("conditioner.embedders.0.transformer.",)),
            Component("text_encoder_2", ("conditioner.embedders.1.", "conditioner.embedders.0.model.")),
        ),
    ),
    _Family(
        ("model.diffusion_model.input_blocks.",),  # SD 1 and 2
        (
            Component("unet", _DENOISER),
            _VAE,
            Component("text_encoder", ("cond_stage_model.",)),
            Component("safety_checker", ("safety_checker.",)),
        ),
    ),
    _Family(
        ("model.diffusion_model.",),  # other diffusion transformers as ComfyUI saves them
        (Component("transformer", _DENOISER), _VAE, Component("text_encoder", ("text_encoders.", "cond_stage_model."))),
    ),
)


def find_components(names: Sequence[str]) -> Mapping[str, Component]:
    """The components that a single file has, by name; none for what is not a pipeline's single file."""
    for family in _FAMILIES:
        if _begins(names, family.marks):
            return {c.name: c for c in family.components if _begins(names, c.prefixes)}
    return {}


def _begins(names: Iterable[str], prefixes: tuple[str, ...]) -> bool:
    return any(name.startswith(prefixes) for name in names)
