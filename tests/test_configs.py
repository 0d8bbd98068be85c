"""A model's config: what is read of it, and that a new dtype changes nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv.configs import MAX_CONFIG, config_beside, read_config, with_dtype
from precconv.dtypes import BF16, CASTABLE, DTYPES, FP16, FP32, DType
from precconv.errors import InputError

# Which values change


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", sorted({n for d in CASTABLE for n in (d.name, d.code, d.torch, *d.aliases)}))
def test_every_name_of_a_castable_float_becomes_torchs_name_of_the_target(name: str, key: str) -> None:
    for to in (FP32, FP16, BF16):
        assert with_dtype(f'{{"{key}": "{name}"}}', to) == f'{{"{key}": "{to.torch}"}}'
        assert with_dtype(f'{{"{key}": "torch.{name}"}}', to) == f'{{"{key}": "torch.{to.torch}"}}'


@pytest.mark.parametrize("name", sorted({d.torch for d in DTYPES if not d.is_castable} | {"auto", "", "torch.", "x"}))
def test_other_types_and_words_stay(name: str) -> None:
    text = f'{{"dtype": "{name}", "torch_dtype": "torch.{name}"}}'
    assert with_dtype(text, BF16) == text


@pytest.mark.parametrize(
    "text",
    [
        '{"dtype": null, "torch_dtype": 7}',
        '{"dtype": ["float32"], "torch_dtype": [["float32"], true]}',
        '{"bnb_4bit_compute_dtype": "float32", "note_dtype": "float32", "pooler_dtype": "float32", "Dtype": "float32"}',
        '{"note": "dtype", "float32": "float32", "list": ["dtype", "float32"]}',
        '{"note": "\\"dtype\\": \\"float32\\"", "a\\"dtype": "float32"}',
        '{"vocabulary_map": {"dtype": 12, "float32": 13}}',
        '{"architectures": ["X"], "hidden_size": 8}',
        "{}",
    ],
)
def test_what_is_no_dtype_of_a_model_stays_and_none_is_invented(text: str) -> None:
    assert with_dtype(text, BF16) == text


@pytest.mark.parametrize("owner", ["quantization_config", "compression_config", "quantization"])
def test_what_a_quantization_config_says_stays_and_what_follows_it_does_not(owner: str) -> None:
    inner = '{"dtype": "float32", "deeper": [{"torch_dtype": "float32"}], "text_config": {"dtype": "half"}}'
    for below in (inner, f"[{inner}, {inner}]"):
        text = f'{{"{owner}": {below}, "dtype": "float32", "text_config": {{"{owner}": {below}, "dtype": "half"}}}}'
        made = with_dtype(text, BF16)
        assert made.count(below) == 2
        assert made.replace(below, "…") == (
            f'{{"{owner}": …, "dtype": "bfloat16", "text_config": {{"{owner}": …, "dtype": "bfloat16"}}}}'
        )


def test_nested_configs_and_lists_of_them_change_too() -> None:
    text = (
        '{"text_config": {"dtype": "half"}, "experts": [{"a": {"torch_dtype": "half"}}, "half", [{"dtype": "half"}]]}'
    )
    assert with_dtype(text, BF16) == text.replace('dtype": "half"', 'dtype": "bfloat16"')


def test_a_dtype_for_each_part_changes_part_by_part() -> None:
    text = '{"dtype": {"": "float32", "text_config": "bfloat16", "vision_config": "auto", "x": "int8"}, "x": "float32"}'
    assert json.loads(with_dtype(text, FP16)) == {
        "dtype": {"": "float16", "text_config": "float16", "vision_config": "auto", "x": "int8"},
        "x": "float32",
    }


def test_a_key_that_comes_twice_changes_twice_and_an_escaped_one_is_known() -> None:
    assert with_dtype('{"dtype":"half","dtype":"float"}', BF16) == '{"dtype":"bfloat16","dtype":"bfloat16"}'
    assert with_dtype(r'{"d\u0074ype":"h\u0061lf"}', BF16) == r'{"d\u0074ype":"bfloat16"}'


def test_a_value_that_is_the_target_already_keeps_its_spelling() -> None:
    text = r'{"dtype": "\u0062float16"}'
    assert with_dtype(text, BF16) == text


def test_not_a_byte_else_changes() -> None:
    text = (
        '\ufeff \r\n{\t"rms_norm_eps" :1e-5, "x": 1.0E+05,"dtype"\n:\r\n"float32" ,"z":NaN, "big": 12345678901234567,\r'
        '\n "name": "\\u00e9 é \\/ \\ud83d", "inf": -Infinity, "a": [ ] , "torch_dtype": "torch.float32"\n\n}\r\n \n'
    )
    expected = text.replace('"float32"', '"float16"').replace('"torch.float32"', '"torch.float16"')
    assert with_dtype(text, FP16) == expected != text


# Any document

NAMES = st.sampled_from(["float32", "torch.float32", "half", "bf16", "auto", "int8", "torch.", '"', "\\", "é\n", ""])
KEYS = st.one_of(
    st.sampled_from(
        ["dtype", "torch_dtype", "text_config", "quantization_config", "quantization", "x_dtype", '"', "\\"]
    ),
    st.text(max_size=3),
)
SCALARS = st.one_of(NAMES, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
VALUES = st.recursive(
    SCALARS, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(KEYS, v, max_size=4)), max_leaves=25
)
SPACES = st.sampled_from(["", " ", "\n", "\r\n\t", "  "])


@st.composite
def documents(draw: st.DrawFn) -> str:
    """An object as JSON, with spaces, line ends and escapes as they come."""
    text = json.dumps(
        draw(st.dictionaries(KEYS, VALUES, max_size=6)),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 0, 2, "\t"])),
        separators=(draw(SPACES) + "," + draw(SPACES), draw(SPACES) + ":" + draw(SPACES)),
    )
    return draw(SPACES) + text + draw(SPACES)


CASTABLE_NAMES = {"float32": "", "torch.float32": "torch.", "half": "", "bf16": ""}


def replaced(value: Any, to: DType, *, is_dtype: bool = False) -> Any:
    """The rule itself, on data."""
    if isinstance(value, dict):
        return {
            k: v
            if k in ("quantization_config", "quantization") and isinstance(v, dict | list)
            else replaced(v, to, is_dtype=k in ("dtype", "torch_dtype") or (is_dtype and isinstance(v, str)))
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [replaced(v, to) for v in value]
    if is_dtype and isinstance(value, str) and value in CASTABLE_NAMES:
        return CASTABLE_NAMES[value] + to.torch
    return value


@given(documents(), st.sampled_from([FP32, FP16, BF16]))
def test_any_document_gets_exactly_the_dtypes_that_a_recursive_replacement_gives(text: str, to: DType) -> None:
    made = with_dtype(text, to)
    assert json.loads(made) == replaced(json.loads(text), to)
    assert with_dtype(made, to) == made


NAME = re.compile(r'"(?:(?:torch\.)?float(?:32|16)|half|bf16)"')


@given(documents())
def test_any_document_changes_only_inside_names_of_dtypes(text: str) -> None:
    assert NAME.sub("…", with_dtype(text, FP16)) == NAME.sub("…", text)


# What is no config

BROKEN = {
    "empty": (b"", "not valid JSON"),
    "not JSON": (b"{'dtype': 'float32'}", "not valid JSON"),
    "two objects": (b"{} {}", "not valid JSON"),
    "a control character": (b'{"a": "\n"}', "not valid JSON"),
    "bad UTF-8": (b'{"a": "\xff"}', "not valid JSON"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
    "two marks": (b"\xef\xbb\xbf\xef\xbb\xbf{}", "not valid JSON"),
    "a list": (b'[{"dtype": "float32"}]', "not an object"),
    "a string": (b'"float32"', "not an object"),
    "deep": (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nests too deeply"),
    "large": (b"{" + b" " * MAX_CONFIG + b"}", "too large for a model's config"),
    "a number of 5000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize(("data", "why"), [*BROKEN.values()], ids=[*BROKEN])
def test_in_a_repo_a_broken_config_is_an_error_and_beside_a_file_a_note(data: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_config(data, "org/name/config.json")
    assert str(caught.value) == f"org/name/config.json: {why}"
    (tmp_path / "config.json").write_bytes(data)
    found, [note] = config_beside(tmp_path / "model.safetensors")
    assert found is None
    assert note.startswith(f"{tmp_path / 'config.json'}: {why}, so ")


@pytest.mark.parametrize("name", [n for n, (data, _) in BROKEN.items() if n not in ("bad UTF-8", "UTF-16", "large")])
def test_a_broken_config_is_not_rewritten(name: str) -> None:
    text, why = BROKEN[name][0].decode(), BROKEN[name][1]
    with pytest.raises(InputError, match=f"^the config is unusable: {why}$"):
        with_dtype(text, BF16)


def test_a_repos_config_may_start_with_a_mark_and_have_a_key_twice() -> None:
    assert read_config(b'\xef\xbb\xbf{"a": 1, "a": 2}\n', "config.json") == {"a": 2}


def test_a_config_as_large_as_any_may_be_is_read() -> None:
    assert read_config(b"{" + b" " * (MAX_CONFIG - 2) + b"}", "config.json") == {}


# What transformers makes of it


def tiny(kind: str) -> Any:
    import transformers

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    match kind:
        case "llama":
            return transformers.LlamaConfig(**small, vocab_size=8, dtype="float32", rms_norm_eps=1e-5)
        case "t5":
            return transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, dtype="float32")
        case "llava":
            text = transformers.LlamaConfig(**small, dtype="float32")
            vision = transformers.CLIPVisionConfig(**small, dtype="float32")
            return transformers.LlavaConfig(text_config=text, vision_config=vision, dtype="float32")
    return transformers.Qwen2VLConfig(
        text_config={**small, "num_key_value_heads": 1, "dtype": "float32"},
        vision_config={"depth": 1, "embed_dim": 8, "dtype": "float32"},
        dtype="float32",
    )


def dtypes_in(config: Any) -> list[Any]:
    return [config.dtype, *(getattr(config, name).dtype for name in config.sub_configs if hasattr(config, name))]


@pytest.mark.parametrize(("kind", "stated"), [("llama", 1), ("t5", 1), ("llava", 3), ("qwen2_vl", 3)])
def test_transformers_loads_its_own_config_with_the_new_dtype_and_else_as_it_was(
    kind: str, stated: int, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoConfig

    tiny(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_bytes().decode()
    before = AutoConfig.from_pretrained(tmp_path)
    made = with_dtype(text, BF16)
    assert made.count('"bfloat16"') == stated == text.count('"float32"')
    assert made.replace('"bfloat16"', '"float32"') == text
    path.write_bytes(made.encode())
    after = AutoConfig.from_pretrained(tmp_path)
    assert set(dtypes_in(before)) == {torch.float32}
    assert set(dtypes_in(after)) == {torch.bfloat16}
    assert json.dumps(after.to_dict()).replace("bfloat16", "float32") == json.dumps(before.to_dict())


def test_a_dtype_for_each_part_is_what_transformers_saves(tmp_path: Path) -> None:
    config = tiny("llava")
    config.dtype = {"": "float32", "text_config": "bfloat16"}
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text("utf-8")
    assert json.loads(text)["dtype"] == {"": "float32", "text_config": "bfloat16"}
    assert json.loads(with_dtype(text, FP16))["dtype"] == {"": "float16", "text_config": "float16"}
