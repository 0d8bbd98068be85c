"""Names of weight files, read and made: as the libraries that write them do, which are asked here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precconv.repo import WeightSet, list_directory, output_index, output_name, survey
from precconv.repo.names import (
    PAIRS,
    IndexName,
    WeightName,
    index_name,
    is_canonical,
    is_guess,
    parse_index,
    parse_weight,
    weight_name,
)

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own warnings are not this project's

# Read

LONG = "model-00001-of-000163.safetensors"  # DeepSeek-V3's
PARSED: dict[str, WeightName | None] = {
    "model.safetensors": WeightName("model", None, ".safetensors"),
    "pytorch_model.fp16.bin": WeightName("pytorch_model", "fp16", ".bin"),
    "diffusion_pytorch_model.non_ema.safetensors": WeightName("diffusion_pytorch_model", "non_ema", ".safetensors"),
    "model-00002-of-00003.safetensors": WeightName("model", None, ".safetensors", 2, 3, "model-*-of-00003.safetensors"),
    LONG: WeightName("model", None, ".safetensors", 1, 163, "model-*-of-000163.safetensors"),
    "model.fp16-00002-of-00003.safetensors": WeightName(
        "model", "fp16", ".safetensors", 2, 3, "model.fp16-*-of-00003.safetensors"
    ),
    "diffusion_pytorch_model-00002-of-00003.fp16.bin": WeightName(
        "diffusion_pytorch_model", "fp16", ".bin", 2, 3, "diffusion_pytorch_model-*-of-00003.fp16.bin"
    ),
    "my.lora-00002-of-00003.pt": WeightName("my.lora", None, ".pt", 2, 3, "my.lora-*-of-00003.pt"),
    "my-lora.fp16.safetensors": WeightName("my-lora.fp16", None, ".safetensors"),
    "my-lora-00001-of-00002.fp16.safetensors": WeightName("my-lora-00001-of-00002.fp16", None, ".safetensors"),
    "model.fp16-00001-of-00002.ema.safetensors": WeightName("model.fp16-00001-of-00002.ema", None, ".safetensors"),
    "model.fp16.ema.safetensors": WeightName("model.fp16.ema", None, ".safetensors"),
    "model..safetensors": WeightName("model.", None, ".safetensors"),
    "model.fp16.bin": WeightName("model.fp16", None, ".bin"),  # no library looks for model.bin
    "model.fp16 (1).safetensors": WeightName("model.fp16 (1)", None, ".safetensors"),
    "model-1-of-3.safetensors": WeightName("model-1-of-3", None, ".safetensors"),
    "consolidated.00.pth": WeightName("consolidated.00", None, ".pth"),
    "best.pth.tar": WeightName("best", None, ".pth.tar"),
    "A.CKPT": WeightName("A", None, ".ckpt"),
    ".safetensors": None,
    "config.json": None,
    "model.safetensors.index.json": None,
    "model.safetensors.bak": None,
}


@pytest.mark.parametrize("name", PARSED)
def test_a_weight_files_name_is_read_in_its_parts(name: str) -> None:
    assert parse_weight(name) == PARSED[name]


INDEXES: dict[str, IndexName | None] = {
    "model.safetensors.index.json": IndexName("model", None, ".safetensors"),
    "model.safetensors.index.fp16.json": IndexName("model", "fp16", ".safetensors"),
    "model.fp16.safetensors.index.json": IndexName("model", "fp16", ".safetensors"),
    "diffusion_pytorch_model.bin.fp16.index.json": IndexName("diffusion_pytorch_model", "fp16", ".bin"),
    "any.name.safetensors.index.json": IndexName("any.name", None, ".safetensors"),
    "pytorch_model.bin.fp16.index.bf16.json": None,
    "model.safetensors.index.fp16 copy.json": None,
    "model.safetensors.json": None,
    "tf_model.h5.index.json": None,
    "faiss.index.json": None,
    "model.safetensors.index.json.bak": None,
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_indexes_name_is_read_in_its_parts(name: str) -> None:
    assert parse_index(name) == INDEXES[name]


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize(("stem", "suffix"), [(p[i], s) for p in PAIRS for i, s in ((0, ".safetensors"), (1, ".bin"))])
def test_every_name_that_is_made_is_read_back(stem: str, suffix: str, variant: str | None) -> None:
    assert is_canonical(stem, suffix)
    assert not is_guess(stem, suffix)
    assert parse_weight(weight_name(stem, suffix=suffix, variant=variant)) == WeightName(stem, variant, suffix)
    shard = parse_weight(weight_name(stem, suffix=suffix, variant=variant, number=7, total=12))
    assert shard is not None
    assert (shard.stem, shard.variant, shard.number, shard.total) == (stem, variant, 7, 12)
    assert parse_index(index_name(stem, suffix=suffix, variant=variant)) == IndexName(stem, variant, suffix)


# Made


def single(path: str, where: str = "") -> WeightSet:
    name = parse_weight(path)
    assert name is not None
    return WeightSet(where, name.stem, name.variant, name.suffix, (f"{where}/{path}" if where else path,))


@pytest.mark.parametrize(
    ("source", "suffix", "variant", "wanted"),
    [
        ("model.safetensors", ".safetensors", None, "model.safetensors"),
        ("model.safetensors", ".safetensors", "bf16", "model.bf16.safetensors"),
        ("model.fp16.safetensors", ".safetensors", None, "model.safetensors"),
        ("model.fp16.safetensors", ".safetensors", "fp16", "model.fp16.safetensors"),
        ("pytorch_model.bin", ".safetensors", None, "model.safetensors"),
        ("pytorch_model.bin", ".safetensors", "bf16", "model.bf16.safetensors"),
        ("model.safetensors", ".bin", None, "pytorch_model.bin"),
        ("open_clip_pytorch_model.bin", ".safetensors", None, "open_clip_model.safetensors"),
        ("open_clip_model.safetensors", ".bin", None, "open_clip_pytorch_model.bin"),
        ("diffusion_pytorch_model.bin", ".safetensors", None, "diffusion_pytorch_model.safetensors"),
        ("adapter_model.bin", ".safetensors", None, "adapter_model.safetensors"),
        ("my-lora.ckpt", ".safetensors", None, "my-lora.safetensors"),
        ("my-lora.v2.pt", ".safetensors", "bf16", "my-lora.v2.bf16.safetensors"),
        ("A.CKPT", ".ckpt", None, "A.CKPT"),
    ],
)
@pytest.mark.parametrize("where", ["", "unet/a"])
def test_a_single_file_is_named_as_the_libraries_would_look_for_it(
    source: str, suffix: str, variant: str | None, wanted: str, where: str
) -> None:
    assert output_name(single(source, where), suffix=suffix, variant=variant) == "/".join(filter(None, (where, wanted)))


def sharded(*files: str, index: str | None) -> WeightSet:
    name = parse_weight(files[0])
    assert name is not None
    return WeightSet("", name.stem, name.variant, name.suffix, files, index)


def test_shards_keep_their_names_while_suffix_variant_and_number_stay() -> None:
    s = sharded(LONG, "odd.safetensors", index="model.safetensors.index.json")
    assert [output_name(s, suffix=s.suffix, variant=None, number=n, total=2) for n in (1, 2)] == [*s.files]
    assert output_index(s, suffix=s.suffix, variant=None) == s.index
    assert output_name(s, suffix=s.suffix, variant=None, number=2, total=3) == "model-00002-of-00003.safetensors"
    assert output_name(s, suffix=s.suffix, variant="x", number=2, total=2) == "model.x-00002-of-00002.safetensors"
    assert output_name(s, suffix=".bin", variant=None, number=2, total=2) == "pytorch_model-00002-of-00002.bin"
    assert output_name(s, suffix=".safetensors", variant=None) == "model.safetensors"
    assert output_index(s, suffix=".bin", variant="x") == "pytorch_model.bin.index.x.json"


def test_a_single_file_that_is_split_gets_an_index_and_one_shard_that_is_joined_gets_a_plain_name() -> None:
    one = single("model.safetensors")
    assert output_name(one, suffix=one.suffix, variant=None, number=1, total=2) == "model-00001-of-00002.safetensors"
    assert output_name(one, suffix=one.suffix, variant=None, number=1, total=1) == "model-00001-of-00001.safetensors"
    assert output_index(one, suffix=one.suffix, variant=None) == "model.safetensors.index.json"
    shard = sharded("model-00001-of-00001.safetensors", index=None)
    assert output_name(shard, suffix=shard.suffix, variant=None) == "model.safetensors"


# What the libraries write and read


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        8, 1, 1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def saved_by_the_hub(model: Any, folder: Path, *, variant: str | None, max_shard_size: str) -> None:
    from huggingface_hub import save_torch_state_dict

    folder.mkdir()
    pattern = "model{suffix}.safetensors" if variant is None else f"model.{variant}{{suffix}}.safetensors"
    save_torch_state_dict(model.state_dict(), folder, filename_pattern=pattern, max_shard_size=max_shard_size)


def saved(model: Any, folder: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)


SAVERS: dict[str, tuple[Callable[[], Any], Callable[..., None], dict[str, Any], str, str]] = {
    "transformers": (bert, saved, {}, "model", ".safetensors"),
    "diffusers": (unet, saved, {}, "diffusion_pytorch_model", ".safetensors"),
    "diffusers, pickled": (unet, saved, {"safe_serialization": False}, "diffusion_pytorch_model", ".bin"),
    "huggingface_hub": (bert, saved_by_the_hub, {}, "model", ".safetensors"),
}


@pytest.mark.parametrize("size", ["1GB", "8KB"])
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("saver", SAVERS)
def test_what_a_library_saves_is_one_set_with_the_names_that_it_would_be_given(
    saver: str, variant: str | None, size: str, tmp_path: Path
) -> None:
    make, save, options, stem, suffix = SAVERS[saver]
    save(make(), tmp_path / "m", variant=variant, max_shard_size=size, **options)
    files = list_directory(tmp_path / "m")
    found = survey(files, lambda name: (tmp_path / "m" / name).read_bytes(), root="m", variant=variant)
    (s,) = found.sets
    assert (s.where, s.stem, s.variant, s.suffix, s.name, s.is_guess) == ("", stem, variant, suffix, "", False)
    assert (found.left_out, found.notes) == ((), ())
    assert set(found.others) | {*s.files, s.index or s.files[0]} == set(files)
    assert found.others in ((), ("config.json",))
    total = None if size == "1GB" else len(s.files)
    numbers = [None] if total is None else range(1, total + 1)
    anew = WeightSet("", stem, "other", suffix, s.files, s.index)  # so that no name is kept
    assert [output_name(anew, suffix=suffix, variant=variant, number=n, total=total) for n in numbers] == [*s.files]
    if total is None:
        assert s.index is None
    elif saver != "huggingface_hub" or variant is None:  # which puts the variant where nothing reads it
        assert output_index(anew, suffix=suffix, variant=variant) == s.index
        assert len(s.weight_map) > len(s.files) > 1


@pytest.mark.parametrize("make", [bert, unet])
@pytest.mark.parametrize("variant", [None, "bf16"])
@pytest.mark.parametrize("size", ["1GB", "8KB"])
def test_a_library_loads_what_is_renamed_to_a_variant_and_back(
    make: Callable[[], Any], variant: str | None, size: str, tmp_path: Path
) -> None:
    model, old, new = make(), tmp_path / "old", tmp_path / "new"
    model.save_pretrained(old, max_shard_size=size, variant="fp16")
    (s,) = survey(list_directory(old), lambda name: (old / name).read_bytes(), root="m").sets
    new.mkdir()
    (new / "config.json").write_bytes((old / "config.json").read_bytes())
    numbers = [(None, None)] if s.is_single else [(n, len(s.files)) for n in range(1, len(s.files) + 1)]
    names = {}
    for path, (number, total) in zip(s.files, numbers, strict=True):
        names[path] = output_name(s, suffix=s.suffix, variant=variant, number=number, total=total)
        (new / names[path]).write_bytes((old / path).read_bytes())
    if not s.is_single:
        made = {"metadata": {}, "weight_map": {tensor: names[path] for tensor, path in s.weight_map.items()}}
        (new / output_index(s, suffix=s.suffix, variant=variant)).write_text(json.dumps(made), "utf-8")
    loaded = type(model).from_pretrained(new, variant=variant)
    want = model.state_dict()
    assert {k: torch.equal(v, want[k]) for k, v in loaded.state_dict().items()} == dict.fromkeys(want, True)


def test_a_saved_pipeline_has_a_set_for_each_component(tmp_path: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(unet(), DDPMScheduler()).save_pretrained(tmp_path / "p", variant="fp16")
    found = survey(list_directory(tmp_path / "p"), lambda n: (tmp_path / "p" / n).read_bytes(), root="p")
    assert [(s.name, s.files) for s in found.sets] == [("unet", ("unet/diffusion_pytorch_model.fp16.safetensors",))]
    assert found.others == ("model_index.json", "scheduler/scheduler_config.json", "unet/config.json")
    assert found.pipeline is not None
    assert found.pipeline["unet"] == ["diffusers", "UNet2DModel"]
