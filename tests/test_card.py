"""The model card of a result: the source's text stays, what is generated is said once and cannot be misread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from precconv.dtypes import BF16, FP16, FP32
from precconv.repo import front_matter
from precconv.repo.card import CardFacts, Kept, card
from precconv.text import printable

from .test_layers import loaded

FACTS = CardFacts(
    source="org/name",
    target=BF16,
    version="1.2.3",
    tensors=201,
    bytes_before=12_400_000_000,
    bytes_after=6_200_000_000,
    base_model="org/name",
    commit="0123abc",
    options="--norms fp32",
    kept=(Kept("norm", FP32, 65, 1_230_000), Kept("rule x", FP16, 1, 2)),
    notes=("one thing",),
)
UNKNOWN = replace(FACTS, source="a-directory", base_model=None, commit=None)
BEGIN, END = "<!-- precconv:begin -->", "<!-- precconv:end -->"
KEYS = "base_model: org/name\nbase_model_relation: quantized\n"

SECTION = f"""{BEGIN}
## Converted to bf16

The weights of [org/name](https://huggingface.co/org/name) at commit `0123abc`, converted to bfloat16 \
by precconv 1.2.3 \
(`--norms fp32`): 201 tensors, 12.4 GB before and 6.2 GB after. Not bfloat16: 66 other tensors, 1.23 MB.

| reason | dtype | tensors | size |
| --- | --- | ---: | ---: |
| norm | fp32 | 65 | 1.23 MB |
| rule x | fp16 | 1 | 2 B |

- one thing

{END}
"""


def without_section(text: str) -> str:
    return re.sub(f"{BEGIN}.*?{END}", "…", text, flags=re.DOTALL)


def loads(text: str, folder: Path) -> Any:
    """The card's metadata as the Hub's own library reads it."""
    from huggingface_hub.repocard import metadata_load

    path = folder / "README.md"
    path.write_bytes(text.encode())
    return metadata_load(path)


# The section


def test_a_card_from_scratch_has_front_matter_and_the_section() -> None:
    assert card(None, FACTS).text == f"---\n{KEYS}---\n{SECTION}"
    assert card(None, FACTS) == card("", FACTS)


def test_a_card_from_scratch_of_an_unknown_base_is_the_section_alone() -> None:
    made = card(None, replace(UNKNOWN, kept=(), notes=(), options="", tensors=1))
    assert made.warnings == ()
    assert made.text == (
        f"{BEGIN}\n## Converted to bf16\n\nThe weights of a-directory, converted to bfloat16 by precconv 1.2.3: "
        f"1 tensor, 12.4 GB before and 6.2 GB after.\n\n{END}\n"
    )


@pytest.mark.parametrize(("ending", "gap"), [("", "\n\n"), ("\n", "\n"), ("\n\n", ""), ("\n\n\n", "")])
def test_the_section_comes_last_after_a_blank_line_and_the_text_stays(ending: str, gap: str) -> None:
    readme = "# Title\n\ttext  \n\n\n* ünïcode" + ending
    assert card(readme, UNKNOWN).text == readme + gap + card(None, UNKNOWN).text


def test_a_second_run_changes_nothing_and_another_target_only_the_section() -> None:
    once = card("---\nlicense: mit\n---\n# Title\n", FACTS).text
    assert card(once, FACTS).text == once
    other = card(once, replace(FACTS, target=FP16)).text
    assert other.count(BEGIN) == other.count(END) == 1
    assert "Converted to fp16" in other
    assert without_section(other) == without_section(once)


def test_a_moved_section_is_replaced_where_it_is() -> None:
    moved = f"# Title\n\n  {BEGIN}\t\nold\n <!--precconv:end--> \n\ntext after\n"
    assert card(moved, UNKNOWN).text == f"# Title\n\n{card(None, UNKNOWN).text}\ntext after\n"


def test_copies_of_the_section_are_replaced_and_none_is_added() -> None:
    made = card(f"a\n{BEGIN}\nold\n{END}\nb\n{BEGIN}\nolder\n{END}\nc\n", UNKNOWN).text
    assert made == "a\n{0}b\n{0}c\n".format(card(None, UNKNOWN).text)


STRAY = {
    "begin": f"text\n{BEGIN}\nmore\n",
    "end": f"text\n{END}\nmore\n",
    "end before begin": f"text\n{END}\nmore\n{BEGIN}\nlast\n",
    "in a sentence": f"between {BEGIN}\nand {END}\n",
    "before words": f"{BEGIN} starts it\n{END} ends it\n",
    "in one line": f"{BEGIN} and {END}\n",
    "quoted": f"> {BEGIN}\n> old\n> {END}\n",
}


@pytest.mark.parametrize("readme", [*STRAY.values()], ids=[*STRAY])
def test_stray_markers_stay_with_all_text_and_the_section_is_said_once(readme: str) -> None:
    once = card(readme, UNKNOWN).text
    assert once == f"{readme}\n{card(None, UNKNOWN).text}"
    assert card(once, UNKNOWN).text == once


LINES = st.sampled_from(["text", "", BEGIN, END, f"  {BEGIN}", f"{END}\t", f"> {BEGIN}", f"{END} text", "```", "---"])


@given(st.lists(LINES, min_size=2, max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_any_lines_get_the_section_among_lines_that_stay_as_they_were(lines: list[str], eol: str) -> None:
    readme = eol.join(lines)
    once = card(readme, UNKNOWN).text
    assert card(once, UNKNOWN).text == once
    around = once.split(card(None, UNKNOWN).text.strip().replace("\n", eol))
    assert len(around) >= 2
    place = 0
    for part in around:
        place = readme.index(part.strip(), place) + len(part.strip())
    if len(around) == 2 and not around[1].strip() and END not in map(str.strip, lines):
        assert once.startswith(readme)


@pytest.mark.parametrize("eol", ["\n", "\r\n"])
def test_the_line_ends_are_those_of_the_card(eol: str) -> None:
    readme = f"---\nlicense: mit\n---\n# Title\n\ntext\n\n{BEGIN}\nold\n{END}\n".replace("\n", eol)
    for source in (readme, readme[: readme.index(BEGIN)]):
        made = card(source, FACTS).text
        assert made == f"---\nlicense: mit\n{KEYS}---\n# Title\n\ntext\n\n{SECTION}".replace("\n", eol)
        assert card(made, FACTS).text == made


def test_many_reasons_are_summed_up() -> None:
    kept = [Kept(f"reason {n}", FP32, 2, 10) for n in range(100)]
    rows = [line for line in card(None, replace(UNKNOWN, kept=kept)).text.split("\n") if line.startswith("| ")][2:]
    assert len(rows) == 30
    assert rows[28:] == ["| reason 28 | fp32 | 2 | 20 B |".replace("20", "10"), "| 71 more reasons |  | 142 | 710 B |"]
    assert "200 other tensors, 1 kB." in card(None, replace(UNKNOWN, kept=kept)).text


# Hostile words


class Rendered(HTMLParser):
    """What a reader sees: tags, comments, links and the text of each cell and item."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.comments: list[str] = []
        self.links: list[str | None] = []
        self.words: list[str] = []
        self.feed(MarkdownIt("commonmark").enable("table").enable("strikethrough").render(text))

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name == "href"]
        if tag in ("td", "li", "p", "code"):
            self.words.append("")

    def handle_data(self, data: str) -> None:
        if self.words:
            self.words[-1] += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data.strip())


