"""Units as systemd itself reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dfbench.cluster import systemd
from dfbench.cluster.join import JoinOptions
from dfbench.cluster.join import systemd_unit as node_unit
from dfbench.cluster.launcher import HeadOptions
from dfbench.cluster.launcher import systemd_unit as head_unit
from dfbench.workers.spec import TargetSpec


@pytest.fixture(autouse=True)
def no_token_is_made_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "a folder" / "token"))


def complaints(unit: str, folder: Path) -> str:
    """What `systemd-analyze verify` has to say; it exits with 0 whatever it finds."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not here")
    file = folder / "dfbench-test.service"
    file.write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60)
    return "\n".join(line for line in done.stderr.splitlines() if "dfbench-test" in line)


def test_units_are_what_systemd_understands(tmp_path: Path) -> None:
    model = TargetSpec(model="Qwen/Qwen3-8B", revision="abc")
    assert complaints(node_unit("10.0.0.1", JoinOptions(model=model, extra=("--num-gpus=1",))), tmp_path) == ""
    assert complaints(head_unit(HeadOptions(address="10.0.0.1")), tmp_path) == ""


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    broken = node_unit("10.0.0.1", JoinOptions()).replace("Restart=always", "Restart=sometimes")
    assert "sometimes" in complaints(broken, tmp_path)


def test_words_with_spaces_and_percent_signs_survive() -> None:
    unit = systemd.unit("s", "d", ["join", "--model", "/my models/50%"], auth=True)
    (command,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert command.endswith("--model '/my models/50%%'")


def test_where_things_lie_is_taken_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("DFBENCH_HOME", '/my "runs"/50%')
    monkeypatch.setenv("HF_TOKEN", "secret")
    unit = head_unit(HeadOptions(address="10.0.0.1"))
    assert '\nEnvironment="DFBENCH_HOME=/my \\"runs\\"/50%%"\nExecStart=' in unit
    assert "HF_HOME" not in unit and "secret" not in unit
    assert complaints(unit, tmp_path) == ""
