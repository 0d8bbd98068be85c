"""docs/tensors.md says what is: its commands are run, its tables are compared with the code's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import precconv
from benchmarks.inputs import GB, llama
from benchmarks.norms import judge, read, score
from precconv import quantized
from precconv.plan import make_plan
from precconv.presets import Preset, Row, list_presets
from precconv.presets.tables import parse
from precconv.rules import Policy, read_rules
from precconv.tensors import TensorInfo

from .command import run

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tensors.md").read_text("utf-8")


def blocks() -> Iterator[list[str]]:
    """Indented blocks, without the indentation."""
    for block in re.findall(r"(?:^    .*\n(?:^\n(?=    ))?)+", PAGE, re.MULTILINE):
        yield [line.removeprefix("    ") for line in block.splitlines()]


SHOWN = [block for block in blocks() if block[0].startswith("$ ")]
COMMANDS = [line for block in blocks() for line in block if line.startswith("precconv ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the mixture of experts that the page shows."""
    tensors = {"model.embed_tokens.weight": torch.zeros(96, 32), "lm_head.weight": torch.zeros(96, 32)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{norm}_layernorm.weight": torch.ones(32) for norm in ("input", "post_attention")}
        tensors |= {f"{at}self_attn.{p}_proj.weight": torch.zeros(32, 32) for p in "qkvo"}
        tensors |= {f"{at}mlp.gate.weight": torch.zeros(4, 32), f"{at}mlp.gate.e_score_correction_bias": torch.ones(4)}
        experts = [f"{at}mlp.experts.{i}." for i in range(4)]
        tensors |= {f"{e}{p}_proj.weight": torch.zeros(16, 32) for e in experts for p in ("gate", "up")}
        tensors |= {f"{e}down_proj.weight": torch.zeros(32, 16) for e in experts}
    tensors |= {"logit_scale": torch.tensor(2.6593), "vision.position_ids": torch.arange(16)[None]}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("block", SHOWN, ids=[block[0][2:] for block in SHOWN])
def test_a_command_shown_with_its_output_prints_that(block: list[str]) -> None:
    done = run(*shlex.split(block[0])[2:])
    assert done.output.splitlines() == block[1:]


def test_the_page_shows_commands() -> None:
    assert len(SHOWN) == 2
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_output_converts(command: str, folder: Path) -> None:
    save_file(
        {n: torch.ones(2, 2) for n in ("a.router.w", "x.lm_head.weight", "ema.w", "b")}, folder / "model.safetensors"
    )
    done = run(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.stderr
    written = {t.name: t.dtype.name for t in precconv.inspect(folder / "model.bf16.safetensors")}
    if "--rule" in command:
        assert written == {"a.router.w": "fp32", "x.lm_head.weight": "fp32", "b": "bf16"}
    else:
        assert set(written.values()) == {"bf16"}


def test_inspect_and_a_dry_run_print_the_same_as_the_page_says(folder: Path) -> None:
    assert "`precconv model.safetensors --to bf16 --dry-run` prints the same" in PAGE
    args = (folder / "model.safetensors", "--to", "bf16")
    assert run("inspect", *args).output == run(*args, "--dry-run").output


def test_the_reasons_of_the_page_are_those_of_the_code() -> None:
    rules = (ROOT / "precconv" / "rules.py").read_text("utf-8")
    body = rules[rules.index("def decide(") : rules.index("def _holds(")]
    said = {re.sub(r"\{.*?\}", "", text).strip() for text in re.findall(r'return [^\n]*, f?"(.*?)"', body)}
    assert said == {"already", "is not cast", "quantized:", "target", "scalar", "norm", "mixed source"}
    listed = re.findall(r"\| `([^`]+)` \|$", PAGE, re.MULTILINE)
    for reason in said:
        assert any(reason in row for row in listed), reason
    assert {"rule GLOB", "preset NAME: KIND"} < set(listed)


def test_the_rules_file_of_the_page_is_one(tmp_path: Path) -> None:
    [block] = [block for block in blocks() if block[0] == "[[rule]]"]
    (tmp_path / "rules.toml").write_text("\n".join(block))
    assert [(rule.match, str(rule.to)) for rule in read_rules(tmp_path / "rules.toml")] == [
        ("*.mlp.gate.weight", "fp32")
    ]


def test_the_preset_of_the_page_is_one_and_every_key_is_explained() -> None:
    [block] = [block for block in blocks() if block[0].startswith("about = ")]
    (preset,) = parse("\n".join(block), "example.toml")
    assert preset.keep[0].ndim == (1,)
    assert preset.warn[0].to == "fp16"
    for key in ({f.name for f in fields(Preset)} | {f.name for f in fields(Row)}) - {"table"}:
        assert re.search(rf"`{key}`|^    (?:\[+preset\.)?{key}\b", PAGE, re.MULTILINE), key


def test_the_tables_that_the_page_names_exist() -> None:
    assert {"universal", "t5", "deepseek_v3"} <= {preset.table for preset in list_presets()}


def test_every_quantized_format_is_on_the_page() -> None:
    [paragraph] = re.findall(r"^Recognised: (.*?)\. Where", PAGE, re.MULTILINE | re.DOTALL)
    names = {name.strip() for name in re.split(r",| and ", re.sub(r"\(.*?\)", "", " ".join(paragraph.split())))}
    assert names == {row[0] for row in quantized._TABLE} | set(quantized._LONE.values())


def test_the_numbers_of_the_sample_are_measured() -> None:
    models = list(read(ROOT / "fixtures" / "norms_sample.jsonl.gz"))
    found = score(judge(models))
    norms, others = found.hits + found.misses, found.correct_rejections + found.false_positives
    text = " ".join(PAGE.split())
    assert f"{norms:,} norm tensors of {len(models)} models, none missed, and none of {others:,} others" in text
    assert (found.misses, found.false_positives) == (0, 0)


def test_fp32_norms_cost_what_the_page_says() -> None:
    shapes = llama(30 * GB).shapes
    infos = [TensorInfo(name, precconv.dtype("fp32"), shape, 0, 0) for name, shape in shapes.items()]
    nbytes = [
        make_plan(infos, {}, Policy(precconv.dtype("bf16"), norms=norms)).output_bytes for norms in ("cast", "fp32")
    ]
    assert "0.004 % of an 8 B model" in PAGE
    assert round(100 * (nbytes[1] / nbytes[0] - 1), 3) == 0.004


def test_torch_refuses_to_mix_what_assign_takes_over() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.load_state_dict({"weight": torch.ones(2, 2, dtype=torch.bfloat16), "bias": torch.ones(2)}, assign=True)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(1, 2))
