"""README says what is: its commands are run, and what they print is compared."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import precconv
from precconv.cli import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks() -> Iterator[list[str]]:
    """Indented blocks, without the indentation."""
    for block in re.findall(r"(?:^    .*\n(?:^\n(?=    ))?)+", README, re.MULTILINE):
        yield [line.removeprefix("    ") for line in block.splitlines()]


SHOWN = [b for b in blocks() if b[0].startswith("$ ")]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")
    return tmp_path


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program, *args = shlex.split(command)
    assert program == "precconv"
    return subprocess.run(
        [sys.executable, "-m", "precconv", *args], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("block", SHOWN, ids=[b[0][2:50] for b in SHOWN])
def test_a_command_shown_with_its_output_prints_that(block: list[str], clone: Path) -> None:
    done = run(block[0].removeprefix("$ "), clone)
    assert (done.stdout + done.stderr).splitlines() == block[1:]


def test_the_first_command_installs_and_converts_a_fixture(clone: Path) -> None:
    first = next(b for b in blocks())[0]
    install, convert = first.split(" && ")
    assert install == "python -m pip install ."
    done = run(convert, clone)
    assert done.returncode == 0, done.stderr
    plan = precconv.plan(clone / "tiny-llama.bf16.safetensors", to="bf16")
    assert {i.why for i in plan.items} == {"already bf16", "norm"}


def test_ci_runs_the_test_command_of_the_first_screen() -> None:
    command = "python -m pip install -e '.[test]' && python scripts/check"
    assert [command] in list(blocks())[:2]
    assert README[: README.index("## Use")].count(command) == 1
    assert "grep -m1 'scripts/check' README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_rules_file_shown_is_one(tmp_path: Path) -> None:
    [toml] = [b for b in blocks() if "[[rule]]" in b]  # the other is a batch's
    path = tmp_path / "rules.toml"
    path.write_text("\n".join(toml))
    from precconv.rules import read_rules

    assert [(r.match, str(r.to)) for r in read_rules(path)] == [
        ("*.mlp.gate.weight", "fp32"),
        (r"re:^vision_tower\.", "keep"),
    ]


def test_the_python_shown_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "fixtures/good/tiny-llama.safetensors", tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    [code] = [b for b in blocks() if b[0] == "import precconv"]
    exec("\n".join(code), {})
    assert "model.norm.weight fp32 fp32 norm" in capsys.readouterr().out


PAGES = ("README.md", "docs/models.md", "docs/tensors.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_options_that_the_pages_name_exist(page: str) -> None:
    known = {option for command in cli.commands.values() for p in command.params for option in p.opts}
    text = (ROOT / page).read_text("utf-8")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known <= {"--no-deps", "--version", "--help"}


def test_files_that_readme_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
