"""The package's shape: who may import whom, what is loaded when, and which names are public."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import precconv
from fixtures import make

from .processes import HANG, ROOT, environment

PACKAGE = ROOT / "precconv"
#: Lowest first.  A module imports from layers below its own, and never from a sibling.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "_version", "bulk", "draws", "exponents", "names", "norm_tables", "components", "provenance"),
    ("dtypes", "stats", "paths", "sizes"),
    ("tensors", "fileio", "configs", "deviation", "measures", "stochastic"),
    ("formats", "cast", "compare", "norms", "rules", "presets", "quantized"),
    ("advice", "tree", "twins", "spectrum", "recast"),
    ("outline", "plan", "outputs", "crowd"),
    ("checks", "runs", "weights", "ties", "lossless", "proof"),
    ("checkpoint", "passes", "report", "sweep", "verdict", "readback", "differences"),
    ("inspection", "request", "html"),
    ("filing", "values"),
    ("convert", "scan"),
    ("text", "proving"),
    ("repo", "scan_text", "engines"),
    ("hub",),
    ("sources",),
    ("api", "diff", "live", "scanning"),
    ("batch",),
    ("verification",),
    ("cli", "__init__"),
    ("__main__",),
)
#: A package whose modules may import each other; it stands in one layer as a whole.
PACKAGES = ("batch", "cli", "engines", "formats", "html", "hub", "presets", "repo")

#: What computes with torch.
KERNELS = ("cast", "compare", "crowd", "live", "recast", "spectrum", "stochastic")

MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted, below the package: ``formats.safetensors``; ``__init__`` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def unit(name: str) -> str:
    """What stands in a layer: a module, or a package as a whole."""
    return name.split(".")[0]


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    """Everything under ``if TYPE_CHECKING``, which is never run."""
    guards = (n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {node for guard in guards for statement in guard.body for node in ast.walk(statement)}


def imports(text: str, package: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a module in ``package`` imports, inside functions too."""
    tree = ast.parse(text)
    skipped = only_for_types(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if is_module(inner) else source


def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(path.read_text("utf-8"), ("precconv", *path.relative_to(PACKAGE).parent.parts)))


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return name.startswith("precconv") and (path.with_suffix(".py").exists() or path.is_dir())


