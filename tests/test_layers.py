"""Imports go down only: cluster → workers → drafters → errors; analysis and drafters import no sibling."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cluster", "workers", "drafters", "analysis")
MAY_IMPORT = {
    "cluster": {"cluster", "workers", "drafters"},
    "workers": {"workers", "drafters"},
    "drafters": {"drafters"},
    "analysis": {"analysis"},
}
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]

SILENT = [path for path in MODULES if not path.name.startswith("cli")]


def imported(path: Path) -> set[str]:
    """Dotted names that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_folder_has_modules() -> None:
    assert {path.parent.name for path in MODULES} == set(FOLDERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_go_down_only(path: Path) -> None:
    allowed = set(MAY_IMPORT[path.parent.name])
    if path.parent.name == "cluster" and path.name.startswith("cli"):
        allowed.add("analysis")
    names = imported(path)
    siblings = {name.split(".")[1] for name in names if name.startswith("dfbench.")} & set(FOLDERS)
    assert siblings <= allowed, f"{path.name} imports {sorted(siblings - allowed)}"
    assert not {name for name in names if name.split(".")[0] in FOLDERS}, "import the folder as dfbench.<folder>"


@pytest.mark.parametrize("path", SILENT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_only_the_command_line_prints_or_exits(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "sys.exit", "exit", "quit"), f"{path.name}:{node.lineno} calls {called}"


def test_folders_stay_flat() -> None:
    """A new sub-folder with code would work in an editable install and be missing from the wheel."""
    nested = [path for folder in FOLDERS for path in (ROOT / folder).glob("*/*.py") if path.parent.name != "_root"]
    assert nested == []


LATE = [{"dfbench.workers.engine", "dfbench.workers.compiled"}]
"""Circles that are known: the one engine loads the other, which is made of it, when it is asked for."""


def test_modules_do_not_import_in_circles() -> None:
    """Imports inside functions count too: they only hide a circle. Those for types alone do not."""
    names = {f"dfbench.{path.parent.name}.{path.stem}": path for path in MODULES if path.stem != "__init__"}
    needs = {name: needed(path) & names.keys() - {name} for name, path in names.items()}
    while loose := [name for name, wanted in needs.items() if not wanted & needs.keys()]:
        for name in loose:
            del needs[name]
    while loose := [name for name in needs if not any(name in wanted for wanted in needs.values())]:
        for name in loose:
            del needs[name]
    assert not needs or set(needs) in LATE, f"these import each other: {sorted(needs)}"


def needed(path: Path) -> set[str]:
    """Dotted names that a module imports when it or a function of it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
