"""The page of a scan and of a conversion: what is in it, what can't be, and where it may be written."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import precconv
from fixtures import make
from precconv.dtypes import BF16, FP16
from precconv.errors import OutputError
from precconv.exponents import Exponents
from precconv.html import check_page_path, page, write
from precconv.html.columns import columns, packed
from precconv.html.document import MARK
from precconv.html.layers import MOST_ROWS, grouped, heat_map, span

from .command import run
from .pages import HOSTILE, Page, data_of, expert_names, large_page, report_of, scan_of, tensor_rows
from .samples import write_checkpoint
from .test_scan import every_kind

LLAMA = make.ROOT / "good/tiny-llama.safetensors"


def present(row: Any) -> Any:
    """Without what is null: a column cannot tell it from what is not there."""
    if isinstance(row, dict):
        return {k: present(v) for k, v in row.items() if v is not None and present(v) != {}}
    return row


def same(a: Any, b: Any) -> None:
    """Equal, numbers with a fraction to the digits that a page has."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, float) and isinstance(b, float):
        assert a == pytest.approx(b, rel=1e-5, abs=0)
    else:
        assert a == b


# --- the data ---------------------------------------------------------------------------------------------


def test_a_page_has_all_numbers_of_a_scan(tmp_path: Path) -> None:
    found = precconv.scan(write_checkpoint(tmp_path / "x.safetensors", every_kind()))
    shown, expected = data_of(page(found)), found.to_dict()
    tensors = expected.pop("tensors")
    assert shown["result"] == json.loads(json.dumps(expected))
    assert shown["lines"] == [*found.verdict.lines]
    rows = tensor_rows(shown["tensors"])
    assert len(rows) == len(tensors) >= 50
    for row, tensor in zip(rows, tensors, strict=True):
        same(row, present(tensor))


def test_a_page_has_all_numbers_of_a_conversion_those_with_findings_first(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "x.safetensors", every_kind())
    done = precconv.convert(source, to="fp16", on_overflow="keep", report=tmp_path / "r.json", rule=["*.matrix=drop"])
    shown, expected = data_of(page(done)), done.to_dict()
    tensors = expected.pop("tensors")
    assert shown["result"] == json.loads(json.dumps(expected))
    assert sorted(shown["order"]) == [*range(len(tensors))]
    rows = tensor_rows(shown["tensors"])
    for row, place in zip(rows, shown["order"], strict=True):
        row.pop("exponents", None)  # of the page alone
        same(row, present(tensors[place]))
    named = {f.tensor for f in done.findings}
    assert named
    assert {row["name"] for row in rows[: len(named)]} == named
    overflowing = {f.tensor for f in done.findings if f.check == "overflow"}
    assert {row["name"] for row in rows[: len(overflowing)]} == overflowing, "it is why they have another dtype"


def test_a_refused_conversion_says_that_nothing_was_written(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "x.safetensors", every_kind())
    with pytest.raises(precconv.NumericError) as caught:
        precconv.convert(source, to="fp16")
    assert caught.value.report is not None
    lines = data_of(page(caught.value.report))["lines"]
    assert lines[0] == "not written: a check refused it, the output path is as it was"
    assert re.fullmatch(r"would change: \d+ of 50 tensors to another dtype, \d+ kept", lines[1])
    assert re.fullmatch(r"found: [1-9]\d* errors, \d+ warnings", lines[2])


