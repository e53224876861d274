"""The architecture as a test: imports go down only, and third-party packages stay behind their fences."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "harness"

REFERENCE = ("reference", "reference_f64", "reference_model", "reference_products", "sampling")

# Lowest first. A module may import its own component and any component of a lower layer, never a neighbour's.
LAYERS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"base": ("__init__", "errors", "types", "_data", "_environment", "_files")},
    {"metrics": ("metrics", "_kernels", "_widen"), "stats": ("stats", "_variance")},
    {"corpus": ("corpus", "corpus_sources")},
    {
        "storage": ("storage", "manifest_json", "_part_writer", "_parts", "_recording", "_stock"),
        "embedded": ("embedded",),
    },
    {
        "compare": ("compare", "alignment", "distortion", "evidence", "pairing", "rows", "worst"),
        "judge": ("judge", "fitness", "gates", "power", "summary", "wording"),
        "patching": ("patching", "patterns", "rounding", "sites"),
    },
    {"calibration": ("calibration",)},
    {
        "engine": ("engine",),
        "reference": REFERENCE,
        "report": ("report",),
    },
    {"cli": ("__main__", "cli", "commands")},
)

# Third-party package -> modules that may import it at their top, and modules that may do so inside a function.
TORCH_LAZILY = ("_environment", "corpus", "embedded", "patching", "rounding", "sites")
FENCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm": (("engine",), ()),
    "torch": (("engine", *REFERENCE), TORCH_LAZILY),
    "transformers": (REFERENCE, ("engine", "corpus", "embedded")),
    "pyarrow": (("storage", "_part_writer", "_parts", "corpus"), ()),
    "numba": (("metrics", "_kernels", "_widen"), ()),
    "rich": (("report",), ()),
    "matplotlib": (("report",), ()),
    "plotly": (("report",), ()),
    "jinja2": (("report",), ()),
    "typer": (("cli", "commands"), ()),
    "duckdb": ((), ()),
    "polars": ((), ()),
    "pandas": ((), ()),
}

LEVEL = {module: level for level, layer in enumerate(LAYERS) for modules in layer.values() for module in modules}
COMPONENT = {module: name for layer in LAYERS for name, modules in layer.items() for module in modules}


def violations(package: Path) -> list[str]:
    """Every import in the package that the rules forbid, as "file:line: what"."""
    return [
        f"{path.relative_to(package)}:{what}" for path in sorted(package.rglob("*.py")) for what in _of(package, path)
    ]


def _of(package: Path, path: Path) -> Iterator[str]:
    place = path.relative_to(package).with_suffix("").parts
    module = place[0]
    if module not in LEVEL:
        yield f"1: module {module} has no layer: add it to LAYERS"
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_top = {node for statement in tree.body for node in _outside_functions(statement)}
    for node in ast.walk(tree):
        for target in _imported(node, place):
            yield from _judge_import(module, target, getattr(node, "lineno", 0), at_top=node in at_top)


def _judge_import(module: str, target: str, line: int, *, at_top: bool) -> Iterator[str]:
    root, *rest = target.split(".")
    if root != package_name():
        allowed_at_top, allowed_lazily = FENCES.get(root, ((module,), ()))
        if module not in allowed_at_top and not (module in allowed_lazily and not at_top):
            yield f"{line}: {module} may not import {root}{' at its top' if module in allowed_lazily else ''}"
        return
    imported = rest[0] if rest else "__init__"
    if imported not in LEVEL:  # `from harness import __version__`: a name of the package itself
        return
    if COMPONENT[imported] != COMPONENT[module] and LEVEL[imported] >= LEVEL[module]:
        yield f"{line}: {module} (layer {LEVEL[module]}) may not import {imported} (layer {LEVEL[imported]})"


def _imported(node: ast.AST, place: tuple[str, ...]) -> Iterator[str]:
    """Dotted names a node imports, relative ones resolved; also constant arguments of `import_module`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = (package_name(), *place)[: -node.level] if node.level else ()
        stem = ".".join([*above, *(node.module.split(".") if node.module else ())])
        yield from ([stem] if stem != package_name() else [f"{stem}.{alias.name}" for alias in node.names])
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it that run on import. `if TYPE_CHECKING:` does not."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_functions(child)


