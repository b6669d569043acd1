"""A dozen chaos trials with real processes, two at a time; `make chaos` runs the long form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from run import Result, at_once

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


@pytest.fixture(scope="module")
def result_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Result]]:
    """Starts the trials of all tests that are to run, and waits for one's result."""
    chosen = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    coming = at_once([(name, 1) for name in chosen], jobs=2, always_again=False)
    found: dict[str, Result] = {}

    def wait(name: str) -> Result:
        while name not in found:
            result = next(coming)
            found[result.name] = result
        return found[name]

    yield wait
    for _ in coming:
        pass


@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost_and_nothing_runs_twice(result_of: Callable[[str], Result], name: str) -> None:
    result = result_of(name)
    assert result.report is not None, str(result)
    assert result.report.reached, "the fault was not reached"
    assert (result.report.lost, result.report.duplicated) == (0, 0)