def test_a_page_counts_one_thing_as_one(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "x.safetensors", {"a": torch.tensor([1e6])})
    target = tmp_path / "p.html"
    precconv.convert(source, to="fp16", on_overflow="keep", html=target)
    assert data_of(target.read_text("utf-8"))["lines"][1:] == [
        "changed: 0 of 1 tensor to another dtype, 1 as it was",
        "found: 0 errors, 1 warning; 4 bytes read back and compared",
    ]
    assert run(str(source), "--to", "fp16", "--force", "--html", str(target)).exit_code == 3
    assert data_of(target.read_text("utf-8"))["lines"][1:] == [
        "would change: 1 of 1 tensor to another dtype, 0 kept",
        "found: 1 error, 0 warnings",
    ]
    found = data_of(page(precconv.scan(write_checkpoint(tmp_path / "i.safetensors", {"i": torch.arange(3)}))))
    assert found["heat"]["unread"] == ["1 of 1 tensor holds what no cast changes (int64): not looked at."]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], {}),
        ([{"a": 1}, {"b": 2}], {"a": [1, None], "b": [None, 2]}),
        ([{"a": "x"}] * 4, {"a": {"table": ["x"], "at": [0, 0, 0, 0]}}),
        ([{"a": "x"}, {"a": "y"}], {"a": ["x", "y"]}),
        ([{"a": [1, 2]}, {}, {"a": [1, 2]}], {"a": {"table": [(1, 2)], "at": [0, None, 0]}}),
        ([{"a": {"b": 1.23456789}}, {"a": {}}], {"a": {"b": [1.23457, None]}}),
        ([{"a": True}, {"a": 123456789}], {"a": [True, 123456789]}),
    ],
)
def test_rows_become_columns(rows: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert columns(rows) == expected


def test_packed_data_is_base64_without_a_line_break() -> None:
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", packed({"a": ["</script>", "\u2028", "\ud800"] * 50}))


def test_a_number_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        packed({"a": float("nan")})


# --- the markup -------------------------------------------------------------------------------------------


def pages(tmp_path: Path) -> dict[str, str]:
    done = precconv.convert(LLAMA, to="fp16", output=tmp_path / "o.safetensors", force=True)
    return {"scan": page(precconv.scan(LLAMA)), "conversion": page(done)}


@pytest.mark.parametrize("kind", ["scan", "conversion"])
def test_a_page_names_no_place_outside_itself(kind: str, tmp_path: Path) -> None:
    text = pages(tmp_path)[kind]
    parsed = Page(text)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "video", "audio", "source")
        for key, value in attributes.items():
            assert key not in ("src", "srcset", "style", "action", "ping")
            assert not key.startswith("on")
            assert key != "href" or (value or "").startswith("#")
    (style,) = parsed.inside("style")
    assert not re.search(r"url\(|@import|https?:", style)
    script = next(s for s in parsed.inside("script") if "\n" in s)
    assert set(re.findall(r"https?://[^\"'` ]+", script)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|fetch\(", script)


@pytest.mark.parametrize("kind", ["scan", "conversion"])
def test_only_the_style_and_the_script_of_the_package_may_run(kind: str, tmp_path: Path) -> None:
    parsed = Page(pages(tmp_path)[kind])
    (policy,) = [m["content"] for m in parsed.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    (style,) = parsed.inside("style")
    script = next(s for s in parsed.inside("script") if "\n" in s)
    for directive, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[directive] == f"'sha256-{digest}'"


@pytest.mark.parametrize("kind", ["scan", "conversion"])
def test_no_word_of_a_file_is_in_the_markup(kind: str) -> None:
    source = "</script><script>alert(1)</script>"
    plain = page(scan_of(["a.b", "c.d"]) if kind == "scan" else report_of(["a.b", "c.d"]))
    hostile = page(scan_of(HOSTILE, source=source) if kind == "scan" else replace(report_of(HOSTILE), source=source))
    frame = re.compile(r'(<script type="application/octet-stream" id="data">)[A-Za-z0-9+/=]*(</script>)')
    assert frame.sub(r"\1\2", hostile) == frame.sub(r"\1\2", plain)
    assert data_of(hostile)["result"]["source"] == "</script><script>alert(1)</script>"
    assert {row["name"] for row in tensor_rows(data_of(hostile)["tensors"])} == set(HOSTILE)


def test_a_page_has_landmarks_a_title_and_a_language() -> None:
    parsed = Page(page(scan_of(["a.b"])))
    assert parsed.all("html") == [{"lang": "en"}]
    assert {"header", "main", "footer", "h1", "title", "noscript"} <= {tag for tag, _ in parsed.tags}
    assert [m["content"] for m in parsed.all("meta") if m.get("name") == "viewport"] == [
        "width=device-width, initial-scale=1"
    ]
    assert page(scan_of(["a.b"])).startswith(MARK)


def test_the_same_scan_gives_the_same_page() -> None:
    assert page(scan_of(["a.b", "c"])) == page(scan_of(["a.b", "c"]))


@pytest.mark.parametrize("kind", ["scan", "conversion"])
def test_a_page_of_100_000_tensors_is_smaller_than_15_mb(kind: str) -> None:
    text = large_page(kind)
    assert len(text) < 15_000_000
    heat = data_of(text)["heat"]
    assert len(heat["rows"]) == 61
    assert sum(row["tensors"] for row in heat["rows"]) == 100_000


# --- the map ----------------------------------------------------------------------------------------------


def test_rows_are_layers_in_the_order_of_their_numbers() -> None:
    names = [f"model.layers.{i}.{p}.weight" for i in (0, 1, 10, 11, 2) for p in range(40)] + ["lm_head.weight"]
    labels, of = grouped(names)
    assert labels == ["lm_head.weight", *(f"model.layers.{i}" for i in (0, 1, 2, 10, 11))]
    assert [labels[i] for i in of] == [".".join(n.split(".")[:3]) for n in names[:-1]] + ["lm_head.weight"]


@pytest.mark.parametrize("count", [0, 1, MOST_ROWS, MOST_ROWS + 1, 5000])
def test_names_without_structure_are_rows_of_their_own_or_runs(count: int) -> None:
    labels, of = grouped([f"t{i}" for i in range(count)])
    assert len(labels) <= MOST_ROWS
    assert len(of) == count
    assert set(of) == {*range(len(labels))}
    if count > MOST_ROWS:
        assert of == sorted(of)
        assert labels[0] == f"t0 … t{of.count(0) - 1}"


def test_names_that_are_hostile_are_grouped_too() -> None:
    labels, of = grouped([*HOSTILE, "1" * 1_000_000, "²", "", "...", "٣.٣"])
    assert len(of) == len(HOSTILE) + 5
    assert len(labels) == len(set(labels))


def test_the_ranges_are_those_of_the_types() -> None:
    assert span(FP16) == {"subnormal": -24, "normal": -14, "largest": 15}
    assert span(BF16) == {"subnormal": -133, "normal": -126, "largest": 127}


def test_the_map_has_every_value_once_and_reaches_over_fp16() -> None:
    found = scan_of([f"a.{i}.b" for i in range(7)] + ["c.d"])
    seen = [None if t.measure is None else t.measure.exponents for t in found.tensors]
    heat = heat_map([t.name for t in found.tensors], seen)
    for n, row in enumerate(heat["rows"]):
        parts = [t.measure for t, of in zip(found.tensors, heat["of"], strict=True) if of == n]
        total = sum((m.exponents for m in parts if m is not None), Exponents())
        assert (row["first"], tuple(row["counts"])) == (total.first, total.counts)
    axis = heat["axis"]
    assert axis["first"] < -24
    assert axis["first"] + axis["columns"] * axis["step"] > 16


EDGES = {
    "inside.a": torch.tensor([1.0, 65520.0]),  # rounds to Inf
    "inside.b": torch.tensor([-65535.0]),
    "fits": torch.tensor([65519.0]),  # rounds to 65504
    "beyond": torch.tensor([65535.0, 65536.0]),  # the map shows that one
}
FP16_EDGE = "overflow fp16 inside its range as drawn: fp16 ends at 65,504, its last power of two at 65,536."
BF16_EDGE = "overflow bf16 inside its range as drawn: bf16 ends at 3.38953e+38, its last power of two at 3.40282e+38."


def test_an_overflow_that_powers_of_two_hide_is_said_of_a_scan(tmp_path: Path) -> None:
    mask = {"mask": torch.tensor([torch.finfo(torch.float32).min])}
    found = data_of(page(precconv.scan(write_checkpoint(tmp_path / "x.safetensors", EDGES | mask))))
    assert found["heat"]["edges"] == [f"Values of 2 tensors {FP16_EDGE}", f"Values of 1 tensor {BF16_EDGE}"]
    found = data_of(page(precconv.scan(LLAMA)))
    assert found["heat"]["edges"] == []


@pytest.mark.parametrize("on_overflow", ["error", "keep", "bf16", "clamp", "ieee"])
def test_an_overflow_that_powers_of_two_hide_is_said_of_a_conversion(on_overflow: str, tmp_path: Path) -> None:
    source, target = write_checkpoint(tmp_path / "x.safetensors", EDGES), tmp_path / "p.html"
    run(str(source), "--to", "fp16", "--on-overflow", on_overflow, "--html", str(target))
    assert data_of(target.read_text("utf-8"))["heat"]["edges"] == [f"Values of 2 tensors {FP16_EDGE}"]
    run(str(source), "--to", "bf16", "--html", str(target))
    assert data_of(target.read_text("utf-8"))["heat"]["edges"] == []


def test_tensors_at_risk_keep_their_row_of_the_map() -> None:
    found = scan_of(expert_names(400))
    shown = data_of(page(found))
    labels = [shown["heat"]["rows"][i]["label"] for i in shown["heat"]["of"]]
    for row, label in zip(tensor_rows(shown["tensors"]), labels, strict=True):
        assert row["name"] == label or row["name"].startswith(f"{label}.")


def test_a_scan_without_values_has_an_empty_map(tmp_path: Path) -> None:
    tensors = {k: v for k, v in every_kind().items() if k.startswith("other.")}
    heat = data_of(page(precconv.scan(write_checkpoint(tmp_path / "x.safetensors", tensors))))["heat"]
    assert all(row["counts"] == [] for row in heat["rows"])


# --- where it is written ----------------------------------------------------------------------------------


def test_scan_writes_a_page_and_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    for _ in range(2):
        done = run("scan", str(LLAMA), "--html", str(target))
        assert done.exit_code == 0
        assert "safe: " in done.stdout
    assert data_of(target.read_text("utf-8"))["kind"] == "scan"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_convert_writes_a_page_with_every_error_measured(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    done = run(str(LLAMA), "--to", "bf16", "-o", str(tmp_path / "o.safetensors"), "--html", str(target))
    assert done.exit_code == 0
    shown = data_of(target.read_text("utf-8"))
    assert shown["kind"] == "conversion"
    assert shown["lines"][0] == f"written: {tmp_path / 'o.safetensors'}"
    assert all("relative_rms_error" in row for row in tensor_rows(shown["tensors"]))


def test_a_refused_conversion_leaves_its_page_and_no_output(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "x.safetensors", every_kind())
    done = run(str(source), "--to", "fp16", "--html", str(tmp_path / "p.html"))
    assert done.exit_code == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.html", "x.safetensors"]
    assert data_of((tmp_path / "p.html").read_text("utf-8"))["result"]["ok"] is False


def test_a_directory_has_one_page_beside_it_and_none_in_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(LLAMA.read_bytes())
    (model / "config.json").write_text('{"model_type": "llama"}')
    done = precconv.convert(model, to="bf16", html=tmp_path / "p.html", report=tmp_path / "r.json")
    files = {f["path"] for f in data_of((tmp_path / "p.html").read_text("utf-8"))["result"]["files"]}
    assert files == {f.path for f in done.files} == {"model.safetensors", "config.json"}
    with pytest.raises(OutputError, match="cannot go into the output"):
        precconv.convert(model, to="bf16", html=tmp_path / "model-bf16/p.html", force=True)


@pytest.mark.parametrize("content", [b"<!doctype html>\n<p>mine", b"{}", b"\x00" * 64, MARK.encode()[:-1]])
@pytest.mark.parametrize("command", [["scan"], ["convert", "--to", "bf16", "-o"]], ids=["scan", "convert"])
def test_a_page_replaces_nothing_but_a_page(command: list[str], content: bytes, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_bytes(content)
    name, *options = command
    output = [str(tmp_path / "o.safetensors")] if options else []
    done = run(name, str(LLAMA), *options, *output, "--html", str(target))
    assert done.exit_code == 1
    assert "the page cannot go there" in done.stderr
    assert "--html another name" in done.stderr
    assert target.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_page_goes_neither_to_its_source_nor_to_the_report_nor_where_there_is_no_directory(tmp_path: Path) -> None:
    source = tmp_path / "x.safetensors"
    source.write_bytes(LLAMA.read_bytes())
    with pytest.raises(OutputError, match="the page cannot go there"):
        check_page_path(source, [source])
    with pytest.raises(OutputError, match="the page cannot go there"):
        precconv.convert(source, to="bf16", html=tmp_path / "r", report=tmp_path / "r")
    with pytest.raises(OutputError, match="no such directory"):
        check_page_path(tmp_path / "none/p.html", [source])
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_page_that_cannot_be_written_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "p.html"
    write(scan_of(["a"]), target)
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("precconv.fileio._Positional.write_full", full)
    with pytest.raises(OutputError, match="cannot be written"):
        write(scan_of(["b"]), target)
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]


@pytest.mark.parametrize(
    ("command", "what", "hint"),
    [
        ("scan SRC --html -", "page", "give --html a name"),
        ("SRC --to bf16 --html -", "page", "give --html a name"),
        ("SRC --to bf16 --report -", "report", "give --report a name; --json prints it"),
    ],
)
@pytest.mark.parametrize("source", ["model", "model/model.safetensors"])
def test_a_dash_is_no_name_for_a_page_or_a_report(
    source: str, command: str, what: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    write_checkpoint(Path("model/model.safetensors"), {"a": torch.ones(3)})
    done = run(*command.replace("SRC", source).split())
    assert done.exit_code == 2
    assert f"the {what} is written to a file, not to stdout\n" in done.stderr
    assert f"hint: {hint}\n" in done.stderr
    assert [str(p) for p in sorted(Path().rglob("*"))] == ["model", "model/model.safetensors"]


def test_a_dry_run_writes_no_page(tmp_path: Path) -> None:
    done = run(str(LLAMA), "--to", "bf16", "--dry-run", "--html", str(tmp_path / "p.html"))
    assert done.exit_code == 2
    assert [*tmp_path.iterdir()] == []
