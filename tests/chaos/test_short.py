"""A dozen chaos trials with real processes; `make chaos` runs the long form."""

from __future__ import annotations

from pathlib import Path

import pytest
from raykit import Cluster
from trials import attempt

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(400)]

SHORT = [
    "driver at commit.before_rename",
    "driver at commit.after_rename",
    "driver at commit.inside",
    "driver at any moment",
    "worker at worker.job",
    "worker at any moment",
    "node killed",
    "raylet killed",
    "node joins",
    "disk full",
    "two drivers",
    "clock set back",
]


@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost_and_nothing_runs_twice(tmp_path: Path, shared_cluster: Cluster, name: str) -> None:
    report = attempt(name, tmp_path / "trial", shared_cluster, seed=1, always_again=False)
    assert report.reached, "the fault was not reached"
    assert (report.lost, report.duplicated) == (0, 0)
