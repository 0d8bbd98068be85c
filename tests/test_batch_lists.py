"""What a batch is about, and where its outputs go: lists, patterns, templates; all errors come before any work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from precconv import InputError, Rule, RuleError, UsageError, convert
from precconv.batch.lists import Entry, entries_of, read_arguments
from precconv.batch.options import Options, check_options
from precconv.batch.prepare import Batch, prepare
from precconv.batch.sources import Names, names_of

from .processes import posix
from .samples import random_tensor, write_checkpoint

HERE = Path()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names: str) -> None:
    from precconv.dtypes import FP32

    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix:
            write_checkpoint(path, {"w": random_tensor(FP32, (4, 4), 0)})
        else:
            path.mkdir(parents=True)
            write_checkpoint(path / "model.safetensors", {"w": random_tensor(FP32, (4, 4), 0)})


def read(*arguments: str, stdin: bytes = b"") -> list[Entry]:
    return read_arguments(arguments, lambda: stdin)


def sources(*arguments: str, stdin: bytes = b"") -> list[str]:
    return [e.source for e in read(*arguments, stdin=stdin)]


def batch(entries: Sequence[Entry], output: str | None = None, output_dir: str = "out", **options: Any) -> Batch:
    return prepare(entries, options={"to": "bf16", **options}, output=output, output_dir=Path(output_dir))


def outputs(made: Batch) -> list[str]:
    return [Path(p.place).relative_to(Path.cwd()).as_posix() for p in made.jobs]


def test_a_file_on_the_hub_is_named_as_a_file_and_cannot_be_published() -> None:
    made = batch([Entry("hf://org/name/sub/model.fp32.safetensors"), Entry("org/name")])
    assert outputs(made) == ["out/model.bf16.safetensors", "out/name-bf16"]
    with pytest.raises(UsageError, match="--push publishes whole models"):
        batch([Entry("hf://org/name/model.safetensors")], push="me/{name}")


# Lists


def test_a_list_has_a_source_a_line_and_comments() -> None:
    text = "\ufeffa.safetensors\r\n\n# none\n  b/c  \norg/name@v1 # why\n   # indented\nwith#hash and space\n"
    Path("l.txt").write_text(text, "utf-8", newline="")
    assert sources("l.txt") == ["a.safetensors", "b/c", "org/name@v1", "with#hash and space"]


def test_an_existing_file_with_a_lists_suffix_is_a_list_and_everything_else_a_source() -> None:
    for name in ("l.txt", "l.list", "L.TXT"):
        Path(name).write_text(f"from-{name}")
    Path("dir.txt").mkdir()
    arguments = ("l.txt", "org/name", "l.list", "missing.txt", "dir.txt", "L.TXT")
    assert sources(*arguments) == ["from-l.txt", "org/name", "from-l.list", "missing.txt", "dir.txt", "from-L.TXT"]


def test_a_dash_is_stdin_once() -> None:
    assert sources("a", "-", stdin=b"b\n# x\nc") == ["a", "b", "c"]
    with pytest.raises(UsageError, match="given twice"):
        read("-", "-")


def test_a_binary_file_is_no_list() -> None:
    Path("l.txt").write_bytes(b"ab\0c\n")
    with pytest.raises(InputError, match="line 1 is no text"):
        read("l.txt")


@posix
def test_names_that_are_no_unicode_are_kept() -> None:
    Path("l.txt").write_bytes(b"a\xff\n")
    assert sources("l.txt") == ["a\udcff"]


def test_patterns_are_expanded_in_order_and_must_match_something() -> None:
    make("m/b.safetensors", "m/a.safetensors", "m/deep/c.safetensors")
    assert sources("m/*.safetensors") == ["m/a.safetensors", "m/b.safetensors"]
    assert sources("m/**/*.safetensors") == ["m/a.safetensors", "m/b.safetensors", "m/deep/c.safetensors"]
    Path("l.txt").write_text("m/deep/*\n")
    assert sources("l.txt") == ["m/deep/c.safetensors"]
    with pytest.raises(UsageError, match=r"'m/\*.pt' matches no file"):
        read("m/*.pt")


def test_a_file_whose_name_looks_like_a_pattern_is_itself() -> None:
    make("a[1].safetensors", "a1.safetensors")
    assert sources("a[1].safetensors") == ["a[1].safetensors"]


# TOML

TOML = """
[defaults]
to = "fp16"
norms = "cast"
output = "{name}-x"
[[repo]]
source = "one"
[[repo]]
source = "two"
to = "bf16"
shard-size = "5GB"
component = { vae = "fp32" }
keep = ["*.bias"]
output = "second"
"""


def test_toml_has_defaults_and_options_for_each_source() -> None:
    Path("l.toml").write_text(TOML)
    one, two = read("l.toml")
    assert one == Entry("one", defaults={"to": "fp16", "norms": "cast", "output": "{name}-x"})
    assert two.options == {"to": "bf16", "shard_size": "5GB", "component": {"vae": "fp32"}, "keep": ["*.bias"]}
    assert two.output == "second"


def test_a_sources_own_options_win_over_the_command_line_and_that_over_the_lists_defaults() -> None:
    Path("l.toml").write_text(TOML)
    made = prepare(read("l.toml", "three"), options={"to": "fp32"}, output=None, output_dir=HERE)
    assert [(p.job.options["to"], p.job.options.get("norms")) for p in made.jobs] == [
        ("fp32", "cast"),
        ("bf16", "cast"),
        ("fp32", None),
    ]
    assert outputs(made) == ["one-x", "second", "three-fp32"]
    made = prepare(read("l.toml"), options={}, output="{stem}.{to}", output_dir=HERE)
    assert outputs(made) == ["one.fp16", "second"]


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("[[repo]]\nsource = 'a'\nto = 'bf16'\nnorm = 'cast'", "unknown key 'norm'", "did you mean 'norms'?"),
        ("[[repo]]\nsorce = 'a'", "has no 'source'", None),
        ("[[repo]]\nsource = 'a'\nzzz = 1", "[[repo]] 1: unknown key 'zzz'", "known: "),
        ("[default]\nto = 'bf16'", "unknown key 'default'", "[defaults] and [[repo]]"),
        ("[defaults]\nworkers = 3", "[defaults]: unknown key 'workers'", ""),
        ("[defaults]\nto = 5", "to = 5 is not text", None),
        ("[defaults]\nnorms = 'fp16'", "norms = 'fp16' is not one of fp32, cast", None),
        ("[defaults]\nkeep = [1]", "keep = [1] is not a list", None),
        ("[defaults]\ncopy_all = 1", "copy_all = 1 is not true or false", None),
        ("[defaults]\nmax_underflow = true", "max_underflow = True is not a number", None),
        ("[defaults]\nshard_size = 1.5", "shard_size = 1.5 is not text or a whole number", None),
        ("[defaults]\ncomponent = { vae = 1 }", "is not a table or a list", None),
        ("[[repo]]\nsource = 1", "source = 1 is not text", None),
        ("[[repo]]\nsource = ''", "source = '' is not text", None),
        ("repo = 1", "is not a list of tables", None),
        ("defaults = 1", "is not a list of tables", None),
    ],
)
def test_toml_that_says_what_it_cannot_is_refused(text: str, sentence: str, hint: str | None) -> None:
    Path("l.toml").write_text(text)
    with pytest.raises(UsageError) as refused:
        read("l.toml")
    assert sentence in str(refused.value)
    assert "l.toml" in str(refused.value)
    assert hint is None or hint in (refused.value.hint or "")


@pytest.mark.parametrize("data", [b"[[repo]", b"\xff", b"a = " + b"[" * 100_000])
def test_a_file_that_is_no_toml_is_refused(data: bytes) -> None:
    Path("l.toml").write_bytes(data)
    with pytest.raises(InputError, match=r"l.toml: (is not valid TOML|nests too deeply)"):
        read("l.toml")


def test_a_batch_knows_the_options_of_convert_but_for_those_that_are_its_own() -> None:
    own = {"source", "output", "workers", "durable", "report", "progress", "engine", "address", "html"}
    parameters = inspect.signature(convert).parameters
    assert set(Options.__annotations__) == set(parameters) - own
    for name, option in parameters.items():
        if name in Options.__annotations__ and option.default is not inspect.Parameter.empty:
            assert check_options({name: option.default}, "") == {name: option.default} or option.default is None


# From Python


def test_sources_from_python_are_paths_patterns_and_tables() -> None:
    make("m/a.safetensors")
    given: list[Any] = [Path("x"), "m/*", {"source": Path("y"), "to": "fp16", "output": "z"}]
    assert entries_of(given) == [
        Entry("x"),
        Entry("m/a.safetensors", globbed=True),
        Entry("y", {"to": "fp16"}, "z"),
    ]
    assert entries_of("alone") == [Entry("alone")]  # not its letters


# Jobs


def test_nothing_to_convert_and_no_target_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="nothing to convert"):
        batch([])
    with pytest.raises(UsageError, match="a: nothing says the target"):
        prepare([Entry("a")], options={}, output=None, output_dir=HERE)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"to": "int8"}, UsageError, "int8"),
        ({"shard_size": "huge"}, UsageError, "shard size 'huge'"),
        ({"rule": ["x"]}, RuleError, "has no '='"),
        ({"rules": "missing.toml"}, RuleError, "cannot be read"),
        ({"nonsense": 1}, UsageError, "unknown key 'nonsense'"),
        ({"max_underflow": 2}, UsageError, "is not a share"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        batch([Entry("a")], **options)
    if "nonsense" not in options:
        with pytest.raises(error, match=f"^a: .*{sentence}"):
            batch([Entry("a", options)])


def test_a_job_is_told_all_that_depends_on_where_it_runs() -> None:
    make("a.safetensors")
    Path("r.toml").write_text("[[rule]]\nmatch = '*.b'\nto = 'fp32'\n")
    (planned,) = batch([Entry("a.safetensors")], rules="r.toml", keep=["c"]).jobs
    source, options, begun = planned.job
    assert source == str(Path.cwd() / "a.safetensors")
    assert options["output"] == str(Path.cwd() / "out" / "a.bf16.safetensors")
    assert options["rule"] == [Rule("c", "keep"), Rule("*.b", "fp32")]  # type: ignore[arg-type]
    assert options["durable"] is True
    assert not begun
    assert not {"rules", "keep"} & set(options)


def test_the_key_changes_with_the_source_the_options_and_the_files_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make("a.safetensors", "dir")

    def keys(**options: Any) -> list[str]:
        return [p.key for p in batch([Entry("a.safetensors"), Entry("dir")], **options).jobs]

    seen = [keys()]
    assert keys() == seen[0]
    seen.append(keys(norms="cast"))
    make("a.safetensors", "dir/more.safetensors")
    seen.append(keys())
    Path("config.json").write_text("{}")
    seen.append(keys())
    monkeypatch.setattr("precconv.batch.prepare.__version__", "9")
    seen.append(keys())
    files, directories = zip(*seen, strict=True)
    assert len(set(files)) == 5
    assert len(set(directories)) == 4, "config.json beside a directory is not read"


def test_the_key_does_not_depend_on_the_way_a_source_is_named() -> None:
    make("m/a.safetensors")
    named = ("m/a.safetensors", "./m/../m/a.safetensors", str(Path.cwd() / "m" / "a.safetensors"))
    assert len({batch([Entry(name)]).jobs[0].key for name in named}) == 1


def test_what_is_listed_twice_is_named_and_converted_once() -> None:
    make("a.safetensors")
    made = batch([Entry("a.safetensors"), Entry("b"), Entry("./a.safetensors"), Entry("a.safetensors")])
    assert [p.source for p in made.jobs] == ["a.safetensors", "b"]
    assert made.notes == ("a.safetensors is listed 3 times, and converted once",)


def test_one_source_may_have_two_targets() -> None:
    make("a.safetensors")
    made = batch([Entry("a.safetensors", {"to": "fp16"}), Entry("a.safetensors")])
    assert outputs(made) == ["out/a.fp16.safetensors", "out/a.bf16.safetensors"]


# Names and places


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("org/name", Names("org", "name", "name", "main")),
        ("org/name-fp32@v1.0", Names("org", "name-fp32", "name", "v1.0")),
        ("hf://org/name@abc/vae/x.fp16.safetensors", Names("org", "x.fp16", "x", "abc")),
        ("m/model.fp32.safetensors", Names("m", "model.fp32", "model", "local")),
        ("m/last.pth.tar", Names("m", "last", "last", "local")),
        ("m/v1.5", Names("m", "v1.5", "v1.5", "local")),
        ("m/Llama-float32", Names("m", "Llama-float32", "Llama", "local")),
        ("bf16", Names("HERE", "bf16", "bf16", "local")),
    ],
)
def test_the_parts_of_a_name(source: str, names: Names, here: Path) -> None:
    make("m/model.fp32.safetensors", "m/last.pth.tar", "m/Llama-float32", "bf16")
    Path("m/v1.5").mkdir()
    found = names_of(source)
    assert found == (names if names.org != "HERE" else Names(here.name, "bf16", "bf16", "local"))


def test_by_default_outputs_are_named_as_convert_names_them() -> None:
    make("m/a.fp32.safetensors", "Llama-fp32")
    made = batch([Entry("m/a.fp32.safetensors"), Entry("Llama-fp32"), Entry("org/name"), Entry("missing.pt")])
    assert outputs(made) == ["out/a.bf16.safetensors", "out/Llama-bf16", "out/name-bf16", "out/missing-bf16"]
    made = batch([Entry("m/a.fp32.safetensors")], format="pt")
    assert outputs(made) == ["out/a.bf16.pt"]


def test_a_template_names_outputs_and_a_files_suffix_follows_when_it_says_none() -> None:
    make("m/a.fp32.safetensors", "dir")
    entries = [Entry("m/a.fp32.safetensors"), Entry("dir"), Entry("org/name@v1")]
    assert outputs(batch(entries, "{org}/{stem}_{to}_{revision}", "o"))[0] == "o/m/a_bf16_local.safetensors"
    assert outputs(batch(entries, "{org}/{stem}_{to}_{revision}", "o"))[2] == "o/org/name_bf16_v1"
    assert outputs(batch(entries[:1], "{name}.pt")) == ["out/a.fp32.pt"]
    assert outputs(batch(entries[:1], "x", format="pt")) == ["out/x.pt"]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [("{nam}", "no field {nam}"), ("{name", "no partner"), ("{}", "no field {}"), ("}", "no p")],
)
def test_a_template_that_cannot_be_is_refused_with_the_fields_there_are(template: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        batch([Entry("a")], template)
    assert sentence in str(refused.value)
    assert "{org}, {name}, {stem}, {to}, {revision}" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("entries", "template", "sentence"),
    [
        ([Entry("a/x"), Entry("b/x")], None, "a/x and b/x have the same output"),
        ([Entry("a/x"), Entry("b/y")], "same", "have the same output"),
        ([Entry("a/x", output="d"), Entry("b/y", output="d/e/f")], None, "lies in that of a/x"),
        ([Entry("dir", output="../dir/sub")], None, "lies in the source"),
        ([Entry("m.safetensors", output="../m.safetensors")], None, "is the source"),
        ([Entry("dir"), Entry("b/y", output="../dir")], None, "is the source"),
    ],
)
def test_outputs_in_each_others_way_are_refused_before_any_work(
    entries: list[Entry], template: str | None, sentence: str
) -> None:
    make("dir", "m.safetensors")
    with pytest.raises(UsageError, match="output") as refused:
        batch(entries, template)
    assert sentence in str(refused.value).replace(str(Path.cwd()) + "/", "")
    assert not Path("out").exists()


@posix
def test_outputs_that_meet_through_a_link_are_one() -> None:
    Path("real").mkdir()
    Path("link").symlink_to("real")
    with pytest.raises(UsageError, match="have the same output"):
        batch([Entry("a/x", output="real/o"), Entry("b/y", output="link/o")], output_dir=".")


def test_a_pattern_that_meets_outputs_of_the_batch_leaves_them_out() -> None:
    make("a.safetensors", "a.bf16.safetensors", "b.bf16.safetensors")
    made = batch(read("*.safetensors"), output_dir=".")
    assert [p.source for p in made.jobs] == ["a.safetensors"]
    assert "a.bf16.safetensors" in made.notes[0]
    assert made.notes[1] == "b.bf16.safetensors is named like an output: left out"
