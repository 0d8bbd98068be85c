"""What each file of a model directory is: from plain listings, and from what the libraries really save."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.errors import CorruptCheckpointError, InputError, PrecconvError, UsageError
from precconv.repo import LeftOut, Survey, WeightSet, check_collisions, survey

from .samples import PROPERTY

Json = Mapping[str, object]


def look(*files: str, json_files: Json | None = None, variant: str | None = None, copy_all: bool = False) -> Survey:
    """Survey a listing; only the JSON files given can be read."""
    contents = {name: json.dumps(value).encode() for name, value in (json_files or {}).items()}
    return survey([*files, *contents], contents.__getitem__, root="repo", variant=variant, copy_all=copy_all)


def index(*shards: str, **metadata: object) -> Json:
    return {"metadata": metadata, "weight_map": {f"layer.{n}.weight": shard for n, shard in enumerate(shards)}}


def shards(stem: str, total: int, suffix: str = ".safetensors") -> list[str]:
    return [f"{stem}-{n:05d}-of-{total:05d}{suffix}" for n in range(1, total + 1)]


def converted(found: Survey) -> dict[str, tuple[str, ...]]:
    return {s.name: s.files for s in found.sets}


def left(found: Survey) -> dict[str, str]:
    return {item.path: item.why for item in found.left_out}


PIPELINE: Json = {
    "_class_name": "StableDiffusionPipeline",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "safety_checker": [None, None],
    "requires_safety_checker": False,
    "stages": [1, 2],
}

# Which files are converted


def test_a_transformers_repository_gives_its_safetensors_and_leaves_out_the_same_weights_elsewhere() -> None:
    found = look(
        ".gitattributes", "README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5",
        "flax_model.msgpack", "rust_model.ot", "onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin",
        "coreml/m.mlpackage/Data/weights/weight.bin", "model.tflite", "m-q4.gguf", "tokenizer.json",
    )  # fmt: skip
    assert found.sets == (WeightSet("", "model", None, ".safetensors", ("model.safetensors",)),)
    assert found.others == (".gitattributes", "README.md", "config.json", "tokenizer.json")
    assert found.left_out == (
        LeftOut("coreml/m.mlpackage/Data/weights/weight.bin", "the weights in another format (Core ML)"),
        LeftOut("flax_model.msgpack", "the weights in another format (Flax)"),
        LeftOut("m-q4.gguf", "the weights in another format (GGUF)"),
        LeftOut("model.tflite", "the weights in another format (TensorFlow Lite)"),
        LeftOut("onnx/config.json", "the weights in another format (ONNX)"),
        LeftOut("onnx/model.onnx", "the weights in another format (ONNX)"),
        LeftOut("openvino/openvino_model.bin", "the weights in another format (OpenVINO)"),
        LeftOut("pytorch_model.bin", "the same weights in another format; model.safetensors is converted"),
        LeftOut("rust_model.ot", "the weights in another format (rust-bert)"),
        LeftOut("tf_model.h5", "the weights in another format (TensorFlow)"),
    )
    assert (found.notes, found.pipeline) == ((), None)


def test_with_copy_all_everything_is_carried_over_and_nothing_more_is_converted() -> None:
    files = ("config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "optimizer.pt", "stray.pt")
    found = look(*files, copy_all=True)
    assert converted(found) == {"": ("model.safetensors",)}
    assert found.others == ("config.json", "onnx/model.onnx", "optimizer.pt", "pytorch_model.bin", "stray.pt")
    assert found.left_out == ()


def test_shards_with_an_index_are_one_set_and_the_index_is_not_carried_over() -> None:
    names = shards("model", 3)
    made = index(names[2], names[0], names[1], total_size=12, total_parameters=3)
    found = look(*names, "config.json", json_files={"model.safetensors.index.json": made})
    assert found.sets == (
        WeightSet(
            "", "model", None, ".safetensors", tuple(names), "model.safetensors.index.json",
            {"layer.0.weight": names[2], "layer.1.weight": names[0], "layer.2.weight": names[1]},
            {"total_size": 12, "total_parameters": 3},
        ),
    )  # fmt: skip
    assert found.others == ("config.json",)


def test_shards_below_a_directory_are_named_from_the_root() -> None:
    names = shards("diffusion_pytorch_model", 2)
    path = "unet/diffusion_pytorch_model.safetensors.index.json"
    (s,) = look(*(f"unet/{n}" for n in names), json_files={path: index(*names)}).sets
    assert s.files == tuple(f"unet/{n}" for n in names)
    assert dict(s.weight_map) == {f"layer.{n}.weight": f"unet/{name}" for n, name in enumerate(names)}
    assert (s.where, s.name, s.index) == ("unet", "unet", path)


def test_an_index_may_name_files_in_directories_below_which_then_are_no_sets_of_their_own() -> None:
    found = look(
        "parts/a.safetensors", "parts/b.safetensors", "parts/c.safetensors",
        json_files={"model.safetensors.index.json": index("parts/a.safetensors", "parts/b.safetensors")},
    )  # fmt: skip
    assert converted(found) == {"": ("parts/a.safetensors", "parts/b.safetensors"), "parts": ("parts/c.safetensors",)}


def test_complete_shards_without_an_index_are_a_set_with_a_note() -> None:
    names = shards("model", 2)
    found = look(*names)
    assert found.sets == (WeightSet("", "model", None, ".safetensors", tuple(names)),)
    assert not found.sets[0].is_single
    assert found.notes == (f"{names[0]}: there is no index, and the 2 shards are complete by their numbers",)


def test_the_complete_one_of_two_numberings_without_an_index_is_taken() -> None:
    found = look(*shards("model", 2), "model-00002-of-00003.safetensors")
    assert converted(found) == {"": tuple(shards("model", 2))}
    used = "model-00001-of-00002.safetensors"
    assert left(found) == {"model-00002-of-00003.safetensors": f"a shard of another save; {used} is converted"}


def test_a_leftover_shard_of_another_numbering_is_left_out() -> None:
    names = shards("model", 2)
    path = "model.safetensors.index.json"
    found = look(*names, "model-00003-of-00003.safetensors", json_files={path: index(*names)})
    assert converted(found) == {"": tuple(names)}
    assert left(found) == {"model-00003-of-00003.safetensors": f"a shard of another save; {path} is converted"}


@pytest.mark.parametrize(
    ("stem", "takes_index"), [("model", False), ("adapter_model", False), ("diffusion_pytorch_model", True)]
)
def test_beside_an_index_of_the_same_model_a_single_file_counts_as_its_library_has_it(
    stem: str, takes_index: bool
) -> None:
    names, path = shards(stem, 2), f"{stem}.safetensors.index.json"
    found = look(f"{stem}.safetensors", *names, json_files={path: index(*names)})
    assert converted(found) == {"": tuple(names) if takes_index else (f"{stem}.safetensors",)}
    assert set(left(found)) == ({f"{stem}.safetensors"} if takes_index else {*names, path})


def test_the_index_of_what_is_not_converted_is_never_read() -> None:
    found = look("model.safetensors", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin")
    assert converted(found) == {"": ("model.safetensors",)}
    assert len(found.left_out) == 2


def test_a_file_that_may_be_anything_beside_the_weights_is_carried_over_and_named() -> None:
    found = look("pytorch_model.bin", "colbert_linear.pt", "vocab.bin", "model.pth", "extra.ckpt")
    assert converted(found) == {"": ("pytorch_model.bin",)}
    assert found.others == ("colbert_linear.pt", "vocab.bin")
    assert set(left(found)) == {"model.pth", "extra.ckpt"}
    assert [n.rpartition(": ")[2] for n in found.notes] == ["colbert_linear.pt", "vocab.bin"]


def test_stray_weights_beside_a_canonical_set_are_named_and_not_merged() -> None:
    found = look("model.safetensors", "extra.safetensors", "speakers.pt", "model.pth", "pytorch_model.safetensors")
    assert converted(found) == {"": ("model.safetensors",)}
    assert left(found) == {
        "extra.safetensors": "not part of model.safetensors",
        "pytorch_model.safetensors": "not part of model.safetensors",  # no library looks for it
        "model.pth": "the same weights in another format; model.safetensors is converted",
    }


def test_without_a_canonical_set_every_weight_file_is_one_and_some_are_guesses() -> None:
    found = look("kokoro.pth", "voices/a.pt", "voices/b.pt", "vocab.bin", "x.safetensors", "best.pth.tar", "Y.CKPT")
    assert converted(found) == {
        "kokoro": ("kokoro.pth",),
        "vocab": ("vocab.bin",),
        "x": ("x.safetensors",),
        "best": ("best.pth.tar",),
        "Y": ("Y.CKPT",),
        "voices/a": ("voices/a.pt",),
        "voices/b": ("voices/b.pt",),
    }
    assert {s.name for s in found.sets if not s.is_guess} == {"x", "Y", "best"}


def test_beside_safetensors_other_files_of_the_same_stem_are_left_out_also_where_no_library_looks_for_it() -> None:
    found = look("sd15.safetensors", "sd15.ckpt", "vocab.bin", "vocab.pt")
    assert converted(found) == {
        "sd15": ("sd15.safetensors",),
        "vocab.bin": ("vocab.bin",),  # nothing says that these two are one model
        "vocab.pt": ("vocab.pt",),
    }
    assert left(found) == {"sd15.ckpt": "the same weights in another format; sd15.safetensors is converted"}


def test_several_models_of_one_directory_are_several_sets() -> None:
    found = look(
        "model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin",
        "sub/adapter_model.bin", "sub/pytorch_lora_weights.bin", "2_Dense/pytorch_model.bin",
    )  # fmt: skip
    assert converted(found) == {
        "model": ("model.safetensors",),
        "open_clip_model": ("open_clip_model.safetensors",),
        "2_Dense": ("2_Dense/pytorch_model.bin",),
        "sub/adapter_model": ("sub/adapter_model.bin",),
        "sub/pytorch_lora_weights": ("sub/pytorch_lora_weights.bin",),
    }
    assert set(left(found)) == {"pytorch_model.bin", "open_clip_pytorch_model.bin"}


def test_names_stay_unique_where_a_stem_is_called_as_a_directory() -> None:
    found = look("unet.safetensors", "vae.safetensors", "unet/model.safetensors")
    assert converted(found) == {
        "unet.safetensors": ("unet.safetensors",),
        "vae": ("vae.safetensors",),
        "unet/model.safetensors": ("unet/model.safetensors",),
    }


def test_shards_numbered_from_0_are_complete_too() -> None:
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (0, 1)]
    assert converted(look(*names)) == {"": tuple(names)}


def test_unreadable_weights_are_noted_where_everything_else_is_a_guess() -> None:
    said = ("weights are there as GGUF, which cannot be read, and perhaps nowhere else",)
    assert look("m.gguf", "imatrix.bin").notes == said
    assert look("m.gguf", "sd.ckpt").notes == ()


# Where other weights stand back


@pytest.mark.parametrize(
    "only",
    [("consolidated.safetensors",), ("consolidated.00.pth", "consolidated.01.pth"), ("original/consolidated.00.pth",)],
)
def test_weights_in_another_layout_are_converted_when_there_are_no_others(only: tuple[str, ...]) -> None:
    alone = look(*only, "params.json", "training_args.bin")
    assert sorted(f for s in alone.sets for f in s.files) == sorted(only)
    beside = look(*only, "params.json", "model.safetensors")
    assert converted(beside) == {"": ("model.safetensors",)}
    assert set(left(beside)) == set(only)


def test_a_stand_in_file_of_one_directory_is_not_left_out_for_the_weights_of_another() -> None:
    found = look("a/consolidated.safetensors", "b/model.safetensors")
    assert converted(found) == {"a": ("a/consolidated.safetensors",), "b": ("b/model.safetensors",)}


TRAINING = (
    "training_args.bin", "optimizer.pt", "optimizer.bin", "optimizer_1.bin", "scheduler.pt", "scheduler.bin",
    "scheduler_1.bin", "scaler.pt", "sampler.bin", "rng_state.pth", "rng_state_0.pth", "trainer_state.json",
    "random_states_0.pkl", "zero_to_fp32.py", "latest", "global_step10/mp_rank_00_model_states.pt",
    "global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "pytorch_model_fsdp_0/__0_0.distcp",
    "optimizer_0/__0_0.distcp", "x.distcp", "checkpoint-10/model.safetensors", "checkpoint-10/config.json",
)  # fmt: skip


def test_suffixes_and_directories_count_in_any_case() -> None:
    found = look("model.safetensors", "M.GGUF", "ONNX/x.bin", "Original/consolidated.00.pth")
    assert set(left(found)) == {"M.GGUF", "ONNX/x.bin", "Original/consolidated.00.pth"}


@pytest.mark.parametrize("copy_all", [False, True])
def test_training_state_is_never_taken_for_weights(copy_all: bool) -> None:
    found = look("model.safetensors", "config.json", *TRAINING, copy_all=copy_all)
    assert converted(found) == {"": ("model.safetensors",)}
    assert found.others == (tuple(sorted(("config.json", *TRAINING))) if copy_all else ("config.json",))
    assert set(left(found)) == (set() if copy_all else set(TRAINING))


def test_files_that_only_training_state_makes_suspect_are_kept_without_it() -> None:
    assert look("model.safetensors", ".metadata", "latest").others == (".metadata", "latest")
    assert ".metadata" in look("model.safetensors", ".metadata", "global_step1/a.pt").others
    assert set(left(look("model.safetensors", ".metadata", "0.distcp"))) == {".metadata", "0.distcp"}


def test_checkpoints_of_a_run_that_saved_no_model_are_sets() -> None:
    found = look("checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt", "checkpoint-20/model.safetensors")
    assert set(converted(found)) == {"checkpoint-10", "checkpoint-20"}


# Pipelines


def pipeline(*files: str, **options: Any) -> Survey:
    return look(*files, json_files={"model_index.json": PIPELINE}, **options)


def test_a_pipelines_components_are_sets_and_single_files_in_its_root_are_left_out() -> None:
    found = pipeline(
        "unet/diffusion_pytorch_model.safetensors", "unet/config.json", "text_encoder/model.safetensors",
        "sd.safetensors", "sd.ckpt", "checkpoint-5/unet/diffusion_pytorch_model.safetensors",
    )  # fmt: skip
    assert set(converted(found)) == {"unet", "text_encoder"}
    assert found.others == ("model_index.json", "unet/config.json")
    assert found.pipeline == PIPELINE
    assert left(found)["sd.ckpt"] == "beside a pipeline, whose components are converted"
    assert set(left(found)) == {"sd.ckpt", "sd.safetensors", "checkpoint-5/unet/diffusion_pytorch_model.safetensors"}


def test_checkpoints_saved_beside_a_pipeline_are_left_out_whatever_else_its_root_holds() -> None:
    found = pipeline("unet/model.safetensors", "text_encoder/model.safetensors", "checkpoint-5/unet/model.safetensors")
    assert left(found) == {"checkpoint-5/unet/model.safetensors": "a checkpoint saved during training"}


def test_an_index_in_a_pipelines_root_still_must_name_all_its_shards() -> None:
    names = shards("x", 2)
    files = {"model_index.json": PIPELINE, "x.safetensors.index.json": index(names[0])}
    with pytest.raises(InputError, match=f"x.safetensors.index.json: it does not name {names[1]}, numbered as"):
        look("unet/model.safetensors", "text_encoder/model.safetensors", *names, json_files=files)


def test_a_shard_is_not_left_out_for_the_directory_it_lies_in() -> None:
    path = "original/a.safetensors"
    found = look(path, "original/b.safetensors", json_files={"model.safetensors.index.json": index(path)})
    assert converted(found) == {"": (path,)}
    assert set(left(found)) == {"original/b.safetensors"}


def test_a_single_file_is_converted_where_a_pipelines_components_have_no_weights() -> None:
    found = pipeline("unet/config.json", "text_encoder/config.json", "sd.safetensors")
    assert converted(found) == {"": ("sd.safetensors",)}


# Variants

TWO = ("unet/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors")


def test_the_file_without_variant_is_converted_unless_a_variant_is_asked_for() -> None:
    plain, fp16 = TWO
    assert converted(look(*TWO)) == {"unet": (plain,)}
    assert left(look(*TWO)) == {fp16: f"the same weights as variant fp16; {plain[5:]} is converted"}
    assert converted(look(*TWO, variant="fp16")) == {"unet": (fp16,)}
    assert left(look(*TWO, variant="fp16")) == {plain: f"the same weights without variant; {fp16[5:]} is converted"}


def test_a_component_without_the_variant_gives_its_plain_file_and_that_is_said() -> None:
    found = pipeline(*TWO, "text_encoder/model.safetensors", variant="fp16")
    assert converted(found) == {"text_encoder": ("text_encoder/model.safetensors",), "unet": (TWO[1],)}
    said = "there is no variant fp16 of text_encoder/model.safetensors, so the files without one are used"
    assert found.notes == (said,)


def test_a_variant_in_another_format_is_still_that_variant() -> None:
    found = look("model.safetensors", "pytorch_model.fp16.bin", variant="fp16")
    assert converted(found) == {"": ("pytorch_model.fp16.bin",)}


def test_the_only_variant_is_converted_and_said() -> None:
    found = look("model.fp16.safetensors")
    assert (found.sets[0].stem, found.sets[0].variant) == ("model", "fp16")
    assert found.notes == ("model.fp16.safetensors: the weights are there as variant fp16 only",)


@pytest.mark.parametrize(
    ("index_path", "names"),
    [
        ("model.safetensors.index.fp16.json", shards("model.fp16", 2)),
        ("model.fp16.safetensors.index.json", shards("model.fp16", 2)),
        (
            "diffusion_pytorch_model.safetensors.fp16.index.json",
            [f"diffusion_pytorch_model-0000{n}-of-00002.fp16.safetensors" for n in (1, 2)],
        ),
    ],
    ids=["transformers", "huggingface_hub", "old diffusers"],
)
def test_sharded_variants_are_found_under_each_of_their_namings(index_path: str, names: list[str]) -> None:
    stem = index_path.partition(".")[0]
    found = look(f"{stem}.safetensors", *names, json_files={index_path: index(*names)}, variant="fp16")
    (s,) = found.sets
    assert (s.stem, s.variant, s.files, s.index) == (stem, "fp16", tuple(names), index_path)
    assert set(left(found)) == {f"{stem}.safetensors"}
    plain = look(f"{stem}.safetensors", *names, json_files={index_path: index(*names)})
    assert converted(plain) == {"": (f"{stem}.safetensors",)}
    assert set(left(plain)) == {*names, index_path}


def test_a_word_in_any_other_name_is_no_variant() -> None:
    found = look("my-lora.fp16.safetensors", "my-lora.safetensors", "x.v1.5.ckpt")
    assert [(s.stem, s.variant) for s in found.sets] == [
        ("my-lora.fp16", None), ("my-lora", None), ("x.v1.5", None),
    ]  # fmt: skip


# What is refused

UNREADABLE = {
    "model.onnx": "ONNX",
    "model.onnx_data": "ONNX",
    "unet/weights.pb": "ONNX",
    "onnx/model.bin": "ONNX",
    "openvino_model.bin": "OpenVINO",
    "openvino/a.bin": "OpenVINO",
    "tf_model.h5": "TensorFlow",
    "tf_model-00001-of-00002.h5": "TensorFlow",
    "tf_model.h5.index.json": "TensorFlow",
    "saved_model.pb": "TensorFlow",
    "bert_model.ckpt.data-00000-of-00001": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "flax_model.msgpack.index.json": "Flax",
    "a.tflite": "TensorFlow Lite",
    "a.gguf": "GGUF",
    "ggml-base.en.bin": "GGML",
    "a.mlmodel": "Core ML",
    "a.mlpackage/Data/weight.bin": "Core ML",
    "a.mlmodelc/weights/weight.bin": "Core ML",
    "coreml/weight.bin": "Core ML",
    "rust_model.ot": "rust-bert",
    "unet/model.flashpack": "FlashPack",
    "model_state.pdparams": "PaddlePaddle",
    "a.nemo": "NeMo",
    "a.engine": "TensorRT",
}


@pytest.mark.parametrize("path", UNREADABLE)
def test_weights_that_cannot_be_read_are_named_when_there_are_no_others(path: str) -> None:
    with pytest.raises(InputError) as e:
        look(path, "config.json")
    assert str(e.value) == f"repo: the weights are there as {UNREADABLE[path]} only, which cannot be read"
    assert left(look(path, "model.safetensors")) == {path: f"the weights in another format ({UNREADABLE[path]})"}


MODEL = "model.safetensors"
GONE = "convert the safetensors or torch checkpoint they were made from"
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any], type[PrecconvError], str, str | None]] = {
    "an empty directory": ((), {}, InputError, "repo: there are no files", None),
    "only caches": ((".git/config", ".cache/x"), {}, InputError, "repo: there are no files", None),
    "no weights": (
        ("README.md", "config.json"), {}, InputError,
        ("repo: there are no weights: none of the 2 files ends in "
        ".safetensors, .bin, .pt, .pth, .ckpt, .pth.tar, .pt.tar"),
        "give the directory that the model was saved to",
    ),
    "only GGUF": (
        ("m.Q4_K_M.gguf", "README.md"), {}, InputError,
        "repo: the weights are there as GGUF only, which cannot be read", GONE,
    ),
    "only GGML": (
        ("ggml-base.bin",), {}, InputError, "repo: the weights are there as GGML only, which cannot be read", GONE,
    ),
    "only ONNX and Flax": (
        ("onnx/model.onnx", "flax_model.msgpack"), {}, InputError,
        "repo: the weights are there as Flax and ONNX only, which cannot be read", GONE,
    ),
    "only TensorFlow": (
        ("model.ckpt.index", "model.ckpt.meta", "model.ckpt.data-00000-of-00001", "checkpoint"), {}, InputError,
        "repo: the weights are there as TensorFlow only, which cannot be read", GONE,
    ),
    "only training state": (
        ("global_step5/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py"), {}, InputError,
        ("repo: there is only training state and no weights: "
        "global_step5/mp_rank_00_model_states.pt, zero_to_fp32.py, latest"),
        "convert what the training run saved as the model; a DeepSpeed run's own zero_to_fp32.py makes it",
    ),
    "only a distributed checkpoint": (
        ("__0_0.distcp", ".metadata"), {}, InputError,
        "repo: this is a distributed checkpoint (DCP): its tensors are spread over .distcp files",
        "join it with python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR OUT.pt",
    ),
    "several variants": (
        ("model.fp16.safetensors", "model.bf16.safetensors"), {}, UsageError,
        "repo: there are only variants: bf16, fp16",
        "choose one: --from-variant bf16 or --from-variant fp16",
    ),
    "a variant that no directory has": (
        TWO, {"variant": "bf16"}, UsageError, "repo: there is no variant 'bf16'; there is fp16", "--from-variant fp16",
    ),
    "a variant where there are none": (
        (MODEL,), {"variant": "fp16"}, UsageError,
        "repo: there is no variant 'fp16'; the weights have no variants", "leave out --from-variant",
    ),
    "a component with neither the variant nor a plain file": (
        ("a/model.fp16.safetensors", "b/model.ema.safetensors"), {"variant": "fp16"}, UsageError,
        "repo/b: there is no variant 'fp16' and no plain file, only: ema",
        "choose one: --from-variant ema",
    ),
    "shards missing without an index": (
        ("model-00001-of-00004.safetensors", "model-00003-of-00004.safetensors"), {}, InputError,
        "repo/model-00001-of-00004.safetensors: 4 shards without an index, not found: number 2, 4",
        "download the whole checkpoint",
    ),
    "an absurd number of shards without an index": (
        ("model-000000001-of-999999999.safetensors",), {}, InputError,
        "repo/model-000000001-of-999999999.safetensors: 999,999,999 shards without an index, not found: number "
        + ", ".join(map(str, range(2, 102))) + " and more",
        "download the whole checkpoint",
    ),
    "a shard twice": (
        (*shards("model", 2), "model-000001-of-00002.safetensors"), {}, InputError,
        "repo/model-000001-of-00002.safetensors: 2 shards without an index, numbered twice or beyond their total",
        "download the whole checkpoint",
    ),
    "a number beyond the total for one that is missing": (
        ("model-00001-of-00002.safetensors", "model-00003-of-00002.safetensors"),
        {},
        InputError,
        "repo/model-00001-of-00002.safetensors: 2 shards without an index, not found: number 2",
        "download the whole checkpoint",
    ),
    "a number beyond the total": (
        ("model-00001-of-00001.safetensors", "model-00002-of-00001.safetensors"),
        {},
        InputError,
        "repo/model-00001-of-00001.safetensors: 1 shards without an index, numbered twice or beyond their total",
        "download the whole checkpoint",
    ),
    "two complete numberings": (
        (*shards("model", 1), *shards("model", 2)), {}, InputError,
        ("repo: there are 2 complete sets of shards and no index: "
        "model-00001-of-00001.safetensors, model-00001-of-00002.safetensors"),
        "remove the one that is not in use",
    ),
    "two indexes of one model": (
        ("model.safetensors.index.fp16.json", "model.fp16.safetensors.index.json"), {"variant": "fp16"}, InputError,
        ("repo: there are two indexes of one checkpoint: "
        "model.fp16.safetensors.index.json, model.safetensors.index.fp16.json"),
        "remove the one that is not in use",
    ),
    "names that differ in case": (
        (MODEL, "Readme.md", "README.md"), {}, InputError,
        "repo: 'README.md' and 'Readme.md' are one name where case or Unicode forms do not count (macOS, Windows)",
        "rename one of them",
    ),
    "weights that differ in case": (
        ("A.safetensors", "a.safetensors"),
        {},
        InputError,
        ("repo: 'A.safetensors' and 'a.safetensors' are one name "
        "where case or Unicode forms do not count (macOS, Windows)"),
        "rename one of them",
    ),
    "directories that differ in case": (
        ("Unet/model.safetensors", "unet/config.json"), {}, InputError,
        "repo: 'Unet' and 'unet' are one name where case or Unicode forms do not count (macOS, Windows)",
        "rename one of them",
    ),
    "names that differ in Unicode's forms": (
        (MODEL, "caf\u00e9.txt", "cafe\u0301.txt"), {}, InputError,
        ("repo: 'cafe\u0301.txt' and 'caf\u00e9.txt' are one name "
        "where case or Unicode forms do not count (macOS, Windows)"),
        "rename one of them",
    ),
    "a path that leaves the directory": (
        (MODEL, "../x"), {}, InputError, "repo: the path '../x' leaves the directory", "rename the file",
    ),
    "a path that is too long": (
        (MODEL, "x" * 5000),
        {},
        InputError,
        f"repo: the path '{'x' * 200}…' is too long",
        "rename the file",
    ),
    "an absolute path": (
        (MODEL, "/etc/passwd"), {}, InputError, "repo: the path '/etc/passwd' is absolute", "rename the file",
    ),
    "a component without a directory": (
        ("unet/diffusion_pytorch_model.safetensors",), {"json_files": {"model_index.json": PIPELINE}}, InputError,
        "repo/model_index.json: its component text_encoder has no directory",
        "download the whole pipeline, or set what it does without to [null, null]",
    ),
    "two components without directories": (
        (MODEL,), {"json_files": {"model_index.json": PIPELINE}}, InputError,
        "repo/model_index.json: its components unet, text_encoder have no directory",
        "download the whole pipeline, or set what it does without to [null, null]",
    ),
    "a component outside": (
        (MODEL,), {"json_files": {"model_index.json": {"../unet": ["a", "B"]}}}, CorruptCheckpointError,
        "repo/model_index.json: its component '../unet' leaves the directory", None,
    ),
    "a component of two parts": (
        (MODEL,), {"json_files": {"model_index.json": {"a/b": ["a", "B"]}}}, CorruptCheckpointError,
        "repo/model_index.json: its component 'a/b' is not the name of a directory", None,
    ),
    "a pipeline that is no object": (
        (MODEL,), {"json_files": {"model_index.json": [1]}}, CorruptCheckpointError,
        "repo/model_index.json: its JSON is not an object", None,
    ),
    "a shard of two models": (
        ("a.safetensors",),
        {"json_files": {p: index("a.safetensors") for p in ("x.safetensors.index.json", "y.safetensors.index.json")}},
        InputError,
        "repo: 'a.safetensors' belongs to two checkpoints: x.safetensors.index.json, y.safetensors.index.json",
        "remove the index that is not in use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_with_what_is_there(case: str) -> None:
    files, options, kind, message, hint = REFUSED[case]
    with pytest.raises(PrecconvError) as e:
        look(*files, **options)
    assert type(e.value) is kind
    assert str(e.value) == message
    assert e.value.hint == hint


def test_training_state_that_an_index_calls_a_shard_is_refused() -> None:
    path = "model.bin.index.json"
    with pytest.raises(CorruptCheckpointError) as e:
        look("optimizer.bin", json_files={path: index("optimizer.bin")})
    assert str(e.value) == f"repo/{path}: its shard 'optimizer.bin' is optimizer state of a training run"
    assert e.value.hint is None


ONE = "are one name where case or Unicode forms do not count (macOS, Windows)"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("a", "a"), "out: 'a' would be written twice"),
        (("a/b", "a"), "out: 'a' would be a file and a directory"),
        (("A", "a/b"), f"out: 'A' and 'a' {ONE}"),
        (("x/y/1", "X/y/2"), f"out: 'x/y' and 'X/y' {ONE}"),
        (("x/stra\u00dfe", "x/STRASSE"), f"out: 'x/stra\u00dfe' and 'x/STRASSE' {ONE}"),
    ],
)
def test_outputs_that_would_fall_onto_each_other_are_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as e:
        check_collisions(paths, root="out")
    assert str(e.value) == message
    assert "rename one" in (e.value.hint or "")


def test_outputs_that_are_all_different_pass() -> None:
    check_collisions(["a/b", "a/c", "b/a", "d", "a/x/y"], root="out")


WORDS = (
    "model.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "pytorch_model.fp16.bin",
    "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors", "a.safetensors", "a.ckpt",
    "a.pt", "vocab.bin", *shards("model", 2), *shards("model.fp16", 2), *shards("pytorch_model", 2, ".bin"),
    "model-00003-of-00003.safetensors", "consolidated.safetensors", "consolidated.00.pth", "optimizer.pt", "m.gguf",
    "config.json", "README.md", "latest", ".metadata", "x.distcp", "model.onnx",
)  # fmt: skip
INDEXES = {
    "model.safetensors.index.json": index(*shards("model", 2)),
    "model.safetensors.index.fp16.json": index(*shards("model.fp16", 2)),
    "pytorch_model.bin.index.json": index(*shards("pytorch_model", 2, ".bin")),
    "consolidated.safetensors.index.json": index("consolidated.safetensors"),
}
PLACES = ("", "unet/", "text_encoder/", "original/", "onnx/", "checkpoint-5/", "global_step1/", "original/sub/")
PATHS = st.builds("".join, st.tuples(st.sampled_from(PLACES), st.sampled_from([*WORDS, *INDEXES, ".cache/x"])))


@settings(PROPERTY, max_examples=1500)
@given(st.lists(PATHS, unique=True, max_size=8), st.booleans(), st.sampled_from([None, "fp16"]), st.booleans())
def test_every_file_of_a_listing_is_one_thing_whatever_the_order(
    paths: list[str], is_pipeline: bool, variant: str | None, copy_all: bool
) -> None:
    contents = {p: json.dumps(INDEXES.get(p.rpartition("/")[2])).encode() for p in paths}
    contents["model_index.json"] = json.dumps(PIPELINE).encode()
    paths = [*paths, "model_index.json"] if is_pipeline else paths

    def found(files: list[str]) -> Survey | str:
        try:
            return survey(files, contents.__getitem__, root="repo", variant=variant, copy_all=copy_all)
        except (InputError, UsageError) as e:
            return str(e)

    seen = found(paths)
    assert found(paths[::-1]) == seen
    if isinstance(seen, str):
        assert seen.startswith("repo")
        return
    parts = [
        *(f for s in seen.sets for f in s.files), *(s.index for s in seen.sets if s.index), *seen.others,
        *(item.path for item in seen.left_out),
    ]  # fmt: skip
    assert sorted(parts) == sorted(p for p in paths if not p.endswith(".cache/x"))
    assert len({s.name for s in seen.sets}) == len(seen.sets) > 0
    assert not (copy_all and seen.left_out)


def test_the_index_of_another_layout_is_read_when_there_are_no_other_weights() -> None:
    names = shards("consolidated", 2)
    path = "consolidated.safetensors.index.json"
    found = look(*names, json_files={path: index(*names)})
    assert found.sets[0].index == path
    beside = look("model.safetensors", *names, json_files={path: index(*names)})
    assert converted(beside) == {"": ("model.safetensors",)}
    assert set(left(beside)) == {*names, path}


LARGE: dict[str, list[str]] = {
    "other files": [f"d{i % 100}/f{i}.txt" for i in range(30_000)],
    "models": [f"d{i}/model.safetensors" for i in range(30_000)],
    "single files in two formats": [f"f{i}{s}" for i in range(15_000) for s in (".safetensors", ".ckpt")],
    "strays": ["model.safetensors", *(f"f{i}.pt" for i in range(30_000))],
    "numberings": ["model.safetensors", *(f"model-00001-of-{i:06d}.safetensors" for i in range(2, 30_000))],
    "checkpoints": ["model.safetensors", *(f"checkpoint-{i}/model.safetensors" for i in range(30_000))],
    "long names": [*(f"{i}{'é/' * 2000}x" for i in range(9)), "a-00000" * 500 + ".bin", ".index" * 600 + ".json"],
}


@pytest.mark.parametrize("case", LARGE)
def test_an_absurd_listing_takes_seconds(case: str) -> None:
    start = time.process_time()
    found = look("z/model.safetensors", *LARGE[case])
    assert time.process_time() - start < 15  # comparing each file with each other one would take minutes
    assert "z" in converted(found)
