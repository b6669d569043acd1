"""The launcher file against Ray's own schema and our rules, and what is run around it."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fakehead import FakeHead

from dfbench.cluster import launcher, processes, start
from dfbench.cluster.head import token_path
from dfbench.cluster.launcher import HeadOptions, down, down_here, load_config, up, up_here
from dfbench.errors import ClusterError

SHIPPED = Path(__file__).resolve().parents[2] / "ray_config.yaml"


def quiet(_: str) -> None:
    """Nothing is said."""


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """The shipped file with addresses filled in, and a change made to its data."""

    def make(change: Callable[[dict[str, Any]], object] | None = None) -> Path:
        data = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
        data["provider"].update(head_ip="10.0.0.1", worker_ips=["10.0.0.2", "10.0.0.3"])
        if change is not None:
            change(data)
        path = tmp_path / "ray_config.yaml"
        path.write_text(yaml.safe_dump(data, width=10_000))
        return path

    return make


def test_the_shipped_file_only_lacks_addresses(config: Callable[..., Path]) -> None:
    with pytest.raises(ClusterError, match=r"still has the example address 192\.0\.2\.10"):
        load_config(SHIPPED)
    cluster = load_config(config())
    assert (cluster.head, cluster.workers) == ("10.0.0.1", ("10.0.0.2", "10.0.0.3"))


def test_the_shipped_commands_are_explicit_about_what_ray_guesses() -> None:
    data = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    (head,) = [line for line in data["head_start_ray_commands"] if "ray start" in line]
    (worker,) = [line for line in data["worker_start_ray_commands"] if "ray start" in line]
    for line in (head, worker):
        assert "RAY_AUTH_MODE=token" in line
        assert "--node-ip-address=$3" in line
        assert '--labels="$(dfbench nodes --labels)"' in line
        for port in start.Ports.parse(start.PORTS).arguments():
            assert port in line
    assert "--dashboard-host=$3" in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert f"--ray-client-server-port={start.Ports.parse(start.PORTS).client}" in head
    for name, value in start.HEALTH_CHECK.items():
        assert f"{name}={value}" in head
    assert "~/.ray/auth_token" in data["file_mounts"]
    assert not any("ray stop" in line for key in launcher._START_COMMANDS for line in data[key])


def test_every_option_in_the_file_is_one_of_ray_start() -> None:
    from ray.scripts.scripts import start as ray_start

    known = {option for parameter in ray_start.params for option in parameter.opts}
    data = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    for key in launcher._START_COMMANDS:
        line = next(line for line in data[key] if "ray start" in line)
        used = {word.partition("=")[0] for word in line.partition("ray start")[2].split() if word.startswith("--")}
        assert used - {'--labels)"'} <= known, used - known


def test_our_own_start_commands_use_rays_options() -> None:
    from ray.scripts.scripts import start as ray_start

    known = {option for parameter in ray_start.params for option in parameter.opts}
    ports = start.Ports.parse(start.PORTS)
    for command in (
        start.head_command("10.0.0.1:6379", 8265, ports, []),
        start.node_command("10.0.0.1:6379", "10.0.0.2", ports, []),
    ):
        assert {word.partition("=")[0] for word in command if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["provider"].pop("head_ip"), "provider.head_ip is missing"),
        (lambda d: d["provider"].pop("worker_ips"), "provider.worker_ips is missing"),
        (lambda d: d["provider"].update(worker_ips="10.0.0.2"), "provider.worker_ips is missing"),
        (lambda d: d["provider"].update(type="aws"), "provider.type must be local"),
        (lambda d: d.pop("provider"), "provider.type must be local"),
        (lambda d: d.update(labels={"a": "b"}), "Ray refuses the file.*labels"),
        (lambda d: d["auth"].update(ssh_port=22), "Ray refuses auth.*ssh_port"),
        (lambda d: d.update(setup_commands="pip install x"), "Ray refuses setup_commands"),
        (lambda d: d.update(max_workers=0), "Ray refuses"),
        (lambda d: d.update(available_node_types={"a": {"resources": {}, "node_config": {}}}), "Ray refuses it"),
        (lambda d: d["provider"].update(head_ip="8.8.8.8"), r"8\.8\.8\.8 is a public address"),
        (lambda d: d["provider"].update(worker_ips=["10.0.0.1"]), "names a machine twice"),
        (
            lambda d: d.update(head_start_ray_commands=["ray start --head"]),
            "head_start_ray_commands does not set RAY_AUTH",
        ),
        (lambda d: d.pop("worker_start_ray_commands"), "worker_start_ray_commands does not set RAY_AUTH"),
    ],
)
def test_what_would_not_work_is_one_sentence(
    config: Callable[..., Path], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(ClusterError, match=message) as info:
        load_config(config(change))
    assert "\n" not in str(info.value)


def test_a_cluster_may_begin_without_workers(config: Callable[..., Path]) -> None:
    assert load_config(config(lambda d: d["provider"].update(worker_ips=[]))).workers == ()


@pytest.mark.parametrize("text", ["[", "a: b: c", "just text", ""])
def test_files_that_are_no_launcher_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"not YAML|not a launcher file"):
        load_config(path)


def test_a_missing_file_names_the_way_without_one(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="--here"):
        load_config(tmp_path / "none.yaml")


# --- up and down -----------------------------------------------------------------------------------------------------


class Runs:
    """Stands in for subprocess.run: keeps what was asked, answers with `status`."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, str]]] = []
        self.status = 0

    def __call__(self, command: list[str], *, env: dict[str, str], check: bool) -> Any:
        self.calls.append((command, env))
        return SimpleNamespace(returncode=self.status)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    stand_in = Runs()
    monkeypatch.setattr(subprocess, "run", stand_in)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray" / "token"))
    return stand_in


