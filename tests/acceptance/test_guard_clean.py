"""The guard raises no alarm on the embedded model, and its bfloat16 divergences are there and explained. The long form
is `make guard-clean`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

# A chain, and a tree of a quarter of the long form's width: passes are what takes the time here.
ARMS = ["ar", "pld", {"name": "tree", "drafter": "cacheback", "draft": "tree", "queries": 24, "reserve": 6}]
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "guard_clean.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guard_clean", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.model
@pytest.mark.ray
def test_bfloat16_divergences_are_explained(script: ModuleType, tmp_path: Path) -> None:
    verdict = script.examined(tmp_path, "bfloat16", ("chat",), 3, 48, ARMS)
    assert script.complaints({"bfloat16": verdict}) == []
    assert verdict.total("pairs_compared") == verdict.planned == 6
    assert verdict.total("controls") == verdict.total("scored") == 6
    assert verdict.total("cleared") == verdict.total("divergences") >= 1
