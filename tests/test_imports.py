"""The house stands as the architecture draws it: imports point down, and what needs no mlx has none."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tinyllm

ROOT = Path(tinyllm.__file__).parent
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
# A module may import from its own package and from lower floors. Those of one floor do not know each other.
FLOORS = (
    {"errors", "terminal"},
    {"arguments"},
    {"hardware", "backends", "kernels", "malloc"},
    {"blas_rows"},
    {"blas"},
    {"_mx"},
    {"config"},
    {"ops"},
    {"checkpoint"},
    {"hub"},
    {"kv"},
    {"model"},
    {"engine", "text"},
    {"answer"},
    {"anatomy", "bench", "llm", "doctor", "convert", "perplexity"},
    {"chat"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}
WITHOUT_MLX = re.compile(
    r"tinyllm\.(errors|hardware|blas|blas_rows|backends|kernels|malloc|(config|text|hub|anatomy)\..*|engine\.(request|scheduler|plan|plan_text|workspace)"
    r"|kv\.(prefix|pages|manager|kinds)|checkpoint\.(?!weights|quantization|gguf$).*)"
)


def name_of(path: Path) -> str:
    parts = ["tinyllm", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def nodes(tree: ast.AST, *, deferred: bool, types: bool) -> Iterator[ast.AST]:
    """Walk a tree: with what functions import (`deferred`), and with what type checkers alone do (`types`)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not deferred:
            continue
        if is_for_types(node) and not types:
            continue
        yield node
        yield from nodes(node, deferred=deferred, types=types)


@cache
def imports(module: str, *, deferred: bool = True, types: bool = True) -> frozenset[str]:
    """Return the full names of the modules that `module` imports."""
    found: set[str] = set()
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in nodes(tree, deferred=deferred, types=types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} has a relative import"
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (below & MODULES.keys()) or {node.module}
    return frozenset(found)


def reached(module: str) -> set[str]:
    """Return the modules of the package that `module` imports, directly or through others, itself included."""
    seen, left = set(), [module]
    while left:
        current = left.pop()
        if current not in seen and current in MODULES:
            seen.add(current)
            left += imports(current, types=False)
    return seen


def part_of(module: str) -> str:
    return module.split(".")[1]


def run(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"tinyllm"}))
def test_imports_point_down(module: str) -> None:
    part = part_of(module)
    for imported in imports(module) & (MODULES.keys() - {"tinyllm"}):
        other = part_of(imported)
        assert other == part or FLOOR_OF[other] < FLOOR_OF[part], f"{module} imports {imported}"


def test_every_part_has_its_floor() -> None:
    assert {part_of(module) for module in MODULES if module != "tinyllm"} <= FLOOR_OF.keys()


def test_one_module_alone_imports_mlx() -> None:
    importing = {name for name in MODULES if any(re.match(r"mlx(\.|$)", i) for i in imports(name))}
    assert importing == {"tinyllm._mx"}


@pytest.mark.parametrize("module", sorted(filter(WITHOUT_MLX.fullmatch, MODULES)))
def test_what_needs_no_mlx_reaches_none(module: str) -> None:
    assert "tinyllm._mx" not in reached(module)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_that_says_no_mlx_reaches_none(module: str) -> None:
    documented = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""
    assert "No mlx" not in documented or "tinyllm._mx" not in reached(module)


def test_what_needs_no_mlx_imports_none_when_it_is_run() -> None:
    modules = sorted(filter(WITHOUT_MLX.fullmatch, MODULES))
    code = "import sys, importlib; [importlib.import_module(m) for m in sys.argv[1:]]; print(*sys.modules)"
    loaded = run(code, *modules)
    assert set(modules) <= set(loaded)
    assert not [name for name in loaded if re.match(r"mlx(\.|$)", name)]


def test_what_finds_models_imports_neither_numpy_nor_the_table_of_families() -> None:
    """Both take their time, and nothing of them is needed to see what `-m` means, or that a model is there."""
    code = """if True:
        import sys
        import tinyllm.hub.cache, tinyllm.hub.embedded, tinyllm.hub.locate, tinyllm.chat.model, tinyllm.chat.repl
        print(*sys.modules)
    """
    assert not {"numpy", "tinyllm.config.config", "mlx"} & set(run(code))


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: imports(name, deferred=False, types=False) & MODULES.keys() for name in MODULES}
    while free := {name for name, imported in graph.items() if not imported}:
        graph = {name: imported - free for name, imported in graph.items() if name not in free}
    assert not graph, f"a cycle among {sorted(graph)}"


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("__init__.py")), ids=lambda path: str(path.relative_to(ROOT.parent))
)
def test_package_files_are_empty_but_the_roots(path: Path) -> None:
    assert (path.read_text(encoding="utf-8") == "") == (path.parent != ROOT)


def test_importing_the_package_imports_the_standard_library_alone_and_changes_no_environment() -> None:
    code = """if True:
        import os, sys
        modules, environment = set(sys.modules), dict(os.environ)
        import tinyllm
        assert dict(os.environ) == environment
        print(*{name.split(".")[0] for name in set(sys.modules) - modules})
    """
    assert set(run(code)) - set(sys.stdlib_module_names) == {"tinyllm"}


def test_importing_every_module_changes_no_environment_and_starts_no_thread() -> None:
    code = """if True:
        import importlib, os, sys, threading
        environment = dict(os.environ)
        for name in sys.argv[1:]:
            importlib.import_module(name)
        assert dict(os.environ) == environment, set(os.environ.items()) ^ set(environment.items())
        print(threading.active_count())
    """
    assert run(code, *sorted(MODULES.keys() - {"tinyllm.__main__"})) == ["1"]


def test_public_names_resolve_and_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(MODULES["tinyllm"].read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if is_for_types(node)]
    seen = {alias.asname for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen | {"__version__"} == set(tinyllm.__all__) == set(dir(tinyllm))
    for name in tinyllm.__all__:
        assert getattr(tinyllm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tinyllm.nothing  # noqa: B018


def test_the_documents_names_are_public() -> None:
    assert {"Config", "ModelFeatures", "ModelForCausalLM", "WeightStore", "load_model", "LLM"} <= set(tinyllm.__all__)


def test_every_library_that_is_imported_is_declared() -> None:
    project = pytest.importorskip("tomllib").loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    requirements = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower() for requirement in requirements}
    imported = {name.split(".")[0] for module in MODULES for name in imports(module, types=False)}
    assert imported - set(sys.stdlib_module_names) - {"tinyllm"} <= declared
