"""Lets the chaos trials import their kit, and gives them one cluster for all that do not break it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from raykit import Cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    cluster = Cluster(cpus=1)
    yield cluster
    cluster.close()
