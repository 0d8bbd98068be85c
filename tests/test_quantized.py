"""Quantized modules: each format on a minimal realistic list of tensors, and plain tensors beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv import quantized
from precconv.dtypes import DTYPES, dtype
from precconv.quantized import find_quantized
from precconv.tensors import TensorInfo

#: Name -> dtype and shape, as in ``"F16 64x64"``; ``"F32"`` alone is a scalar.
Tensors = Mapping[str, str]

#: What stands in every model, quantized or not, and must not be taken for a part of a module.
PLAIN = {
    "model.embed_tokens.weight": "BF16 1000x64",
    "model.layers.0.input_layernorm.weight": "BF16 64",
    "model.layers.0.mlp.gate.weight": "F32 8x64",
    "model.layers.0.self_attn.rotary_emb.inv_freq": "F32 32",
    "model.layers.0.ls1.scale": "F32 64",
    "model.vision.embeddings.position_ids": "I64 1x77",
    "lm_head.weight": "BF16 1000x64",
    "lm_head.bias": "BF16 1000",
}
M = "model.layers.0.self_attn.q_proj."
E = "model.layers.0.mlp.experts."
W = M + "weight"

FORMATS: list[tuple[str, Tensors]] = [
    (
        "gptq",
        {M + "qweight": "I32 8x64", M + "qzeros": "I32 1x8", M + "scales": "F16 1x64", M + "g_idx": "I32 64"},
    ),
    ("gptq", {M + "qweight": "I32 8x64", M + "scales": "F16 1x64", M + "bias": "F16 64"}),
    ("gptq", {M + "qweight": "I32 8x64", M + "qzeros": "I32 1x8", M + "scales": "F16 1x64"}),
    (
        "awq",
        {M + "qweight": "I32 64x8", M + "qzeros": "I32 1x8", M + "scales": "F16 1x64", M + "bias": "F16 64"},
    ),
    ("awq", {M + "qweight": "I16 16x64", M + "qzeros": "F16 1x96", M + "scales": "F16 1x96"}),
    ("marlin", {M + "B": "I32 4x128", M + "s": "F16 1x64", M + "workspace": "I32 16"}),
    ("marlin", {M + "B_24": "I32 2x128", M + "B_meta": "I16 64x8", M + "s": "F16 1x64"}),
    (
        "bitsandbytes 4-bit",
        {W: "U8 2048x1", W + ".absmax": "F32 64", W + ".quant_map": "F32 16", M + "bias": "BF16 64"}
        | {W + ".quant_state.bitsandbytes__nf4": "U8 90"},
    ),
    (
        "bitsandbytes 4-bit",  # quant_storage: packed nibbles under a float dtype
        {W: "BF16 1024x1", W + ".absmax": "U8 64", W + ".quant_map": "F32 16", W + ".nested_absmax": "F32 1"}
        | {W + ".nested_quant_map": "F32 256", W + ".quant_state.bitsandbytes__fp4": "U8 90"},
    ),
    (
        "bitsandbytes 4-bit",  # a parameter that is no weight
        {E + "gate_up_proj": "F32 512x1", E + "gate_up_proj.absmax": "F32 64"}
        | {E + "gate_up_proj.quant_map": "F32 16"},
    ),
    (
        "bitsandbytes 8-bit",
        {W: "I8 64x64", M + "SCB": "F32 64", M + "weight_format": "U8", M + "bias": "F16 64"},
    ),
    ("bitsandbytes 8-bit", {W: "I8 64x64", W + ".SCB": "F32 64"}),
    ("fp8", {W: "F8_E4M3 256x128", M + "weight_scale_inv": "F32 2x1", M + "bias": "BF16 256"}),
    ("fp8", {W: "F8_E4M3 160x192", M + "weight_scale_inv": "F8_E8M0 2x2"}),
    ("fp8", {W: "F8_E4M3 256x128", M + "scale": "F32 2x1", M + "bias": "BF16 256"}),
    ("fp8", {W: "F8_E4M3 64x64", M + "weight_scale": "F32 64x1", M + "input_scale_ub": "F32 1"}),
    ("fp8", {W: "F8_E4M3 64x64", M + "weight_scale": "F32", M + "input_scale": "F32", M + "bias": "F16 64"}),
    ("fp8", {W: "F8_E5M2 64x64", M + "qscale_weight": "F32", M + "qscale_act": "F32"}),
    ("fp8", {E + "gate_up_proj": "F8_E4M3 8x128x64", E + "gate_up_proj_scale_inv": "F32 8x1x1"}),
    ("fp8", {E + "gate_up_proj": "F8_E4M3 8x64x128", E + "gate_up_proj_scale": "F32 8x1x128"}),
    ("fp8", {E + "w13_weight": "F8_E4M3 8x64x128", E + "w13_weight_scale": "F32 8x64"}),
    ("int8", {W + ".qweight": "I8 64x64", W + ".scale": "F32 64x1", M + "bias": "F32 64"}),
    ("int8", {M + "qweight": "I8 64x64", M + "scale": "F32 64"}),
    ("int8", {M + "weight_q": "I8 64x64", M + "weight_scale": "F32 64"}),
    ("int8", {W + "_int8": "U8 64x64", W + "_scale": "F32", W + "_zero": "F32"}),
    ("packed", {M + "qweight": "I32 8x64", M + "scale": "F32 64"}),
    ("mxfp8", {W: "F8_E4M3 64x64", M + "weight_scale": "U8 64x2"}),
    ("mxfp4", {W: "I8 64x32", M + "scale": "F8_E8M0 64x2"}),
    ("mxfp4", {W: "U8 64x32", M + "weight_scale": "U8 64x2"}),
    (
        "mxfp4",
        {E + "gate_up_proj_blocks": "U8 8x128x2x16", E + "gate_up_proj_scales": "U8 8x128x2"}
        | {E + "gate_up_proj_bias": "BF16 8x128", E + "down_proj_blocks": "U8 8x64x2x16"}
        | {E + "down_proj_scales": "U8 8x64x2", E + "down_proj_bias": "BF16 8x64"},
    ),
    (
        "mxfp4",
        {"block.0.mlp.mlp1_weight.blocks": "U8 8x128x2x16", "block.0.mlp.mlp1_weight.scales": "U8 8x128x2"}
        | {"block.0.mlp.mlp1_bias": "BF16 8x128"},
    ),
    (
        "nvfp4",
        {
            W: "U8 64x32",
            M + "weight_scale": "F8_E4M3 64x4",
            M + "weight_scale_2": "F32",
            M + "input_scale": "F32",
        }
        | {M + "pre_quant_scale": "BF16 64"},
    ),
    ("nvfp4", {W: "U8 64x32", M + "weight_sf": "U8 64x4", M + "weight_global_scale": "F32"}),
    (
        "compressed-tensors",
        {M + "weight_packed": "I32 64x8", M + "weight_scale": "BF16 64x1", M + "weight_shape": "I64 2"}
        | {M + "weight_zero_point": "I8 64x1", M + "weight_g_idx": "I32 64", M + "bias": "BF16 64"},
    ),
    (
        "compressed-tensors",
        {
            M + "weight_packed": "U8 64x32",
            M + "weight_scale": "F8_E4M3 64x4",
            M + "weight_global_scale": "F32 1",
        }
        | {M + "input_global_scale": "F32 1"},
    ),
    (
        "compressed-tensors",
        {M + "compressed": "BF16 900", M + "bitmask": "U8 64x8", M + "row_offsets": "I64 64"},
    ),
    ("compressed-tensors", {W + ".compressed": "BF16 900", W + ".bitmask": "U8 64x8", W + ".shape": "I64 2"}),
    ("int8", {W: "I8 64x64", M + "weight_scale": "F32 64x1", M + "bias": "BF16 64"}),
    ("packed", {W: "U8 16x64", M + "weight_scale": "BF16 1"}),
    (
        "hqq",
        {M + "W_q": "U8 32x64", M + "scale": "F16 64x1", M + "zero": "F16 64x1", M + "nbits": "I32"}
        | {M + "group_size": "I32", M + "view_as_float": "BOOL", M + "compute_dtype": "I32"},
    ),
    ("hqq", {M + "W_q": "F16 16x64", M + "scale": "F16 64x1", M + "zero": "F16 64x1", M + "bias": "F16 64"}),
    ("sinq", {M + "W_q": "U8 32x64", M + "meta": "U8 400", M + "bias": "F16 64"}),
    (
        "torchao",
        {M + "_weight_qdata": "F8_E4M3 64x64", M + "_weight_scale": "F32 64x1", M + "bias": "BF16 64"},
    ),
    ("torchao", {M + "_weight_qdata": "I32 8x64", M + "_weight_scale_and_zero": "BF16 1x64x2"}),
    (
        "quanto",
        {W + "._data": "I8 64x64", W + "._scale": "F32 64x1", M + "input_scale": "F32", M + "bias": "F32 64"},
    ),
    ("quanto", {W + "._data": "U8 32x64", W + "._scale": "F16 64x1", W + "._shift": "F16 64x1"}),
    ("eetq", {W: "I8 64x64", M + "weight_scales": "F16 64", M + "bias": "F16 64"}),
    ("aqlm", {M + "codes": "I8 64x8x1", M + "codebooks": "F16 1x256x1x8", M + "scales": "F16 64x1x1x1"}),
    (
        "vptq",
        {
            M + "indices": "I32 1x8x8",
            M + "centroids.weight": "F16 1x2048",
            M + "res_centroids.weight": "F16 1x2048",
        }
        | {
            M + "perm": "I16 64",
            M + "weight_scale": "F16 64",
            M + "weight_bias": "F16 64",
            M + "bias": "F16 64",
        },
    ),
    ("spqr", {M + "dense_weights": "I64 64", M + "row_offsets": "I32 65", M + "col_vals": "I32 40"}),
    (
        "higgs",  # FP32 pairs stored as an FP16 view
        {W: "I16 8x64", M + "scales": "F16 64x1", M + "tables": "F16 256", M + "tables2": "F16 65536"},
    ),
    (
        "fp_quant",
        {M + "qweight": "U8 64x32", M + "scales": "U8 64x2", M + "forward_hadamard_matrix": "BF16 32x32"},
    ),
    ("fp_quant", {M + "dqweight": "BF16 64x64", M + "forward_hadamard_matrix": "BF16 32x32"}),
    (
        "exl2",
        {
            M + "q_weight": "I32 8x64",
            M + "q_scale": "I32 1x8",
            M + "q_scale_max": "F16 1",
            M + "q_groups": "I16 2",
        }
        | {M + "q_invperm": "I32 64", M + "bias": "F16 64"},
    ),
    ("exl3", {M + "trellis": "I16 4x4x48", M + "suh": "F16 64", M + "svh": "F16 64", M + "bias": "F16 64"}),
    (
        "svdquant",
        {
            M + "qweight": "I8 64x32",
            M + "wscales": "BF16 1x64",
            M + "lora_down": "BF16 64x32",
            M + "bias": "BF16 64",
        }
        | {M + "lora_up": "BF16 64x32", M + "smooth": "BF16 64", M + "smooth_orig": "BF16 64"},
    ),
    (
        "svdquant",
        {
            M + "qweight": "I8 64x32",
            M + "wscales": "F8_E4M3 4x64",
            M + "wcscales": "BF16 64",
            M + "wtscale": "BF16 1",
        }
        | {M + "proj_down": "BF16 64x32", M + "proj_up": "BF16 64x32", M + "smooth_factor": "BF16 64"},
    ),
    (
        "comfyui",
        {W: "F8_E4M3 64x64", M + "weight_scale": "F32", M + "comfy_quant": "U8 28", M + "bias": "BF16 64"},
    ),
    ("comfyui", {W: "I8 64x64", M + "weight_scale": "F32 64x1", M + "comfy_quant": "U8 28"}),
    ("comfyui scaled fp8", {W: "F8_E4M3 64x64", M + "scale_weight": "F32 1", M + "scale_input": "F32 1"}),
    ("mlx", {W: "U32 64x8", M + "scales": "BF16 64x1", M + "biases": "BF16 64x1", M + "bias": "BF16 64"}),
    ("mlx", {W: "U32 64x8", M + "scales": "U8 64x2"}),
    ("gemma", {W: "U8 64x32", M + "weight_scale": "F32 1", M + "input_activation_scale": "F32 1"}),
    ("gemma", {M + "embedding_quantized": "U8 64x32", M + "embedding_scale": "F32 1"}),
    ("scaled", {W: "BF16 64x64", M + "weight_scale": "F32 64x1"}),  # simulated quantization
    ("transformer engine", {M + "_extra_state": "U8 300"}),
    ("comfyui scaled fp8", {"model.diffusion_model.scaled_fp8": "F8_E4M3 2"}),
]
IDS = [f"{name}:{'+'.join(n.rpartition('.')[2] for n in tensors)[:50]}" for name, tensors in FORMATS]

#: Layouts that several tools share, and the tool a config names.
METHODS = [
    ("compressed-tensors", {W: "F8_E4M3 64x64", M + "weight_scale": "BF16 64x1"}),
    ("fbgemm_fp8", {W: "F8_E4M3 64x64", M + "weight_scale": "F32 64x1"}),
    ("modelopt", {W: "U8 64x32", M + "weight_scale": "F8_E4M3 64x4", M + "weight_scale_2": "F32"}),
    ("quark", {W: "I8 64x64", M + "weight_scale": "BF16 64x1", M + "weight_zero_point": "I8 64"}),
    ("quark", {W: "U8 64x32", M + "weight_scale": "U8 64x2"}),
    ("bitnet", {W: "U8 16x64", M + "weight_scale": "BF16 1"}),
    ("auto-round", {M + "qweight": "I32 8x64", M + "qzeros": "I32 1x8", M + "scales": "F16 1x64"}),
    ("metal", {W: "U32 64x8", M + "scales": "BF16 64x1", M + "qbiases": "BF16 64x1"}),
    ("mxfp8", {W: "F8_E4M3 64x64", M + "weight_scale": "U8 64x2"}),
    ("gptq", {M + "B": "I32 4x128", M + "s": "F16 1x64"}),
    # no companion has a known name: the config and the packed weight alone
    ("fp8", {W: "F8_E4M3 64x64", M + "odd_name": "F32 64", M + "bias": "BF16 64"}),
    ("fouroversix", {W: "U8 64x32", M + "global_amax": "F32"}),
    ("hqq", {M + "W_q": "BF16 32x64", M + "bias": "BF16 64"}),
    ("fp_quant", {M + "dqweight": "BF16 64x64"}),
]


def infos(tensors: Tensors) -> list[TensorInfo]:
    found = []
    for name, text in tensors.items():
        code, _, shape = text.partition(" ")
        sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
        found.append(TensorInfo(name, dtype(code), sizes, 0, 0))
    return found


@pytest.mark.parametrize(("name", "tensors"), FORMATS, ids=IDS)
def test_every_tensor_of_a_module_is_found_and_no_plain_one(name: str, tensors: Tensors) -> None:
    found = find_quantized(infos({**PLAIN, **tensors}), None, {})
    assert found == dict.fromkeys(tensors, name)


@pytest.mark.parametrize(("name", "tensors"), FORMATS, ids=IDS)
def test_the_order_of_the_tensors_does_not_matter(name: str, tensors: Tensors) -> None:
    assert find_quantized(reversed(infos({**PLAIN, **tensors})), None, {}) == dict.fromkeys(tensors, name)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.diffusion_model."])
@pytest.mark.parametrize(("name", "tensors"), FORMATS, ids=IDS)
def test_modules_are_found_under_any_prefix(name: str, tensors: Tensors, prefix: str) -> None:
    wrapped = {prefix + tensor: text for tensor, text in tensors.items()}
    assert find_quantized(infos(wrapped), None, {}) == dict.fromkeys(wrapped, name)


def test_a_module_at_the_root_of_the_names_is_found() -> None:
    assert find_quantized(infos({"qweight": "I32 8x64", "scales": "F16 1x64"}), None, {}).keys() == {
        "qweight",
        "scales",
    }


@pytest.mark.parametrize(("method", "tensors"), METHODS)
def test_a_config_names_the_tool_of_a_shared_layout(method: str, tensors: Tensors) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    assert find_quantized(infos({**PLAIN, **tensors}), config, {}) == dict.fromkeys(tensors, method)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "modelopt"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "<b>" * 100}}, "quantized"),
    ],
)
def test_methods_are_found_wherever_configs_say_them(config: Mapping[str, object], method: str) -> None:
    found = find_quantized(infos({W: "F8_E4M3 64x64", M + "odd": "F32 64"}), config, {})
    assert set(found.values()) == {method}


def test_ignore_lists_take_modules_out_of_what_the_config_alone_says() -> None:
    tensors = {
        W: "F8_E4M3 64x64",
        "lm_head.weight": "F8_E4M3 64x64",
        "model.visual.proj.weight": "F8_E4M3 8x8",
    }
    said = {
        "quant_method": "fp8",
        "modules_to_not_convert": ["lm_head"],
        "ignore": ["re:.*", "*visual*", "", 3],
    }
    assert find_quantized(infos(tensors), {"quantization_config": said}, {}).keys() == {W}


def test_an_ignore_list_does_not_hide_what_the_tensors_show() -> None:
    tensors = {W: "F8_E4M3 64x64", M + "weight_scale": "F32"}
    said = {"quant_method": "fp8", "modules_to_not_convert": ["q_proj"]}
    assert find_quantized(infos(tensors), {"quantization_config": said}, {}).keys() == tensors.keys()


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "fp8", "hqq", "compressed-tensors", "unheard_of"])
def test_a_quantization_config_makes_no_plain_tensor_quantized(method: str) -> None:
    config = {"quantization_config": {"quant_method": method, "load_in_8bit": True}}
    assert find_quantized(infos(PLAIN), config, {}) == {}


def test_scales_of_activations_stay_where_anything_is_quantized() -> None:
    scales = {"model.layers.0.self_attn.k_scale": "F32", "model.layers.0.self_attn.v_scale": "BF16 1"}
    assert find_quantized(infos({**PLAIN, **scales}), None, {}) == {}
    weight = {W: "F8_E4M3 64x64", M + "weight_scale": "F32"}
    assert find_quantized(infos({**PLAIN, **weight, **scales}), None, {}).keys() == {*weight, *scales}


def test_names_of_ordinary_models_are_never_taken_for_quantized_ones() -> None:
    text = (Path(__file__).parents[1] / "fixtures" / "preset_names.json").read_text("utf-8")
    for parts in json.loads(text).values():
        names = {name: "BF16 64" for part in parts.values() for name in part}
        assert find_quantized(infos(names), None, {}) == {}
        assert find_quantized(infos(names), {"quantization_config": {"quant_method": "fp8"}}, {}) == {}


@pytest.mark.parametrize(
    "tensors",
    [
        {M + "scales": "F32 64", W: "F32 64x64"},
        {M + "scale": "F32 64", M + "zero": "F32 64", W: "BF16 64x64"},
        {M + "W_q": "F32 64x64", M + "W_k": "F32 64x64", M + "W_v": "F32 64x64", M + "scale": "F32 1"},
        {M + "B": "F32 64x64", M + "s": "F32 64", M + "A": "F32 64"},
        {M + "codes": "F32 64", M + "codebooks": "F32 4x64x8"},
        {M + "indices": "I64 64", "model.centroids.weight": "F32 64x64"},
        {"backbone.scale_weight": "F32 512", "backbone.weight": "F32 64x64"},
        {M + "num_batches_tracked": "I64", M + "running_mean": "F32 64", W: "F32 64", M + "scale": "F32 64"},
        {M + "trellis": "F32 64", M + "tables": "F32 64", M + "biases": "F32 64"},
        {W: "F8_E4M3 64x64", M + "bias": "BF16 64"},  # stored in FP8 without a scale: nothing to tear apart
        {M + "input_scale": "F32", W: "F32 64x64"},
    ],
)
def test_the_same_words_in_a_plain_module_are_not_enough(tensors: Tensors) -> None:
    assert find_quantized(infos(tensors), None, {}) == {}


# --------------------------------------------------------------------------------------------- metadata


def test_torchao_is_found_by_the_metadata_of_the_file() -> None:
    metadata = {
        "tensor_names": json.dumps([W, "lm_head.weight"]),
        W: json.dumps({"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "odd"]}),
        "lm_head.weight": json.dumps({"_type": "Tensor"}),
    }
    tensors = {M + "_weight_odd": "F32 64x1", M + "bias": "BF16 64"}
    assert find_quantized(infos({**PLAIN, **tensors}), None, metadata) == dict.fromkeys(tensors, "torchao")


def test_comfyui_is_found_by_the_metadata_of_the_file() -> None:
    layers = {"layers": {M.rstrip("."): {"format": "float8_e4m3fn"}}}
    tensors = {W: "F8_E4M3 64x64", M + "odd": "F32", M + "bias": "BF16 64"}
    found = find_quantized(infos({**PLAIN, **tensors}), None, {"_quantization_metadata": json.dumps(layers)})
    assert found == dict.fromkeys(tensors, "comfyui")


@pytest.mark.parametrize("key", ["tensor_names", "_quantization_metadata", W])
@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", "3", "null", '{"layers": 3}', '{"layers": [1]}', "[" * 100_000, '["' + W + '"]'],
)
def test_odd_metadata_is_as_good_as_none(key: str, text: str) -> None:
    assert find_quantized(infos(PLAIN), None, {"tensor_names": json.dumps([W]), key: text}) == {}


# ---------------------------------------------------------------------------------------------- hostile

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("afp8*[.]_", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["quant_method", "quantization_config", "ignore", "bits", "load_in_4bit"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["quantization_config", "quantization", "text_config"]), json_values))
def test_no_config_however_odd_raises(config: dict[str, object]) -> None:
    assert find_quantized(infos(PLAIN), config, {}) == {}


PARTS = (
    "",
    "m",
    "weight",
    "scale",
    "scales",
    "qweight",
    "qzeros",
    "_scale",
    "weight_scale",
    "g_idx",
    "absmax",
)


@given(
    st.dictionaries(
        st.lists(st.sampled_from(PARTS), max_size=3).map(".".join),
        st.sampled_from([d.code for d in DTYPES]),
        max_size=12,
    )
)
def test_no_set_of_names_raises_and_only_present_ones_are_found(tensors: dict[str, str]) -> None:
    config = {"quantization_config": {"quant_method": "", "load_in_4bit": True}}
    assert find_quantized(infos(tensors), None, {}).keys() <= tensors.keys()
    assert find_quantized(infos(tensors), config, {}).keys() <= tensors.keys()


@pytest.mark.parametrize("owner", ["weight.", "m.weight.", ".", "m..", ""])
def test_names_that_are_odd_at_the_edges_raise_nothing(owner: str) -> None:
    tensors = {owner + "qweight": "I32 8x64", owner + "qzeros": "I32 1x8", owner + "scales": "F16 1x64"}
    assert set(find_quantized(infos(tensors), None, {})) == set(tensors)


def test_long_ignore_lists_cost_no_more_than_short_ones() -> None:
    """Quadratic in modules and entries, this would take minutes."""
    ignore = [f"model.layers.{i}.mlp" for i in range(20_000)] + ["*a*b*c*d*e*"] * 20_000
    tensors = {f"model.layers.{i}.mlp.odd.weight": "F8_E4M3 8x8" for i in range(20_000)}
    tensors["model.layers.7.attn.odd.weight"] = "F8_E4M3 8x8"
    config = {"quantization_config": {"quant_method": "modelopt", "ignore": ignore}}
    assert find_quantized(infos(tensors), config, {}).keys() == {"model.layers.7.attn.odd.weight"}


# ----------------------------------------------------------------------------------------------- the index of leaves


@pytest.mark.parametrize("stem", ["", "weight", "up_proj"])
def test_the_leaf_that_every_row_looks_for_finds_that_row(stem: str) -> None:
    for signature in quantized._SIGNATURES:
        leaf = signature.leaves[0][0].replace("*", stem)
        if stem or not leaf.startswith(("_", ":")):  # "*" is at least one character
            assert signature in {found for found, _ in quantized._candidates(leaf)}, leaf


def test_a_leaf_that_no_row_looks_for_finds_none() -> None:
    for leaf in ("weight", "bias", "w00001", "gamma", "weight_scale_invariant", "scales_and_zeros", ""):
        assert quantized._candidates(leaf) == ()
