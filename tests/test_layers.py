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