HOSTILE = [
    "a | b", "a \\| b", "x\\", "`code`", "``", "a\nb\r\n# c", "-->", "<!-- -->", END, f"\n{END}\n", BEGIN, "<b>",
    "</code>", "&lt;", "[x](http://y)", "![x](y)", "<http://x>", "**b** _i_ ~~s~~ $$m$$", "- item", "# title", "+ x",
    "===", "---", "\x1b[31m", "\u202e", "  two  spaces  ", "", "@user", "https://x.y",
]  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=8), st.lists(st.sampled_from("|`<>!-\\&*_[]()# \n1.x~"), max_size=8)
).map("".join)


@given(WORDS)
def test_any_words_are_read_as_they_are_and_nothing_else(words: str) -> None:
    facts = replace(FACTS, kept=[Kept(words, FP32, 1, 1)], notes=[f"x{words}x"], options=words, commit=words)
    text = card(None, replace(facts, source=words, base_model=None)).text
    seen = Rendered(text)
    codes = 2 if words else 0
    assert seen.comments == ["precconv:begin", "precconv:end"]
    assert seen.links == []
    table = ["table", "thead", "tr", *["th"] * 4, "tbody", "tr", *["td"] * 4]
    assert seen.tags == ["h2", "p", *["code"] * codes, *table, "ul", "li"]
    shown = printable(words)
    cell, *_, item = seen.words[1 + codes :]
    assert cell.strip() == shown.strip()
    assert item.strip() == f"x{shown}x"
    assert card(text, replace(facts, source=words, base_model=None)).text == text


