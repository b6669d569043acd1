"""Fixtures that every suite shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Read when torch is imported. Threads that spin while they wait make torch 10 to 30 times slower on cores that
# anything else is using, and tests share theirs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # A process a core already; tiny models gain nothing from threads.

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Reference data beside the checkout; tests that need it skip where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the reference data folder ../shared/data is not here")
    return SHARED
