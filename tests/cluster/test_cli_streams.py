"""Standard streams whose reader goes away, whose terminal hangs up, whose disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dfbench.cluster import cli_streams


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(whoever reads, whoever writes) of a pipe or a terminal."""
    pair = os.pipe() if request.param == "pipe" else os.openpty()
    yield pair
    os.close(pair[1])


@pytest.mark.parametrize("ends", ["pipe", "terminal"], indirect=True)
def test_what_nobody_reads_is_dropped(ends: tuple[int, int]) -> None:
    reader, writer = ends
    outlet = cli_streams._Outlet(writer)
    assert outlet.write(b"one") == 3 and os.read(reader, 9) == b"one" and not outlet.gone
    os.close(reader)
    assert outlet.write(b"three") == 5 and outlet.gone
    assert outlet.write(b"") == 0
    assert os.write(writer, b"of a library") == 12  # goes nowhere, and harms nobody


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_is_an_error_but_for_what_goes_on_unheard() -> None:
    with Path("/dev/full").open("wb") as full:
        outlet = cli_streams._Outlet(full.fileno())
        with pytest.raises(OSError, match="No space left"):
            outlet.write(b"a")
        with cli_streams.unheard():
            assert outlet.write(b"ab") == 2 and not outlet.gone
        with pytest.raises(OSError, match="No space left"):
            outlet.write(b"a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_what_went_wrong_is_in_the_exit_status_though_it_cannot_be_said(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", "from dfbench.cluster.cli import main; main()", "status", "nowhere"]
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run(arguments, cwd=tmp_path, stderr=full, check=False).returncode == 2