def test_every_module_stands_in_exactly_one_layer_and_every_layer_exists() -> None:
    placed = [name for layer in LAYERS for name in layer]
    assert sorted(placed) == sorted({unit(module_name(p)) for p in MODULES})
    assert len(placed) == len(set(placed))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_imports_only_from_layers_below_it(path: Path) -> None:
    level = {name: n for n, layer in enumerate(LAYERS) for name in layer}
    own = unit(module_name(path))
    for line, name in imports_of(path):
        if name.split(".")[0] != "precconv":
            continue
        used = unit(name.removeprefix("precconv").lstrip(".") or "__init__")
        if used == own and own in PACKAGES:
            continue
        assert level[used] < level[own], f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_the_check_of_layers_sees_relative_imports_and_those_in_functions_but_not_those_for_types() -> None:
    text = """
import torch
from . import safetensors
if TYPE_CHECKING:
    from ..report import Report
def f():
    from ..cli import main
    from .. import plan, Plan
    from precconv.fileio import InputFile
"""
    assert sorted(name for _, name in imports(text, ("precconv", "formats"))) == [
        "precconv", "precconv.cli", "precconv.fileio", "precconv.formats.safetensors", "precconv.plan", "torch",
    ]  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_the_kernels_and_the_check_of_a_written_torch_file_import_torch(path: Path) -> None:
    used = [f"{path.name}:{line}" for line, name in imports_of(path) if name.split(".")[0] in ("torch", "numpy")]
    assert module_name(path) in (*KERNELS, "formats.torch") or used == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").strip() or path.name == "_version.py"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_the_command_line_prints_or_exits(path: Path) -> None:
    names = {n.id for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Name)}
    taboo = {"print", "input", "exit", "quit", "breakpoint"}
    attributes = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Attribute)}
    if unit(module_name(path)) != "cli":
        assert names & taboo == set()
        assert attributes & {"sys.exit", "os._exit", "sys.stdout", "sys.stderr", "os.environ", "os.getenv"} == set()
        assert {a for a in attributes if a.startswith("logging.")} == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_nothing_is_left_to_do_in_a_comment(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    comments = [t.string for t in tokens if t.type in (tokenize.COMMENT, tokenize.STRING)]
    assert [c for c in comments for word in ("TODO", "FIXME", "XXX", "HACK") if word in c] == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_file_stays_under_400_lines_and_a_function_under_60(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            assert lines <= 60, f"{node.name} has {lines} lines"


# Public names


def test_the_packages_public_names_are_the_visible_ones() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    stated = [a for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert all(a.asname == a.name for a in stated), "a name is public when it is imported as itself"
    submodules = {unit(module_name(p)) for p in MODULES}
    visible = {n for n in vars(precconv) if not n.startswith("_")}
    hidden = {n for n in visible if isinstance(getattr(precconv, n), types.ModuleType)}
    assert hidden <= submodules
    assert visible - hidden == {a.name for a in stated} - {"__version__"}


def test_public_classes_and_functions_have_docstrings() -> None:
    for name in vars(precconv):
        item = getattr(precconv, name)
        if not name.startswith("_") and callable(item) and not issubclass_of_error(item):
            assert item.__doc__, name


def issubclass_of_error(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, precconv.PrecconvError)


def test_every_error_and_its_exit_code_stand_in_the_docstring_of_errors() -> None:
    from precconv import errors

    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert f"{name} " in errors.__doc__
        (line,) = (row for row in errors.__doc__.splitlines() if f" {name} " in row)
        assert int(line.split()[2]) == getattr(errors, name).exit_code
        assert getattr(precconv, name) is getattr(errors, name)


@pytest.mark.parametrize("path", [p for p in MODULES if p.stem not in ("__main__", "_version")], ids=module_name)
def test_what_a_module_lists_as_its_names_it_has(path: Path) -> None:
    name = module_name(path)
    module = sys.modules.get("precconv" if name == "__init__" else f"precconv.{name}")
    if module is None:
        module = __import__(f"precconv.{name}", fromlist=["x"])
    assert [n for n in getattr(module, "__all__", []) if not hasattr(module, n)] == []


# What is loaded


def loaded(code: str) -> set[str]:
    """The modules in memory after a program has run."""
    ask = (
        "import atexit, json, sys\natexit.register(lambda: sys.stderr.write('\\n' + json.dumps(sorted(sys.modules))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask + code],
        cwd=ROOT, env=environment(), capture_output=True, encoding="utf-8", timeout=HANG, check=True,
    )  # fmt: skip
    return set(json.loads(done.stderr.splitlines()[-1]))


RUN = "import runpy\nsys.argv = ['precconv', *{args!r}]\nrunpy.run_module('precconv', run_name='__main__')\n"
LLAMA = str(make.ROOT / "good/tiny-llama.safetensors")


LIGHT = {
    "import": "import precconv\n",
    "plan and inspect": f"import precconv\nprecconv.plan({LLAMA!r}, to='bf16')\nlen(precconv.inspect({LLAMA!r}))\n",
    "--help": RUN.format(args=["--help"]),
    "--version": RUN.format(args=["--version"]),
    "diff --help": RUN.format(args=["diff", "--help"]),
    "convert --help": RUN.format(args=["convert", "--help"]),
    "inspect": RUN.format(args=["inspect", LLAMA]),
    "scan --help": RUN.format(args=["scan", "--help"]),
    "inspect --json": RUN.format(args=["inspect", "--json", LLAMA]),
    "batch --dry-run": RUN.format(args=["batch", LLAMA, "--to", "bf16", "--dry-run", "--output-dir", "nowhere"]),
    "--dry-run": RUN.format(args=[LLAMA, "--to", "bf16", "--dry-run"]),
}


@pytest.mark.parametrize("code", [*LIGHT.values()], ids=[*LIGHT])
def test_torch_and_its_kind_are_not_loaded_before_a_value_is_cast(code: str) -> None:
    heavy = {"torch", "numpy", "safetensors", "huggingface_hub", "tqdm", "transformers"}
    names = loaded(code)
    assert "precconv" in names
    assert names & heavy == set()


def test_torch_is_loaded_when_a_value_is_cast(tmp_path: Path) -> None:
    args = [LLAMA, "--to", "bf16", "-o", str(tmp_path / "out.safetensors")]
    assert "torch" in loaded(RUN.format(args=args))
