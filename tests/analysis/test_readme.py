"""The README's SQL and the lines for a notebook run, on a stored run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from dfbench import analysis

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)[0]
QUERIES = [query.strip() for query in BLOCK.split(";") if query.strip()]
STORED = sorted((Path(__file__).parent / "data").glob("schema-*"))


def test_there_are_five() -> None:
    assert len(QUERIES) == 5


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.splitlines()[0])
def test_it_runs(query: str) -> None:
    with analysis.open_run(STORED[-1]) as con:
        con.execute(query).fetchall()


def test_the_lines_for_a_notebook_run() -> None:
    """Each line is a cell: what its last expression gives is what a notebook shows."""
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "views.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    shown = []
    for node in ast.parse(block.replace("runs/latest", str(STORED[-1]))).body:
        if isinstance(node, ast.Expr):
            shown.append(eval(ast.unparse(node), names))
        else:
            exec(ast.unparse(node), names)
    frame, arrow, grouped, chart = shown
    assert list(frame["mat"]) == [1.0, 1.5]
    assert arrow.column_names[-1] == "commit_ns"
    assert "code" in str(grouped)
    assert chart._repr_svg_().startswith("<svg")
