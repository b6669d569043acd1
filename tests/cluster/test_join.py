"""Joining: every check, what a refusal says, and what `ray start` is told. No Ray starts here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fakehead import FakeHead

from dfbench.cluster import join as joining
from dfbench.cluster import model_check, processes, stack, start
from dfbench.cluster.head import announce, read_head
from dfbench.cluster.join import JoinOptions, check, check_all, join, leave, systemd_unit
from dfbench.cluster.start import Ports
from dfbench.errors import ClusterError, ModelError
from dfbench.workers import telemetry
from dfbench.workers.spec import TargetSpec

NO_MODEL = JoinOptions(model=None)


@pytest.fixture(autouse=True)
def a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough memory, no NVIDIA device, no Ray."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * 10**9, total=32 * 10**9))
    monkeypatch.setattr(telemetry, "devices", list)
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter(()))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, fake_head: FakeHead) -> list[tuple[list[str], dict[str, str]]]:
    """What would have been run; the stand-in head then sees the new node."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], environment: dict[str, str], clean: object) -> None:
        calls.append((command, environment))
        fake_head.add("10.0.0.2")

    monkeypatch.setattr(start, "run", run)
    return calls


def said() -> tuple[list[str], Any]:
    lines: list[str] = []
    return lines, lines.append


def test_a_machine_like_the_head_joins(fake_head: FakeHead, started: list[tuple[list[str], dict[str, str]]]) -> None:
    lines, say = said()
    leaving = join(fake_head.address, NO_MODEL, say)
    ((command, environment),) = started
    assert command[:4] == [sys.executable, "-m", "ray.scripts.scripts", "start"]
    assert f"--address={fake_head.address}" in command
    assert "--node-ip-address=127.0.0.1" in command
    assert "--node-manager-port=6380" in command and "--max-worker-port=6479" in command
    assert any("dfbench/torch=" in word and "dfbench/device=cpu" in word for word in command)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert all(line.startswith("ok") for line in lines)
    assert leaving == f"to leave: dfbench join --leave {fake_head.address}"


@pytest.mark.parametrize("package", ["python", "ray", "torch", "transformers", "dfbench"])
def test_another_version_is_refused_with_both_sides(fake_head: FakeHead, started: list[Any], package: str) -> None:
    mine = re.escape(stack.as_written(stack.stack())[f"dfbench/{package}"])
    fake_head.nodes[0].labels[f"dfbench/{package}"] = "9.9.9"
    with pytest.raises(ClusterError, match=rf"{package} is {mine} here and 9\.9\.9 on the head: install what the head"):
        join(fake_head.address, NO_MODEL, said()[1])
    assert not started


def test_a_plug_in_that_only_the_head_has_is_refused(fake_head: FakeHead, started: list[Any]) -> None:
    fake_head.nodes[0].labels["dfbench.plugin/extra"] = "1.0"
    with pytest.raises(ClusterError, match=r"plug-in extra is not installed here and 1\.0 on the head"):
        join(fake_head.address, NO_MODEL, said()[1])
    assert not started


def test_all_objections_come_at_once(fake_head: FakeHead, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_head.nodes[0].labels["dfbench/torch"] = "9.9.9"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9, total=2 * 10**9))
    lines, say = said()
    with pytest.raises(ClusterError, match=r"torch is .*only 1\.0 GB of memory are free"):
        join(fake_head.address, NO_MODEL, say)
    assert sorted(line[:2] for line in lines) == ["no", "no", "ok", "ok"]
    assert not started


def test_a_head_without_labels_is_refused_until_it_announces(fake_head: FakeHead, started: list[Any]) -> None:
    fake_head.nodes[0].labels.clear()
    with pytest.raises(ClusterError, match="dfbench nodes --announce"):
        join(fake_head.address, NO_MODEL, said()[1])
    announce(fake_head.address, stack.stack())
    join(fake_head.address, NO_MODEL, said()[1])
    assert len(started) == 1


