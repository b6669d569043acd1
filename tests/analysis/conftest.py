"""Fixtures of the analysis tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runmaker import RunMaker


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunMaker]:
    """Makes run directories under the test's own folder: `make()` or `make("name")`."""

    def maker(name: str = "run", **options: Any) -> RunMaker:
        return RunMaker(tmp_path / "runs" / name, **options)

    return maker