@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_words_start_no_block_in_a_note_and_end_no_code(words: str) -> None:
    text = card(None, replace(UNKNOWN, notes=[words], options=words)).text
    seen = Rendered(text)
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert seen.comments == ["precconv:begin", "precconv:end"]
    assert set(seen.tags) <= {"h2", "p", "code", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
    assert seen.tags.count("h2") == seen.tags.count("ul") == seen.tags.count("li") == 1
    assert seen.tags.count("code") == (1 if words else 0)
    assert seen.words[-1].strip() == printable(words).strip()


def test_what_only_the_hub_reads_in_a_line_is_quoted_too() -> None:
    text = card(None, replace(UNKNOWN, notes=["at https://x.y is $$m$$, 1:2"])).text
    assert "\n- at https\\://x.y is \\$\\$m\\$\\$, 1:2\n" in text


def test_a_base_that_is_no_repo_id_is_not_linked() -> None:
    assert Rendered(card(None, FACTS).text).links == ["https://huggingface.co/org/name"]
    assert Rendered(card(None, replace(FACTS, base_model="x) [y](z")).text).links == []


def test_a_very_long_name_is_cut() -> None:
    assert len(card(None, replace(UNKNOWN, notes=["x" * 100_000])).text) < 2_000


# Front matter


def test_an_unknown_base_leaves_front_matter_as_it_is_even_when_broken() -> None:
    for block in ("license:   mit # c\nbase_model: x/y", "a: [", "a: b: c"):
        readme = f"---\n{block}\n---\n# T\n\n"
        made = card(readme, UNKNOWN)
        assert made.text == readme + card(None, UNKNOWN).text
        assert made.warnings == ()


#: Before and after; everything else of each line, order and comment stays.
EDITS = {
    "nothing there": ("license:   mit  # free\ntags: [a,  'b']", "license:   mit  # free\ntags: [a,  'b']\n" + KEYS),
    "a name": (
        "base_model: x/y  # note\nlicense: mit",
        "base_model: org/name  # note\nlicense: mit\nbase_model_relation: quantized\n",
    ),
    "both": (
        "base_model_relation: finetune\na: 1\nbase_model: 'x/y'",
        "base_model_relation: quantized\na: 1\nbase_model: org/name\n",
    ),
    "already said": ('base_model: "org/name"\nbase_model_relation: quantized', None),
    "a list in lines": (
        "base_model:\n- x/y\n- z\n\n# about tags\ntags:\n- a",
        "base_model: org/name\n\n# about tags\ntags:\n- a\nbase_model_relation: quantized\n",
    ),
    "a list in one": (
        "base_model: [x/y,\n  z]  # two\ntags:   a",
        "base_model: org/name  # two\ntags:   a\nbase_model_relation: quantized\n",
    ),
    "nothing said": ("base_model:\nx: 1", "base_model: org/name\nx: 1\nbase_model_relation: quantized\n"),
    "a folded text": (
        "base_model: >\n  x\n  y\n\nx: 1",
        "base_model: org/name\n\nx: 1\nbase_model_relation: quantized\n",
    ),
    "an empty line": ("", KEYS),
    "a comment alone": ("# comment", "# comment\n" + KEYS),
    "a literal text last": ("text: |\n  a\n  b", "text: |\n  a\n  b\n" + KEYS),
    "a key below another": (
        "x:\n  base_model: stays\ny: 1",
        "x:\n  base_model: stays\ny: 1\n" + KEYS,
    ),
    "unicode": ('title: "é 日本 👀"\nb: é', 'title: "é 日本 👀"\nb: é\n' + KEYS),
    "not a number": ("value: .nan", "value: .nan\n" + KEYS),
    "shared parts": ("a: &id001\n- x\nb: *id001", "a: &id001\n- x\nb: *id001\n" + KEYS),
    "an odd value beside": ("a: 2024-01-01\nb: !!binary aGk=", "a: 2024-01-01\nb: !!binary aGk=\n" + KEYS),
}


@pytest.mark.parametrize(("before", "after"), [*EDITS.values()], ids=[*EDITS])
@pytest.mark.parametrize("eol", ["\n", "\r\n"])
def test_front_matter_is_edited_line_by_line(before: str, after: str | None, eol: str, tmp_path: Path) -> None:
    after = after or before + "\n"
    made = card(f"---\n{before}\n---\n# T\n\n".replace("\n", eol), FACTS)
    assert made.text == f"---\n{after}---\n# T\n\n{SECTION}".replace("\n", eol)
    assert made.warnings == ()
    assert card(made.text, FACTS).text == made.text
    data = loads(made.text, tmp_path)
    assert (data["base_model"], data["base_model_relation"]) == ("org/name", "quantized")


#: What cannot be edited as text: the library writes it anew.
REWRITTEN = {
    "in braces": ("{license: mit, title: é}", "license: mit\ntitle: é\n" + KEYS),
    "indented": ("  license: mit\n  b: 1", "license: mit\nb: 1\n" + KEYS),
    "said twice with the last in the way": (
        "base_model: a\n? base_model\n: b",
        "base_model: org/name\nbase_model_relation: quantized\n",
    ),
    "shared with another key": ("base_model: &b x/y\nother: *b", "base_model: org/name\nother: x/y\nbase_model_rel"),
    "an alias": ("other: &b x/y\nbase_model: *b", "other: x/y\nbase_model: org/name\nbase_model_relation: quantized\n"),
    "the document ended": ("license: mit\n...", "license: mit\n" + KEYS),
}


@pytest.mark.parametrize(("before", "after"), [*REWRITTEN.values()], ids=[*REWRITTEN])
def test_front_matter_that_cannot_be_edited_is_written_anew(before: str, after: str, tmp_path: Path) -> None:
    made = card(f"---\n{before}\n---\n# T\n\n", FACTS)
    assert made.text.startswith(f"---\n{after}")
    assert made.text.endswith(f"---\n# T\n\n{SECTION}")
    data = loads(made.text, tmp_path)
    expected = {**yaml.safe_load(before), "base_model": "org/name", "base_model_relation": "quantized"}
    assert list(data.items()) == list(expected.items())
    assert card(made.text, FACTS).text == made.text


def test_an_edit_that_does_not_give_what_was_meant_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("license: mit", f"license: gpl\n{KEYS}", f"{KEYS}license: mit", "a: ["):
        monkeypatch.setattr(front_matter, "_edited", lambda *_, wrong=wrong: wrong)
        assert card("---\nlicense:   mit\n---\n\n", FACTS).text == f"---\nlicense: mit\n{KEYS}---\n\n{SECTION}"


def sharing(depth: int, shape: str, start: str) -> str:
    """Lines of which each names the one before nine times."""
    return "\n".join(
        [f"a0: &a0 {start}"]
        + [f"a{n}: &a{n} {shape.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, depth + 1)]
    )


BROKEN = {
    "syntax": "license: [mit",
    "two colons": "a: b: c",
    "a tab": "a:\n\t- b",
    "a list": "- a\n- b",
    "a sentence": "just words",
    "two documents": "a: 1\n--- # two\nb: 2",
    "an object": "a: !!python/object:os.system {}",
    "month 13": "a: 2024-13-01",
    "a date that is none": "a: !!timestamp x",
    "a time beyond all numbers": "a: 1" + ":59" * 200 + ".5",
    "a set": "!!set\n? a",
    "an integer without digits": 'a: !!int ""',
    "a word for yes": "a: !!bool x",
    "a control character": "a: \x07",
    "a list as a key": "? [a]\n: b",
    "deep": "a: " + "[" * 5_000,
    "deep and closed": "a: " + "[" * 5_000 + "]" * 5_000,
    "other mappings taken in": "a: &a {b: 1}\nc:\n  <<: *a",
    "other mappings taken in, nine to the eleventh times": sharing(11, "{{<<: [{}]}}", "{x: 1}"),
    "an integer of 18000 digits": "a: 0x1" + "f" * 15_000,
    "large": "a: " + "x" * (1 << 20),
}


@pytest.mark.parametrize("block", [*BROKEN.values()], ids=[*BROKEN])
def test_broken_front_matter_stays_with_a_warning(block: str) -> None:
    readme = f"---\n{block}\n---\n# T\n\n"
    made = card(readme, FACTS)
    assert made.text == readme + SECTION
    assert made.warnings == ("README.md: its front matter cannot be read as YAML, so it does not name the base model",)


def test_lists_that_share_lists_cost_no_more_than_their_text() -> None:
    block = sharing(40, "[{}]", "[x]")
    assert card(f"---\n{block}\n---\n", FACTS).text == f"---\n{block}\n{KEYS}---\n\n{SECTION}"


def test_a_card_without_front_matter_gets_it_before_its_first_line() -> None:
    assert card("# T\r\n\r\n", FACTS).text == f"---\n{KEYS}---\n# T\n\n{SECTION}".replace("\n", "\r\n")


def test_a_byte_order_mark_stays_first() -> None:
    assert card("\ufeff# T\n\n", FACTS).text == f"\ufeff---\n{KEYS}---\n# T\n\n{SECTION}"
    assert card("\ufeff---\na: 1\n---\n\n", FACTS).text == f"\ufeff---\na: 1\n{KEYS}---\n\n{SECTION}"


@pytest.mark.parametrize(
    "base", ["123", "null", "yes", "1e5", "a: b", "# x", "é", "x\ny", "- a", "'", '"', "&a", "x" * 200]
)
def test_any_base_is_read_back_as_it_is(base: str, tmp_path: Path) -> None:
    for readme in (None, "---\na: 1\n---\n", "---\nbase_model: x\n---\n", "---\n{a: 1}\n---\n"):
        assert loads(card(readme, replace(FACTS, base_model=base)).text, tmp_path)["base_model"] == base


LEAVES = st.one_of(st.text(max_size=6), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.dates())
DATA = st.dictionaries(
    st.one_of(st.sampled_from(["base_model", "base_model_relation", "license"]), st.text(max_size=4), st.integers()),
    st.recursive(
        LEAVES, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=3), v, max_size=3))
    ),
    max_size=5,
)


