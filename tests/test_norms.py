"""The norm finder: precision and recall on a sample of the truth, and each rule with its counter-example."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.norms import Score, infos, judge, read, score
from precconv.dtypes import dtype
from precconv.names import WRAPPERS
from precconv.norms import RULES, find_norms
from precconv.tensors import TensorInfo

SAMPLE = Path(__file__).parent.parent / "fixtures" / "norms_sample.jsonl.gz"

Shape = tuple[int, ...]


def tensors(shapes: Mapping[str, Shape], **dtypes: str) -> list[TensorInfo]:
    """FP32 tensors, but for names ending in a key of ``dtypes``."""
    return [
        TensorInfo(name, dtype(dtypes.get(name.rpartition(".")[2], "fp32")), shape, 0, 0)
        for name, shape in shapes.items()
    ]


def norms(shapes: Mapping[str, Shape], **dtypes: str) -> set[str]:
    return set(find_norms(tensors(shapes, **dtypes)))


def all_of(name: str, shape: Shape, *leaves: str) -> dict[str, Shape]:
    return {f"{name}.{leaf}": shape for leaf in leaves}


def conv(name: str) -> dict[str, Shape]:
    return {f"{name}.weight": (64, 64, 3, 3), f"{name}.bias": (64,)}


def linear(name: str, out: int = 64) -> dict[str, Shape]:
    return {f"{name}.weight": (out, 64), f"{name}.bias": (out,)}


def every_tensor(shapes: Mapping[str, Shape]) -> bool:
    return norms(shapes) == set(shapes)


BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


# The truth sample.


def test_the_sample_covers_every_library_and_kind() -> None:
    verdicts = list(judge(read(SAMPLE)))
    assert {v.model["library"] for v in verdicts} == {
        *("transformers", "diffusers", "timm", "torchvision", "smp", "ultralytics", "open_clip", "whisper"),
        *("kohya", "ldm", "wan", "mochi"),
    }
    assert {v.kind for v in verdicts} >= {
        *("vector", "matrix", "layerscale", "affine", "norm weight", "norm bias", "norm running_mean"),
        *("norm running_var", "norm gamma", "norm beta", "norm scale", "norm shift", "norm temp"),
    }


def test_precision_and_recall_on_the_sample() -> None:
    total = score(judge(read(SAMPLE)))
    assert total.hits > 5000
    assert total.precision >= 0.999
    assert total.recall >= 0.999


def test_a_score_counts_each_outcome_once() -> None:
    total = Score(hits=8, false_positives=2, misses=0, correct_rejections=5) + Score(misses=2)
    assert (total.precision, total.recall) == (0.8, 0.8)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_in_front_of_everything_changes_nothing(wrapper: str) -> None:
    for model in read(SAMPLE):
        plain = infos(model)
        wrapped = [info._replace(name=f"{wrapper}.{info.name}") for info in plain]
        assert find_norms(wrapped) == {f"{wrapper}.{name}" for name in find_norms(plain)}


def test_a_wrapper_around_every_layer_changes_nothing() -> None:
    for model in read(SAMPLE):
        plain = infos(model)
        inner = {info.name: ".module.".join(info.name.rsplit(".", 1)) for info in plain}
        wrapped = [info._replace(name=inner[info.name]) for info in plain]
        assert find_norms(wrapped) == {inner[name] for name in find_norms(plain)}


def test_the_order_of_the_tensors_changes_nothing() -> None:
    shuffle = random.Random(7).shuffle
    for model in read(SAMPLE):
        ordered = infos(model)
        found = find_norms(ordered)
        shuffle(ordered)
        assert find_norms(ordered) == found


PARTS = st.sampled_from(
    ["module", "layers", "0", "1", "23", "norm", "norm4", "fc", "fc2", "act", "norms", "conv", "ls1", "ls", "default"]
)
LEAVES = st.sampled_from(["weight", "bias", "gamma", "beta", "running_mean", "g", "scale", "alpha", "norm"])
NAMES = st.builds(lambda path, leaf: ".".join([*path, leaf]), st.lists(PARTS, max_size=4), LEAVES)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(st.dictionaries(NAMES, SHAPES, max_size=12), st.randoms(use_true_random=False))
def test_any_checkpoint_gives_the_same_answer_wrapped_and_in_any_order(
    shapes: dict[str, Shape], rng: random.Random
) -> None:
    plain = tensors(shapes)
    found = find_norms(plain)
    assert found <= shapes.keys()
    shuffled = [info._replace(name=f"module.{info.name}") for info in plain]
    rng.shuffle(shuffled)
    assert find_norms(shuffled) == {f"module.{name}" for name in found}


@given(st.dictionaries(NAMES, SHAPES, max_size=12))
def test_modules_judged_together_are_judged_as_each_alone(shapes: dict[str, Shape]) -> None:
    together = find_norms(tensors(shapes))
    with mock.patch("precconv.norms._ends", iter):  # whole paths: no two are alike
        assert find_norms(tensors(shapes)) == together


def test_an_entry_beside_a_convolution_is_told_apart_from_its_like() -> None:
    shapes = {"1.1.weight": (64, 3, 3, 3), "1.2.weight": (64,), "1.3.weight": (64, 64), "1.4.weight": (64,)}
    assert norms(shapes) == {"1.4.weight"}


# by_statistics


def test_running_statistics_make_a_batch_norm_of_any_name() -> None:
    assert every_tensor(all_of("features.3.1", (64,), *BATCH_NORM))
    assert every_tensor(all_of("identity", (64,), "running_mean", "running_var"))
    assert every_tensor(all_of("conv1_x/BatchNorm", (64,), "gamma", "beta", "moving_mean", "moving_variance"))
    assert every_tensor(all_of("conv._batch_norm", (64,), "weight", "bias", "_mean", "_variance"))
    assert every_tensor(all_of("bn_0", (51, 64), "running_means", "running_vars"))


def test_the_counter_of_a_batch_norm_is_not_a_float_and_not_returned() -> None:
    shapes = all_of("bn", (64,), *BATCH_NORM) | {"bn.num_batches_tracked": ()}
    assert norms(shapes, num_batches_tracked="int64") == set(all_of("bn", (64,), *BATCH_NORM))


def test_a_convolution_which_owns_its_batch_norm_keeps_weight_and_bias_to_itself() -> None:
    batch_norm = all_of("conv1", (64,), "gamma", "beta", "running_mean", "running_var")
    assert norms(batch_norm | conv("conv1")) == set(batch_norm)


def test_evo_norm_and_complex_batch_norm_own_more_than_four_tensors() -> None:
    assert every_tensor(all_of("1", (64,), "weight", "bias", "v", "running_var"))
    assert every_tensor(all_of("c", (64,), "gamma_rr", "gamma_ri", "moving_mean", "moving_Vri"))


# by_name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "norm",
            "LayerNorm",
            "layer_norm1",
            "attn.q_norm",
            "input_layernorm",
            "norm1.norm",
            "batch_norm2d",
            "rmsnorm",
        ),
        *(
            "ln_1",
            "ln_f",
            "attn_ln",
            "lnx",
            "subln",
            "preLN",
            "bn1",
            "skipbn",
            "bn_sep_1",
            "gn",
            "before_rms",
            "grn",
        ),
        *("norms.0", "hidden_states_norms.stage1", "bns.2", "q_norm.3", "layer_norms.default", "norms.paper"),
        *("lora_te_layers_0_layer_norm1", "normalization", "normals_norm", "revin_layer"),
    ],
)
def test_a_name_that_says_norm_needs_no_sibling(name: str) -> None:
    assert every_tensor({f"{name}.weight": (3,)})
    assert every_tensor({f"{name}.gamma": (1, 1, 1, 3)})


@pytest.mark.parametrize("leaf", ["weight", "gamma", "scale", "g", "w", "gain", "a_2", "w_norm", "diff"])
def test_a_norms_scale_goes_by_many_names(leaf: str) -> None:
    assert every_tensor({f"blocks.0.norm3.{leaf}": (64,)})


@pytest.mark.parametrize(
    "leaves",
    [
        *(("scale", "bias"), ("scale", "offset"), ("w", "b"), ("a_2", "b_2"), ("loc", "scale")),
        *(
            ("mean", "var"),
            ("scale", "bias", "mean", "var"),
            ("weight", "bias", "mean_scale"),
            ("weight", "bias", "tau"),
        ),
        *(("affine_weight", "affine_bias"), ("bias",), ("bias", "log_scale"), ("diff", "diff_b")),
    ],
)
def test_every_tensor_of_a_named_norm_is_found(leaves: tuple[str, ...]) -> None:
    assert every_tensor(all_of("norm", (64,), *leaves))


@pytest.mark.parametrize("name", ["normal_head", "normals", "design", "known", "inline", "align"])
def test_a_name_that_only_resembles_norm_says_nothing(name: str) -> None:
    assert norms({f"{name}.scale": (64,)}) == set()


@pytest.mark.parametrize("name", ["norm1.linear", "norm_out.linear_1", "norm1.conv_y", "norm", "norm1.0", "adaln_norm"])
def test_a_matrix_under_a_norms_name_is_an_adaptive_norms_linear(name: str) -> None:
    assert norms(linear(name, 384)) == set()
    assert norms(conv(name)) == set()
    assert norms({f"{name}.weight": (384, 64)}) == set()


@pytest.mark.parametrize(("weight", "bias"), [((1, 64), (1,)), ((64, 1), (64,)), ((64, 1, 1, 1), (64,))])
def test_a_linear_from_or_to_one_channel_is_no_norm_whatever_its_name(weight: Shape, bias: Shape) -> None:
    assert norms({"norm.weight": weight, "norm.bias": bias}) == set()


def test_norms_of_queries_and_keys_may_have_a_row_for_each_head() -> None:
    assert every_tensor({"attn.q_norm.weight": (64, 128), "attn.k_norm.weight": (8, 128)})
    assert every_tensor({"attn.norm_added_q.weight": (64, 128)})
    assert every_tensor(all_of("attn.norm", (32, 128), "weight", "bias"))
    assert every_tensor({"attn.q_norm.gamma": (8, 1, 64)})
    assert norms({"q_proj.norm.scale": (24, 128)}) == set()


def test_per_degree_norms_of_equivariant_models_are_found() -> None:
    assert every_tensor({"norm_1.affine_weight": (7, 128), "norm_1.affine_bias": (128,)})


@pytest.mark.parametrize(
    "leaf", ["alpha", "lora_A", "lora_B", "lora_magnitude_vector", "qweight", "scales", "SCB", "zeros"]
)
def test_adapter_and_quantization_tensors_beside_a_norm_are_not_its_own(leaf: str) -> None:
    shapes = {"q_norm.weight": (64,), f"q_norm.{leaf}": () if leaf == "alpha" else (64, 8)}
    assert norms(shapes) == {"q_norm.weight"}


def test_the_scale_and_zero_point_of_a_quantized_norms_output_are_not_its_own() -> None:
    assert norms({"norm.scale": (), "norm.zero_point": ()}, zero_point="int64") == set()
    quantized = all_of("norm", (64,), "weight", "bias") | {"norm.scale": (), "norm.zero_point": ()}
    assert norms(quantized, zero_point="int64") == {"norm.weight", "norm.bias"}


def test_lora_on_a_norm_named_module_is_not_a_norm() -> None:
    shapes = {
        "lora_unet_norm1.lora_down.weight": (4, 64),
        "lora_unet_norm1.lora_up.weight": (64, 4),
        "lora_unet_norm1.alpha": (),
    }
    assert norms(shapes) == set()


def test_a_bias_alone_is_a_norms_unless_the_module_has_something_unknown() -> None:
    assert every_tensor({"attention.output.LayerNorm.bias": (64,)})
    assert norms({"attention.output.dense.bias": (64,)}) == set()
    assert norms({"norm_proj.qweight": (8, 64), "norm_proj.bias": (64,)}, qweight="int32") == set()


def test_moshis_alpha_is_a_norm_and_resmlps_affine_and_snake_are_not() -> None:
    assert every_tensor({"layers.0.norm1.alpha": (1, 1, 64)})
    assert norms(all_of("norm1", (1, 1, 64), "alpha", "beta")) == set()
    assert norms(all_of("block.0", (1, 64, 1), "alpha")) == set()


def test_only_floating_point_tensors_are_norms() -> None:
    assert norms({"norm.weight": (64,)}, weight="int8") == set()
    assert norms({"norm.weight": (64,)}, weight="fp8_e4m3") == set()
    assert norms({"norm.weight": (64,)}, weight="fp64") == {"norm.weight"}


def test_data_statistics_are_not_a_norms() -> None:
    assert norms(all_of("normalizer", (7,), "mean", "std")) == set()
    assert norms(all_of("", (7,), "norm_mean", "norm_std")) == set()


# by_own_name


@pytest.mark.parametrize(
    "leaf",
    ["layer_norm_weight", "layer_norm_bias", "attn_norm", "q_norm", "ln_g", "ln1_bias", "norm2_weight"],
)
def test_a_tensors_own_name_can_say_norm(leaf: str) -> None:
    assert norms({f"mlp.fc1.{leaf}": (64,), "mlp.fc1.weight": (256, 64)}) == {f"mlp.fc1.{leaf}"}


@pytest.mark.parametrize(
    "leaf",
    ["weight_norm", "max_norm", "norm_mean", "norm1_linear_bias", "adaln_scale_shift", "norm_out_proj"],
)
def test_a_tensors_own_name_can_only_resemble_norm(leaf: str) -> None:
    assert norms({f"mlp.fc1.{leaf}": (64,), "mlp.fc1.weight": (256, 64)}) == set()


# by_pair


@pytest.mark.parametrize(
    "name",
    [
        *(
            "downsample.1",
            "features.0.1",
            "input_blocks.1.0.in_layers.0",
            "out.0",
            "conv_layers.0.2",
            "conv_layers.3.2.1",
        ),
        *("blocks.0.1.stack.3", "to_out.1", "post_attn", "pre_classifier.0"),
    ],
)
def test_two_vectors_of_one_length_are_a_layer_norm_or_group_norm(name: str) -> None:
    assert every_tensor(all_of(name, (64,), "weight", "bias"))


@pytest.mark.parametrize("leaves", [("gamma", "beta"), ("g", "b"), ("a_2", "b_2")])
def test_pairs_of_other_libraries_may_have_broadcast_dimensions(leaves: tuple[str, str]) -> None:
    assert every_tensor(all_of("channelwise.2", (1, 1, 1, 64), *leaves))
    assert every_tensor(all_of("fn.0", (64,), *leaves))


def test_act_norms_of_flows_are_found() -> None:
    assert every_tensor(all_of("decoder.flows.0", (1, 160, 1), "logs", "bias"))
    assert every_tensor(all_of("_transforms.0", (64,), "log_scale", "shift"))
    assert every_tensor(all_of("actnorm", (1, 64, 1, 1), "loc", "scale"))


def test_a_linear_and_a_convolution_are_no_pair() -> None:
    assert norms(linear("fc") | conv("conv") | {"head.weight": (1, 64), "head.bias": (64,)}) == set()


def test_a_quantized_linear_is_no_pair() -> None:
    shapes = {"fc.weight": (64, 32), "fc.scale": (64,), "fc.bias": (64,)}
    assert norms(shapes, weight="uint8") == set()


def test_vectors_of_different_lengths_are_no_pair() -> None:
    assert norms({"x.weight": (64,), "x.bias": (32,)}) == set()


@pytest.mark.parametrize("name", ["block.affine", "lab", "layer_scale_1", "film", "res_scale2"])
def test_modules_that_only_scale_and_shift_are_no_pair(name: str) -> None:
    assert norms(all_of(name, (64,), "weight", "bias")) == set()
    assert norms(all_of(name, (64,), "scale", "bias")) == set()


def test_a_module_that_holds_others_is_no_pair() -> None:
    assert norms(all_of("block", (64,), "weight", "bias") | linear("block.fc")) == set()


def test_one_weight_and_one_bias_are_a_norm_of_one_channel_but_star_relus_are_not() -> None:
    assert every_tensor(all_of("pos.0", (1,), "weight", "bias"))
    assert norms(all_of("act", (1,), "scale", "bias")) == set()


# by_itself


def test_a_lone_vector_is_an_rms_norm() -> None:
    assert every_tensor({"cap_embedder.0.weight": (64,), "final.weight": (64,)})
    assert every_tensor({"residual.3.gamma": (96, 1, 1, 1)})
    assert every_tensor({"net.0.g": (1, 64, 1, 1)})
    assert every_tensor({"weight": (64,)})


@pytest.mark.parametrize(
    "name",
    [
        *(
            "act",
            "activation_fn",
            "prelu1",
            "acts.0",
            "relu",
            "criterion",
            "time_proj",
            "position_bias",
            "gate",
        ),
        *("layer_scale", "ls1", "scales.0", "softmax_scaling", "token_embedding", "attn_sinks", "rope_freqs"),
        *("q_proj.lora_magnitude_vector", "q_proj.lora_magnitude_vector.default"),
    ],
)
def test_a_lone_vector_with_another_purpose_in_its_name_is_no_norm(name: str) -> None:
    assert norms({f"{name}.weight": (64,)}) == set()


def test_a_short_lone_vector_is_no_norm() -> None:
    assert norms({"mix.weight": (3,), "x.weight": (7,), "2.weight": (1,), "x.gamma": (1,)}) == set()


def test_a_lone_matrix_is_no_norm() -> None:
    assert norms({"fc.weight": (64, 64), "emb.weight": (1, 64), "conv.weight": (64, 1, 1)}) == set()


@pytest.mark.parametrize("leaf", ["scale", "alpha", "D", "A_log", "dt_bias", "e_score_correction_bias", "lambda_1"])
def test_a_lone_vector_under_another_leaf_is_no_norm(leaf: str) -> None:
    assert norms({f"layers.0.mixer.{leaf}": (64,)}) == set()


@pytest.mark.parametrize("name", ["blocks.0.ls1", "blocks.0.layer_scale", "layer_scales.0", "scale"])
def test_layer_scale_is_no_norm(name: str) -> None:
    assert norms(all_of(name, (64,), "gamma")) == set()


def test_a_gamma_of_a_block_is_its_layer_scale() -> None:
    assert norms({"blocks.0.gamma": (64,)} | linear("blocks.0.fc")) == set()


def test_a_scale_norm_of_one_weight_may_hold_the_next_layer() -> None:
    assert norms({"net.0.0.g": (1,)} | linear("net.0.0.fn.to_q")) == {"net.0.0.g"}


def test_a_lone_vector_beside_a_convolution_is_a_prelu() -> None:
    assert norms(conv("body.0") | {"body.1.weight": (64,)}) == set()
    assert norms({"body.1.weight": (64,)} | conv("body.2")) == set()
    assert norms(conv("body.0.conv") | {"body.1.weight": (64,)}) == set()
    batch_norm = all_of("fc.1", (64,), *BATCH_NORM)
    assert norms(linear("fc.0") | batch_norm | {"fc.2.weight": (64,)}) == set(batch_norm)


def test_a_lone_vector_beside_a_convolution_is_a_norm_where_the_other_norms_are_lone_vectors() -> None:
    assert norms(conv("stem.0") | {"stem.1.weight": (64,), "blocks.0.norm.weight": (64,)}) == {
        "stem.1.weight",
        "blocks.0.norm.weight",
    }


# Whole layouts and other spellings.


def test_finding_norms_needs_no_torch() -> None:
    code = "import sys, precconv.norms; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_each_rule_says_what_it_finds() -> None:
    assert all(rule.__doc__ and rule.__name__.startswith("by_") for rule in RULES)


def test_mixture_of_experts_and_mamba_layers_keep_only_their_norms() -> None:
    shapes = {
        "layers.0.mlp.gate.weight": (64, 512),
        "layers.0.mlp.gate.e_score_correction_bias": (64,),
        "layers.0.mixer.A_log": (64,),
        "layers.0.mixer.D": (64,),
        "layers.0.mixer.dt_bias": (64,),
        "layers.0.mixer.dt_proj.bias": (64,),
        "layers.0.mixer.conv1d.weight": (64, 1, 4),
        "layers.0.mixer.conv1d.bias": (64,),
        "layers.0.mixer.norm.weight": (64,),
        "layers.0.self_attn.sinks": (64,),
        "embed_tokens.weight": (1000, 64),
    }
    assert norms(shapes) == {"layers.0.mixer.norm.weight"}


def test_an_ldm_files_ema_copy_has_the_same_norms_without_the_dots() -> None:
    pair = {"model_ema.diffusion_modelout0weight": (64,), "model_ema.diffusion_modelout0bias": (64,)}
    rest = {
        "model_ema.decay": (),
        "model_ema.diffusion_modelout2weight": (4, 64, 3, 3),
        "model_ema.diffusion_modelout2bias": (4,),
        "model_ema.diffusion_modeltransformer_blocks0norm1linearweight": (128, 64),
        "model_ema.diffusion_modeltransformer_blocks0norm1linearbias": (128,),
    }
    assert norms(pair | rest) == set(pair)


def test_slashes_separate_components_too() -> None:
    assert every_tensor({"encoder/layer_0/LayerNorm/gamma:0": (64,), "encoder/layer_0/LayerNorm/beta:0": (64,)})
    assert every_tensor({"evoformer/query_norm//scale": (64,), "evoformer/query_norm//offset": (64,)})


@pytest.mark.parametrize(
    "part",
    ["base_layer", "original_module", "modules_to_save.default", "modules_to_save", "ln_tuning_layers"],
)
def test_peft_components_are_seen_through(part: str) -> None:
    assert every_tensor({f"base_model.model.input_layernorm.{part}.weight": (3,)})


def test_wrapper_components_inside_a_name_are_seen_through() -> None:
    assert every_tensor({"bns.0.module.weight": (3,), "layers.0._checkpoint_wrapped_module.norm.weight": (3,)})
    shapes = conv("body.0.module") | {"body.1.module.weight": (64,)}
    assert norms(shapes) == set()


def test_an_absurd_index_is_just_a_name() -> None:
    assert norms(conv(f"body.{'9' * 5000}") | {"body.1.weight": (3,)}) == set()


def test_an_empty_checkpoint_has_no_norms() -> None:
    assert find_norms([]) == frozenset()