def test_an_open_head_on_a_network_is_refused_unless_accepted(
    fake_head: FakeHead, started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_head.token = None
    monkeypatch.setattr(joining, "is_loopback", lambda address: False)
    with pytest.raises(ClusterError, match=r"the head is open, .*--open"):
        join(fake_head.address, NO_MODEL, said()[1])
    assert not started
    join(fake_head.address, JoinOptions(model=None, open=True), said()[1])
    assert started[0][1]["RAY_AUTH_MODE"] == "disabled"


def test_a_node_joins_once(fake_head: FakeHead, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here = (SimpleNamespace(pid=77), f"10.0.0.1:{fake_head.address.rpartition(':')[2]}")
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter([] if head else [here]))
    monkeypatch.setattr(processes, "own_address", lambda process: "10.0.0.1")
    with pytest.raises(ClusterError, match=r"it is a node already \(process 77\)"):
        join(fake_head.address, NO_MODEL, said()[1])
    assert not started
    monkeypatch.setattr(processes, "own_address", lambda process: "10.0.0.9")  # a second node of this machine
    join(fake_head.address, NO_MODEL, said()[1])
    assert len(started) == 1


def test_a_node_that_the_head_never_sees_is_an_error(fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "run", lambda command, environment, clean: None)
    monkeypatch.setattr(joining, "VISIBLE_WITHIN_S", 0.6)
    with pytest.raises(ClusterError, match="does not see this node: open the ports"):
        join(fake_head.address, NO_MODEL, said()[1])


def test_ray_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; print('a'); print('port in use.', file=sys.stderr); sys.exit(3)"]
    cleaned: list[bool] = []
    with pytest.raises(ClusterError, match=r"Ray did not start: port in use\.$"):
        start.run(command, dict(os.environ), lambda: cleaned.append(True))
    assert cleaned == [True]


def test_a_node_that_was_too_slow_is_tried_once_more(tmp_path: Path) -> None:
    marker = tmp_path / "tried"
    slow = "raise Exception('The current node timed out during startup. This could happen because')"
    code = f"import pathlib; p = pathlib.Path({str(marker)!r})\nif not p.exists():\n    p.touch()\n    {slow}"
    cleaned: list[bool] = []
    start.run([sys.executable, "-c", code], dict(os.environ), lambda: cleaned.append(True))
    assert cleaned == [True]
    with pytest.raises(ClusterError, match="timed out during startup"):
        start.run([sys.executable, "-c", slow], dict(os.environ), lambda: cleaned.append(True))
    assert len(cleaned) == 3


def test_block_becomes_rays_own_process(fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    def exec_(file: str, command: list[str], environment: dict[str, str]) -> None:
        raise Replaced(file, command, environment)

    monkeypatch.setattr(os, "execvpe", exec_)
    with pytest.raises(Replaced) as info:
        join(fake_head.address, JoinOptions(model=None, block=True), said()[1])
    assert info.value.args[1][-1] == "--block"


# --- the model -----------------------------------------------------------------------------------------------------


def folder(path: Path, config: dict[str, Any] | None) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}


def test_a_model_that_fits_says_how_long_a_context_may_be(fake_head: FakeHead, tmp_path: Path) -> None:
    spec = TargetSpec(model=str(folder(tmp_path / "m", CONFIG)))
    checks = check(read_head(fake_head.address), JoinOptions(model=spec))
    assert checks[-1].problem is None
    assert "fits the CPU with up to 4096 tokens of context" in checks[-1].seen


def test_a_model_that_does_not_fit_keeps_the_machine_out(fake_head: FakeHead, tmp_path: Path) -> None:
    spec = TargetSpec(model=str(folder(tmp_path / "m", CONFIG)), dtype="float32")
    with pytest.raises(ClusterError, match=r"needs .* GB and the CPU has 20\.0 GB free"):
        check_all(fake_head.address, JoinOptions(model=spec), said()[1])


def test_a_model_that_is_nowhere_keeps_the_machine_out(fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="'/no/such/model' is not on this machine"):
        check_all(fake_head.address, JoinOptions(model=TargetSpec(model="/no/such/model")), said()[1])


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        model_check.availability(TargetSpec(model=str(tmp_path)))


class Hub:
    """A stand-in for the hub's client."""

    size = 16_381_516_776

    def model_info(self, name: str, **_: Any) -> Any:
        if name != "Qwen/Qwen3-8B":
            raise OSError("404")
        files = [("config.json", 700), ("model.safetensors", self.size)]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file, size=size) for file, size in files])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Hub]:
    import huggingface_hub

    def nothing_here(*_: Any, **__: Any) -> str:
        raise OSError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_here)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def test_a_model_on_the_hub_can_be_had_if_the_disk_has_room(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TargetSpec(model="Qwen/Qwen3-8B")
    monkeypatch.setattr(model_check, "_free_disk", lambda folder: 10**12)
    assert model_check.availability(spec).where == "can be downloaded (16.4 GB)"
    monkeypatch.setattr(model_check, "_free_disk", lambda folder: 10**9)
    with pytest.raises(ModelError, match=r"a download of 16\.4 GB, and the disk has 1\.0 GB free"):
        model_check.availability(spec)


def test_a_model_on_no_hub_is_refused(hub: type[Hub]) -> None:
    with pytest.raises(ModelError, match="neither on this machine nor to be had from the hub"):
        model_check.availability(TargetSpec(model="no/such"))


def test_a_gpus_free_memory_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="RTX 5090", memory_free=30 * 10**9, memory_total=32 * 10**9)
    monkeypatch.setattr(telemetry, "devices", lambda: [card])
    assert model_check.device_memory() == ("RTX 5090", 30 * 10**9)
    assert start.node_labels()[stack.DEVICE_LABEL] == "RTX_5090"