def package_name() -> str:
    return "harness"


def test_imports_go_down_and_stay_behind_their_fences() -> None:
    assert violations(PACKAGE) == []


def test_the_rules_name_only_modules_that_exist() -> None:
    present = {p.stem if p.suffix == ".py" else p.name for p in PACKAGE.iterdir()}
    fenced = {m for allowed in FENCES.values() for group in allowed for m in group}
    assert (set(LEVEL) | fenced) - present == set()


@pytest.mark.parametrize(
    ("file", "planted", "named"),
    [
        ("metrics.py", "import vllm", "metrics may not import vllm"),
        ("judge.py", "def f():\n    from vllm import LLM", "judge may not import vllm"),
        ("stats.py", "from harness.judge import judge", "stats (layer 1) may not import judge"),
        ("types.py", "from .cli import app", "types (layer 0) may not import cli"),
        ("engine/plugin.py", "from ..reference import record_reference", "engine (layer 6) may not import reference"),
        ("report/console.py", "from harness import engine", "report (layer 6) may not import engine"),
        ("judge.py", "import harness.compare", "judge (layer 4) may not import compare"),
        ("patching.py", "import torch.nn", "patching may not import torch at its top"),
        ("patching.py", "class A:\n    import torch", "patching may not import torch at its top"),
        (
            "compare.py",
            "import importlib\nimportlib.import_module('transformers')",
            "compare may not import transformers",
        ),
        ("compare.py", "import pyarrow.parquet as pq", "compare may not import pyarrow"),
        ("doctor.py", "", "doctor has no layer"),
        ("newcomer.py", "", "newcomer has no layer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, planted: str, named: str) -> None:
    copy = tmp_path / "harness"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    target = copy / file
    text = target.read_text(encoding="utf-8") if target.exists() else ""
    target.write_text(f"{text}\n{planted}\n", encoding="utf-8")
    (found,) = set(violations(copy)) - set(violations(PACKAGE))
    assert found.startswith(f"{file}:")
    assert named in found


@pytest.mark.parametrize("planted", ["def f():\n    import torch", "if TYPE_CHECKING:\n    import torch"])
def test_a_lazy_import_is_allowed_where_the_fence_says_so(tmp_path: Path, planted: str) -> None:
    (tmp_path / "patching.py").write_text(planted, encoding="utf-8")
    assert violations(tmp_path) == []


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked by this test")

sys.meta_path.insert(0, Block())
"""


def run_without(blocked: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in which those packages cannot be imported."""
    program = BLOCK.format(blocked=blocked) + code
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


ENGINES = {"torch", "vllm", "transformers", "triton", "flashinfer", "accelerate", "gguf"}


def test_the_block_works() -> None:
    done = run_without({"numpy"}, "import numpy.linalg")
    assert "numpy is blocked by this test" in done.stderr


def test_judging_and_reporting_import_without_any_engine() -> None:
    modules = [
        f"harness.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ("engine",) and path.stem not in REFERENCE
    ]
    assert "harness.compare" in modules
    done = run_without(ENGINES, "\n".join(f"import {module}" for module in modules))
    assert (done.returncode, done.stderr) == (0, "")


def test_vllm_can_import_the_plugin_before_anything_heavy() -> None:
    done = run_without(
        ENGINES | {"numpy", "pyarrow", "numba", "scipy"}, "from harness.engine.plugin import register; register()"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_nothing_heavy() -> None:
    heavy = ENGINES | {"numpy", "pyarrow", "numba", "scipy", "rich", "matplotlib"}
    code = "from harness.cli import main; sys.exit(main(['--help']))"
    done = run_without(heavy, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compare" in done.stdout
