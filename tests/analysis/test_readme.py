"""The README's SQL runs, on a stored run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dfbench import analysis

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)[0]
QUERIES = [query.strip() for query in BLOCK.split(";") if query.strip()]
STORED = sorted(path.parent for path in (Path(__file__).parent / "data").rglob("ledger.db"))


def test_there_are_five() -> None:
    assert len(QUERIES) == 5


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.splitlines()[0])
def test_it_runs(query: str) -> None:
    with analysis.open_run(STORED[-1]) as con:
        con.execute(query).fetchall()
