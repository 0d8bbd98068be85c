"""References to models on the Hub: what is one, what is a path, and what is said of what is neither."""

from __future__ import annotations

import pytest

import precconv
from precconv.errors import HubError, InputError
from precconv.hub.refs import Ref, parse_ref

from .hub.server import HubServer
from .hub_runs import Work
from .repos import single, weight

SHA = "0123456789abcdef0123456789abcdef01234567"
REFS = {
    "org/name": Ref("org/name"),
    "Org-1/na.me_2-B": Ref("Org-1/na.me_2-B"),
    "org/name@v1.0": Ref("org/name", "v1.0"),
    f"org/name@{SHA}": Ref("org/name", SHA),
    "org/name@refs/pr/1": Ref("org/name", "refs/pr/1"),
    "org/name.bin@main": Ref("org/name.bin", "main"),
    "hf://org/name": Ref("org/name"),
    "hf://org/name/": Ref("org/name"),
    "hf://models/org/name": Ref("org/name"),
    "hf://org/name.bin": Ref("org/name.bin"),
    "hf://org/name@dev": Ref("org/name", "dev"),
    "hf://org/name@refs%2Fpr%2F1/a/b.bin": Ref("org/name", "refs/pr/1", "a/b.bin"),
    "hf://org/name/model.safetensors": Ref("org/name", None, "model.safetensors"),
    "hf://org/name@main/a b/c@d.pt": Ref("org/name", "main", "a b/c@d.pt"),
}
PAGES = {
    "": Ref("org/name"),
    "/": Ref("org/name"),
    "?library=transformers": Ref("org/name"),
    "#usage": Ref("org/name"),
    "/tree/main": Ref("org/name", "main"),
    "/tree/refs%2Fpr%2F7": Ref("org/name", "refs/pr/7"),
    "/tree/refs/pr/7": Ref("org/name", "refs/pr/7"),
    f"/commit/{SHA}": Ref("org/name", SHA),
    "/blob/main/unet/model.safetensors": Ref("org/name", "main", "unet/model.safetensors"),
    "/resolve/v1/a%20b.bin?download=true": Ref("org/name", "v1", "a b.bin"),
    "/raw/refs/pr/7/x.pt": Ref("org/name", "refs/pr/7", "x.pt"),
}
PATHS = [
    "./org/name", "../org/name", "/org/name", "org/name/", "org", "org/name/x", "org/model.safetensors", "a/b.ckpt",
    "a/b.GGUF", "org//name", "-org/name", "org/name@", "", ".", "org\\name", "C:\\org\\name", "org/na me", "org/näme",
]  # fmt: skip
HOSTILE = [
    "hf://", "hf://org", "hf://org/name/../other", "hf://org/name/a/../../b", "hf://../name", "hf://org/name//etc/x",
    "hf://org/name/./x", "hf://org/name/..\\x", "hf://datasets/org/name", "hf://spaces/org/name/x", "hf://org/name@",
    "https://huggingface.co/datasets/org/name", "https://huggingface.co/org", "https://huggingface.co/",
    "https://huggingface.co/org/name/discussions/3", "https://huggingface.co/org/name/blob/main",
    "https://huggingface.co/org/name/tree/main/unet", "https://huggingface.co/org/name/resolve/main/..%2F..%2Fx",
    "https://huggingface.co/org/name/resolve/main/a/../../x", "https://example.com/org/name",
    "https://huggingface.co.example.com/org/name", "https://huggingface.co@example.com/org/name",
]  # fmt: skip


@pytest.mark.parametrize(("text", "ref"), REFS.items())
def test_a_reference_is_read(text: str, ref: Ref) -> None:
    assert parse_ref(text) == ref


@pytest.mark.parametrize(("tail", "ref"), PAGES.items())
@pytest.mark.parametrize("host", ["https://huggingface.co", "http://HuggingFace.co", "https://hf.co"])
def test_the_address_of_a_page_is_what_it_shows(host: str, tail: str, ref: Ref) -> None:
    assert parse_ref(f"{host}/org/name{tail}") == ref


def test_an_address_on_the_users_own_hub_is_one_too(in_process: HubServer) -> None:
    assert parse_ref(f"{in_process.endpoint}/org/name/tree/dev") == Ref("org/name", "dev")


@pytest.mark.parametrize("text", PATHS)
def test_a_path_is_no_reference(text: str) -> None:
    assert parse_ref(text) is None


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_meant_as_a_reference_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_ref(text)
    assert caught.value.hint is not None
    assert "org/name" in caught.value.hint


@pytest.mark.parametrize("ref", [r for r in REFS.values() if r.file is not None and "/" not in (r.revision or "")])
def test_a_reference_to_a_file_is_read_as_it_is_written(ref: Ref) -> None:
    assert parse_ref(str(ref)) == ref


def test_a_local_path_wins(here: Work) -> None:
    single(here.path / "acme" / "m", {"a": weight(0)})
    here.hub.create("acme/m", {"model.safetensors": b"another"})
    assert parse_ref("acme/m") is None
    assert [t.name for t in precconv.inspect("acme/m")] == ["a"]
    here.ok("acme/m", "--to", "bf16")
    assert here.hub.requests == []
    assert (here.path / "acme" / "m-bf16").is_dir()


@pytest.mark.parametrize(
    "command", [["inspect"], ["convert", "--to", "bf16"], ["convert", "--to", "bf16", "--dry-run"]]
)
def test_what_is_neither_here_nor_there_is_said_to_be_neither(command: list[str], here: Work) -> None:
    said = here.refused(5, *command, "models/lama")
    assert "models/lama: is no file or directory here, and as a model on the Hub there is no such repo" in said
    assert "no file or directory here" not in here.refused(5, *command, "hf://models/lama")
    assert "models/lama: no such file or directory\n" in here.refused(1, *command, "./models/lama")


def test_a_guess_is_said_to_be_one_where_the_hub_cannot_be_asked(here: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    here.hub.go_away(0)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="is no file or directory here, and as a model on the Hub the connection"):
        precconv.inspect("models/lama")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="is no file or directory here, and as a model on the Hub is not in the cache"):
        precconv.inspect("models/lama")
