"""The preset tables: every row fires where it was made to and nowhere else; configs or names select them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv import presets
from precconv.dtypes import BF16, FP16, FP32, DType, dtype
from precconv.errors import UsageError
from precconv.names import canonical
from precconv.presets import Preset, Row
from precconv.presets.patterns import compiled, template
from precconv.presets.tables import parse, tables
from precconv.tensors import TensorInfo

Shapes = Mapping[str, list[int]]
NAMES: dict[str, dict[str, Shapes]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "preset_names.json").read_text("utf-8")
)
TABLES = {preset.table: preset for preset in tables()}
PATTERNS = [
    pytest.param(table, row, pattern, id=f"{table}:{pattern}")
    for table, preset in TABLES.items()
    for row in preset.keep
    for pattern in row.match
]
#: Components of which random names are made.
WORDS = (
    *(
        "0",
        "7",
        "mlp",
        "gate",
        "weight",
        "bias",
        "D",
        "A_log",
        "mixer",
        "rope",
        "inv_freq",
        "x_inv_freq",
        "wo",
    ),
    *("layer_scale_1", "my_layer_scale", "norm1", "ls1", "gamma", "dt_proj", "experts", "hc_attn_base"),
    *("DenseReluDense", "module", "token2wav"),
)
EXAMPLE = """
about = "an example"
[[preset]]
name = "example"
about = "an example"
source = "example 1.0 model.py:1"
[[preset.keep]]
match = ["gate.weight$"]
on = "half"
kind = "router"
why = "because"
"""


def infos(shapes: Shapes, kind: DType = FP32) -> list[TensorInfo]:
    return [TensorInfo(name, kind, tuple(shape), 0, 0) for name, shape in shapes.items()]


def of(*names: str, shape: tuple[int, ...] = (8, 8), kind: DType = FP32) -> list[TensorInfo]:
    return [TensorInfo(name, kind, shape, 0, 0) for name in names]


def everything(table: str) -> list[TensorInfo]:
    return infos({name: shape for part in NAMES[table].values() for name, shape in part.items()})


def kept(name: str, tensors: Iterable[TensorInfo], target: DType = BF16) -> set[str]:
    return set(presets.match([presets.load(name)], tensors, target))


# ------------------------------------------------------------------------------------- what the tables keep


def test_every_table_has_its_list_of_names() -> None:
    assert NAMES.keys() == TABLES.keys()


@pytest.mark.parametrize("table", TABLES)
def test_a_table_keeps_exactly_the_names_it_was_made_for(table: str) -> None:
    half, fp16 = NAMES[table]["half"].keys(), NAMES[table]["fp16"].keys()
    assert kept(table, everything(table), BF16) == set(half)
    assert kept(table, everything(table), FP16) == {*half, *fp16}


@pytest.mark.parametrize(("table", "row", "pattern"), PATTERNS)
def test_no_pattern_is_dead(table: str, row: Row, pattern: str) -> None:
    alone = Preset(table, table, "one pattern of the table", (replace(row, match=(pattern,)),))
    assert presets.match([alone], everything(table), FP16)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_says_where_it_comes_from(table: str) -> None:
    for row in TABLES[table].keep:
        assert any(mark in row.source for mark in ("/", ".", "measured")), row
        assert len(row.kind) < 40, row
        assert len(row.why) >= 15, row


def test_all_the_model_types_and_classes_with_lists_are_there() -> None:
    types = {name for preset in tables() for name in preset.model_types}
    classes = {name for preset in tables() for name in preset.class_names}
    assert len(types) >= 84
    assert len(classes) >= 24
    assert {
        "deepseek_v3",
        "glm4_moe",
        "t5",
        "blip-2",
        "hy_v4_vl_vision",
        "unlimited_ocr_text",
        "rwkv",
    } <= types
    assert {"WanTransformer3DModel", "Kandinsky5Transformer3DModel", "AutoencoderKLMiniMaxH3"} <= classes


def test_the_reason_names_the_preset_and_the_kind() -> None:
    found = presets.match([presets.load("glm4_moe")], of("model.layers.3.mlp.gate.weight"), BF16)
    assert found == {"model.layers.3.mlp.gate.weight": "preset glm4_moe: MoE router"}


def test_nothing_is_kept_for_fp32() -> None:
    assert presets.match(tables(), everything("universal"), FP32) == {}


def test_what_is_never_cast_is_not_in_the_result() -> None:
    name = "model.layers.0.mlp.gate.weight"
    for code in ("fp8_e4m3", "int8", "uint8", "int64", "bool"):
        assert kept("deepseek_v3", of(name, kind=dtype(code))) == set()
    for code in ("fp64", "fp32", "bf16", "fp16"):
        assert kept("deepseek_v3", of(name, kind=dtype(code))) == {name}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.shared_gate.weight",  # a component that only ends like the pattern
        "model.layers.0.mlp.gate.weight_scale",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate.weight.absmax",
        "e_score_correction_bias_proj.weight",
    ],
)
def test_patterns_match_whole_components(name: str) -> None:
    assert kept("deepseek_v3", of(name)) == set()


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (["net.D"], (64,)),  # no A_log beside it
        (["gateway.gate.bias", "gateway.gate.weight"], (512,)),  # no experts beside it
        (["head.mean", "head.bias"], (80,)),  # no scale beside it
        (["head.scale", "head.weight"], (80,)),
        (["blocks.0.modulation.linear.weight"], (9216, 3072)),
        (["norm.gamma", "norm.beta"], (64,)),
        (["residual.0.gamma"], (96, 1, 1, 1)),
        (["lm_head.logit_scale"], (131072,)),
        (["layers.0.mlp.expert_bias"], (8, 4096)),
        (["layers.0.wo.weight", "layers.0.ffn.fc2.weight"], (64, 64)),
        (["freqs"], (2, 12, 64)),  # learned mixed frequencies
    ],
)
def test_universal_rows_leave_the_same_word_alone_elsewhere(names: list[str], shape: tuple[int, ...]) -> None:
    assert kept("universal", of(*names, shape=shape), FP16) == set()


def test_wrappers_are_seen_through() -> None:
    name = "module._orig_mod.model.layers.0.mlp.gate.e_score_correction_bias"
    assert kept("universal", of(name, shape=(64,))) == {name}
    pair = ["module.lerope.alpha"]
    assert kept("mistral_large4", of(*pair)) == set(pair)


def test_siblings_are_looked_for_under_the_same_wrappers() -> None:
    names = ["module.layers.0.mixer.D", "module.layers.0.mixer.A_log"]
    assert kept("universal", of(*names, shape=(64,))) == set(names)


@given(
    st.lists(
        st.lists(
            st.sampled_from(WORDS),
            min_size=1,
            max_size=5,
        ).map(".".join),
        unique=True,
        max_size=12,
    ),
    st.sampled_from([FP16, BF16]),
)
def test_the_component_index_finds_what_trying_every_row_finds(names: list[str], target: DType) -> None:
    tables_ = [presets.load(name) for name in ("universal", "t5", "deepseek_v3", "qwen2_5_omni", "wan", "esmfold2")]
    tensors = of(*names, shape=(64,))
    assert presets.match(tables_, tensors, target) == _one_by_one(tables_, tensors, target)


def _one_by_one(chosen: list[Preset], tensors: list[TensorInfo], target: DType) -> dict[str, str]:
    present = {info.name for info in tensors}
    found: dict[str, str] = {}
    for info in tensors:
        for preset, row in ((p, row) for p in chosen for row in p.keep):
            key = canonical(template(info.name))
            hits = [hit for pattern in row.match if (hit := compiled(pattern).search(key))]
            if not hits or (row.on == "fp16" and target == BF16) or (row.ndim and 1 not in row.ndim):
                continue
            depth = key[hits[0].start() :].count(".") + 1
            owner = "".join(part + "." for part in info.name.split(".")[:-depth])
            near = {leaf for leaf in (*row.beside, *row.beside_not) if owner + leaf in present}
            if (not row.beside or near & set(row.beside)) and not near & set(row.beside_not):
                found.setdefault(info.name, f"preset {preset.name}: {row.kind}")
    return found


# ------------------------------------------------------------------------------------------- selection


def selected(config: Mapping[str, object] | None, *names: str) -> list[str]:
    return [preset.name for preset in presets.select(config, of(*names))]


@pytest.mark.parametrize("name", [name for preset in tables() for name in preset.model_types])
def test_every_model_type_selects_its_table(name: str) -> None:
    assert selected({"model_type": name}) == [name, "universal"]


@pytest.mark.parametrize("name", [name for preset in tables() for name in preset.class_names])
def test_every_diffusers_class_selects_its_table(name: str) -> None:
    assert selected({"_class_name": name}) == [name, "universal"]


@pytest.mark.parametrize(
    ("architecture", "table"),
    [
        ("DeepseekV3ForCausalLM", "deepseek_v3"),  # Kimi K2's model_type is its own
        ("Glm4MoeForCausalLM", "deepseek_v3"),
        ("T5EncoderModel", "t5"),
        ("UMT5EncoderModel", "t5"),
        ("DeepseekV32Model", "deepseek_v32"),
        ("Blip2TextModelWithProjection", "blip-2"),
        ("NemotronH_Omni_Reasoning_V3", "deepseek_v3"),
    ],
)
def test_architectures_select_where_the_model_type_is_unknown(architecture: str, table: str) -> None:
    assert selected({"model_type": "unheard_of", "architectures": [architecture]}) == [table, "universal"]


def test_nested_configs_select_too_and_a_table_only_once() -> None:
    config = {
        "model_type": "some_vlm",
        "text_config": {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]},
        "vision_config": {"model_type": "siglip"},
        "audio": [{"model_type": "voxtral_encoder"}],
    }
    assert selected(config) == ["glm4_moe", "voxtral_encoder", "universal"]


@pytest.mark.parametrize("config", [None, {}, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}])
def test_an_ordinary_model_gets_the_universal_table_alone(config: Mapping[str, object] | None) -> None:
    assert selected(config, "model.layers.0.self_attn.q_proj.weight", "model.norm.weight") == ["universal"]


BY_NAMES = [(table, group) for table, preset in TABLES.items() for group in preset.names]


@pytest.mark.parametrize(("table", "group"), BY_NAMES, ids=[f"{t}:{g[0]}" for t, g in BY_NAMES])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "module."])
def test_single_files_are_recognised_by_their_names(table: str, group: tuple[str, ...], prefix: str) -> None:
    names = [n.name for n in everything(table) if any(compiled(p).search(template(n.name)) for p in group)]
    assert table in selected(None, *(prefix + name for name in names))
    for pattern in group:
        rest = [name for name in names if not compiled(pattern).search(template(name))]
        assert table not in selected(None, *rest) or len(TABLES[table].names) > 1


def test_a_config_that_selects_is_not_second_guessed_by_names() -> None:
    names = [name for part in NAMES["wan_original"].values() for name in part]
    assert selected({"_class_name": "WanAnimate2Transformer3DModel"}, *names) == [
        "WanAnimate2Transformer3DModel",
        "universal",
    ]
    assert selected({"_class_name": "UnheardOf"}, *names) == ["wan_original", "universal"]


def test_names_are_not_put_together_from_different_tensors() -> None:
    assert "hidream" not in selected(None, "double_stream_blocks.0.block.ff_i", "gate.weight")


def test_a_preset_for_hand_use_is_never_selected() -> None:
    assert TABLES["careful"].manual
    assert "careful" not in selected({"model_type": "careful"}, *NAMES["careful"]["half"])
    assert presets.load("careful").keep


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aé0._", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["model_type", "architectures", "_class_name", "text_config", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["model_type", "architectures", "_class_name", "text_config"]), json_values))
def test_no_config_however_odd_raises(config: dict[str, object]) -> None:
    assert selected(config)[-1] == "universal"


def test_deep_and_wide_configs_are_bounded() -> None:
    deep: dict[str, object] = {"model_type": "t5"}
    for _ in range(100_000):
        deep = {"text_config": deep}
    assert selected(deep) == ["universal"]
    while isinstance(deep.get("text_config"), dict):  # taken apart by hand: freeing it would recurse
        deep = deep.pop("text_config")  # type: ignore[assignment]
    wide = {f"part_{i}": {"model_type": "t5"} for i in range(100_000)}
    assert selected(wide) == ["t5", "universal"]


# --------------------------------------------------------------------------------- loading and malformed data


def test_presets_are_loaded_by_table_model_type_or_class() -> None:
    for name in ("t5", "umt5", "WanTransformer3DModel", "universal", "sd3"):
        assert presets.load(name).name == name


def test_an_unknown_preset_is_a_usage_error_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match="unknown preset 'deepseek_v33'") as caught:
        presets.load("deepseek_v33")
    assert caught.value.hint is not None
    assert "'deepseek_v3'" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        presets.load("zzzzzz")
    assert caught.value.hint == "'precconv presets' lists them"


def test_the_list_is_sorted_and_says_what_each_keeps() -> None:
    listed = presets.list_presets()
    assert [preset.table for preset in listed] == sorted(TABLES)
    assert all(preset.about and (preset.keep or preset.warn) for preset in listed)


def test_the_example_of_the_error_tests_is_well_formed() -> None:
    (preset,) = parse(EXAMPLE, "example.toml")
    assert preset.keep[0].source == "example 1.0 model.py:1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("match =", "mach =", "unknown key 'mach', did you mean 'match'"),
        ("about =", "abuot =", "unknown key 'abuot'"),
        ('name = "example"', 'name = "example"\ncolour = 3', "preset 'example': unknown key 'colour'"),
        ('on = "half"', 'on = "bf16"', "'on' must be one of fp16, half, not 'bf16'"),
        ('on = "half"', "", "'on' must be text"),
        ('["gate.weight$"]', "[]", "a row without 'match'"),
        ('["gate.weight$"]', '"gate.weight"', "'match' must be a list"),
        ('["gate.weight$"]', '["gate..weight"]', "malformed pattern 'gate..weight'"),
        ('["gate.weight$"]', '["layers.0.gate"]', "malformed pattern 'layers.0.gate'"),
        ('["gate.weight$"]', '["(gate|router)"]', "malformed pattern"),
        ('source = "example 1.0 model.py:1"', "", "'source' must be text"),
        ('why = "because"', 'why = " "', "'why' must be text"),
        ('why = "because"', 'why = "because"\nndim = [true]', "True must be a whole number"),
        ('why = "because"', 'why = "because"\nbeside = [1]', "'beside' must be text"),
        ("[[preset.keep]]", "[preset.other]", "unknown key 'other'"),
        ('name = "example"', 'name = "example"\nalways = "yes"', "'always' must be true or false"),
        ('name = "example"', 'name = "example"\nmodel_types = ["a"]', "'model_types' must be a table"),
        ('name = "example"', 'name = "example"\nnames = ["a.b"]', "'names' must be a list"),
    ],
)
def test_malformed_tables_are_errors_that_name_the_place(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"example\.toml") as caught:
        parse(EXAMPLE.replace(old, new, 1), "example.toml")
    assert message in str(caught.value)


def test_a_table_that_says_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="says nothing"):
        parse(EXAMPLE[: EXAMPLE.index("[[preset.keep]]")], "example.toml")


def test_warnings_are_for_their_target_only() -> None:
    chosen = presets.select({"_class_name": "AutoencoderKLMochi"}, [])
    assert [warn.to for warn in presets.warnings(chosen, BF16)] == ["bf16"]
    assert presets.warnings(chosen, FP16) == ()