# --- leaving, boot, ports ------------------------------------------------------------------------------------------


def nodes_here(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[Any]:
    ended: list[Any] = []
    found = [(SimpleNamespace(pid=n), address) for n, address in enumerate(addresses)]
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter([] if head else found))
    monkeypatch.setattr(processes, "end", lambda nodes, patience_s: ended.extend(node.pid for node in nodes))
    return ended


def test_leaving_ends_the_node_of_that_head_only(fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    real = f"10.0.0.1:{fake_head.address.rpartition(':')[2]}"  # what Ray makes of a loopback address
    ended = nodes_here(monkeypatch, "10.9.9.9:6379", real)
    leave(fake_head.address, said()[1])
    assert ended == [1]


def test_leaving_works_when_the_head_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = nodes_here(monkeypatch, "127.0.0.1:1")
    leave("127.0.0.1:1", said()[1])
    assert ended == [0]


def test_leaving_needs_a_name_only_where_it_is_not_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = nodes_here(monkeypatch, "10.9.9.9:6379", "10.8.8.8:6379")
    with pytest.raises(ClusterError, match=r"name one of 10\.8\.8\.8:6379, 10\.9\.9\.9:6379"):
        leave(None, said()[1])
    assert ended == []
    nodes_here(monkeypatch)
    with pytest.raises(ClusterError, match="nothing to leave"):
        leave(None, said()[1])


def test_the_unit_survives_reboots_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "do-not-print-me")
    unit = systemd_unit("10.0.0.1", JoinOptions(model=TargetSpec(model="Qwen/Qwen3-8B", revision="abc")))
    assert f"ExecStart={sys.executable} -m dfbench.cluster.cli join 10.0.0.1:6379 --block" in unit
    assert "--model Qwen/Qwen3-8B@abc" in unit
    for line in ("Restart=always", "WantedBy=multi-user.target", "After=network-online.target"):
        assert line in unit
    assert "RAY_AUTH_MODE=token" in unit
    assert "do-not-print-me" not in unit
    assert "--open" in systemd_unit("10.0.0.1", JoinOptions(open=True))


@pytest.mark.parametrize("text", ["", "6380", "6380-", "b-c", "80-6479", "6479-6380", "6380-6390", "6380-70000"])
def test_bad_ports_are_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="6380-6479"):
        Ports.parse(text)


def test_all_ports_of_a_node_lie_in_its_range() -> None:
    ports = [int(word.partition("=")[2]) for word in Ports.parse("7000-7099").arguments()]
    assert len(set(ports)) == len(ports)
    assert min(ports) == 7000 and max(ports) == 7099


def test_the_own_address_is_that_towards_the_head() -> None:
    assert start.own_address("127.0.0.1:6379") == "127.0.0.1"


def test_processes_end_softly_or_hard() -> None:
    soft = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stubborn = psutil.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
        ],
        stdout=-1,
    )
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    processes.end([soft, stubborn], patience_s=0.5)
    assert not soft.is_running()
    assert not stubborn.is_running()
    stubborn.stdout.close()


def test_command_lines_of_raylets_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    own = os.getuid()
    lines = {
        1: ["/x/raylet", "--head", "--gcs-address=10.0.0.1:6379", '--labels={"dfbench/dfbench":"1"}'],
        2: ["/x/raylet", "--gcs-address=10.0.0.1:6379"],
        3: ["/x/gcs_server", "--gcs_server_port=6379"],
        4: ["python", "/x/dashboard.py", "--gcs-address=10.0.0.1:6379"],
        5: ["python", "/x/dashboard.py", "--gcs-address=10.0.0.1:16379"],
        6: ["python", "-m", "ray.util.client.server", "--address=10.0.0.1:6379"],
        7: [],
    }

    def processes_here(_: list[str]) -> Iterator[Any]:
        for pid, words in lines.items():
            yield SimpleNamespace(pid=pid, info={"cmdline": words, "uids": SimpleNamespace(real=own)})
        yield SimpleNamespace(pid=99, info={"cmdline": lines[1], "uids": SimpleNamespace(real=own + 1)})

    monkeypatch.setattr(psutil, "process_iter", processes_here)
    assert [(p.pid, at) for p, at in processes.raylets(head=True)] == [(1, "10.0.0.1:6379")]
    assert [(p.pid, at) for p, at in processes.raylets(head=False)] == [(2, "10.0.0.1:6379")]
    assert list(processes.raylets(head=False, labelled=True)) == []
    assert [p.pid for p in processes.head_processes(6379)] == [3, 4, 6]