@given(DATA, st.sampled_from([None, True, False]), st.sampled_from(["\n", "\r\n"]))
def test_any_front_matter_gets_the_two_keys_and_keeps_the_others_in_order(
    data: dict[Any, Any], flow: bool | None, eol: str
) -> None:
    block = yaml.dump(data, sort_keys=False, default_flow_style=flow, allow_unicode=True, line_break=eol)
    made = front_matter.with_keys(f"---{eol}{block}---{eol}text", {"base_model": "o/n", "base_model_relation": "q"})
    assert made is not None
    start, end = made.index(eol) + len(eol), made.rindex(f"---{eol}text")
    assert list(yaml.safe_load(made[start:end]).items()) == list(
        {**yaml.safe_load(block), "base_model": "o/n", "base_model_relation": "q"}.items()
    )


def test_the_hubs_library_is_loaded_only_when_there_is_a_base_to_state() -> None:
    code = (
        "from precconv.repo.card import CardFacts, card\nfrom precconv.dtypes import BF16\n"
        "card('---\\na: 1\\n---\\n', CardFacts(source='x', target=BF16, version='1', tensors=1, bytes_before=1, "
        "bytes_after=1{}))\n"
    )
    assert not loaded(code.format("")) & {"huggingface_hub", "yaml", "torch"}
    assert {"huggingface_hub", "yaml"} <= loaded(code.format(", base_model='a/b'"))