def seen(head: FakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `up` find this stand-in wherever it looks."""
    real = launcher.read_head
    monkeypatch.setattr(launcher, "read_head", lambda address: real(head.address))


def test_up_sets_what_ray_needs_and_waits_for_every_machine(
    config: Callable[..., Path], runs: Runs, fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    fake_head.token = None
    fake_head.add("10.0.0.2")
    fake_head.add("10.0.0.3")
    seen(fake_head, monkeypatch)
    lines: list[str] = []
    up(config(), lines.append)
    ((command, environment),) = runs.calls
    assert command[-4:] == ["-y", "--no-config-cache", "--disable-usage-stats", str(tmp_path / "ray_config.yaml")]
    assert environment["RAY_UP_enable_autoscaler_v2"] == "0"
    assert environment["RAY_AUTH_MODE"] == "token"
    token = tmp_path / "ray" / "token"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert lines == [f"made a token for this cluster: {token}", "3 of 3 nodes are up"]


def test_up_names_the_machines_that_did_not_come(
    config: Callable[..., Path], runs: Runs, fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_head.token = None
    fake_head.add("10.0.0.3")
    seen(fake_head, monkeypatch)
    with pytest.raises(ClusterError, match=r"but 10\.0\.0\.2 did not come"):
        up(config(), quiet, wait_s=0)


def test_rays_own_failure_is_passed_on(config: Callable[..., Path], runs: Runs) -> None:
    runs.status = 1
    with pytest.raises(ClusterError, match="`ray down` ended with status 1"):
        down(config(), quiet)


def test_down_tells_the_nodes_first(
    config: Callable[..., Path], runs: Runs, fake_head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_head.token = None
    fake_head.add("127.0.0.1")
    fake_head.add("10.255.255.1", alive=False)
    seen(fake_head, monkeypatch)
    lines: list[str] = []
    down(config(), lines.append)
    assert fake_head.shut_down == [True]
    assert lines == ["127.0.0.1: ended"]
    fake_head.refuses = True
    down(config(), lines.append)
    assert lines[1:] == ["127.0.0.1: out of reach; its Ray ends a minute after the head"]
    assert len(runs.calls) == 2


def test_an_existing_token_is_kept_and_closed_to_others(runs: Runs, tmp_path: Path) -> None:
    token = tmp_path / "ray" / "token"
    token.parent.mkdir()
    token.write_text("mine")
    token.chmod(0o644)
    assert not start.ensure_token()
    assert token.read_text() == "mine"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    token.write_text("")
    with pytest.raises(ClusterError, match="is empty: delete it"):
        start.ensure_token()


# --- a head on this machine ------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> list[tuple[list[str], dict[str, str]]]:
    """What `up --here` would have run, on a machine without Ray."""
    monkeypatch.setattr(processes, "head_processes", lambda port: [])
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(start, "run", lambda command, environment, clean: calls.append((command, environment)))
    return calls


def test_a_head_binds_to_its_private_address_and_asks_for_a_token(
    started: list[tuple[list[str], dict[str, str]]],
) -> None:
    assert up_here(HeadOptions(address="10.0.0.1"), quiet) == "10.0.0.1:6379"
    ((command, environment),) = started
    assert {"--node-ip-address=10.0.0.1", "--dashboard-host=10.0.0.1", "--port=6379"} <= set(command)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_health_check_failure_threshold"] == "3"
    assert token_path().is_file()


def test_a_public_address_needs_to_be_asked_for(started: list[Any]) -> None:
    with pytest.raises(ClusterError, match="public address"):
        up_here(HeadOptions(address="8.8.8.8"), quiet)
    assert not started
    up_here(HeadOptions(address="8.8.8.8", public=True), quiet)
    assert len(started) == 1


def test_a_head_that_runs_already_is_left_alone(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "head_processes", lambda port: ["gcs_server"])
    with pytest.raises(ClusterError, match="serves port 6379 of this machine already"):
        up_here(HeadOptions(address="10.0.0.1"), quiet)
    assert not started


def test_an_open_head_is_explicit_about_it(started: list[tuple[list[str], dict[str, str]]]) -> None:
    up_here(HeadOptions(address="10.0.0.1", open=True), quiet)
    assert started[0][1]["RAY_AUTH_MODE"] == "disabled"
    assert not token_path().exists()


def test_a_heads_unit_starts_this_very_head(runs: Runs) -> None:
    unit = launcher.systemd_unit(HeadOptions(address="10.0.0.1", port=7000, extra=("--num-cpus=2",)))
    assert "cli up --here --block --address 10.0.0.1 --port 7000" in unit
    assert "--ray=--num-cpus=2" in unit
    assert "Restart=always" in unit
    token = token_path().read_text()
    assert token not in unit and str(token_path()) in unit
    with pytest.raises(ClusterError, match="public address"):
        launcher.systemd_unit(HeadOptions(address="8.8.8.8"))


def test_down_here_ends_the_head_of_that_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    heads = [("raylet-a", "10.0.0.1:6379"), ("raylet-b", "10.0.0.1:7000")]
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter(heads))
    monkeypatch.setattr(processes, "head_processes", lambda port: [f"rest of {port}"])
    monkeypatch.setattr(processes, "end", lambda some, patience_s: ended.extend(some))
    down_here(7000, quiet)
    assert ended == ["raylet-b", "rest of 7000"]
    with pytest.raises(ClusterError, match="serves port 5000"):
        down_here(5000, quiet)
