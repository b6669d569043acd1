"""A real cluster on this machine: a head and two nodes started by our own commands, and a sweep that survives one.

Everything runs in a folder, on ports and with a token of its own, so that other Rays on the machine are neither seen
nor touched; what is left at the end is ended by process id.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from dfbench.cluster import cli, processes
from dfbench.cluster.head import auth_token, read_head
from dfbench.cluster.ledger import Ledger
from dfbench.errors import ClusterError, DfbenchError, UsageError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPTS, ARMS = 10, 2
INTRUDER = "127.0.0.66"
SWEEP = f"""\
name: steady
target: scripted
scripted: {{prompts: {PROMPTS}}}
workloads: [made]
arms: [ar, pld]
max_new_tokens: 30
calibrate: false
"""


@dataclass
class Cluster:
    """Where the cluster lives. `run` calls a dfbench command there and returns what happened."""

    folder: Path
    ports: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports}"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dfbench.cluster.cli", *words]

    def run(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **changes}
        return subprocess.run(
            self.command(*words), env=environment, cwd=self.folder, capture_output=True, text=True, timeout=300
        )

    def fine(self, *words: str) -> str:
        """The output of a command that must succeed."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def join(self, number: int) -> None:
        """Start a node."""
        where = ["--node-address", f"127.0.0.{number + 2}", *self.place(number)]
        self.fine("join", self.address, "--no-model", *where)

    def place(self, number: int) -> list[str]:
        """Where a node's files and ports are: number 0 is the head."""
        first = self.ports + 10 + number * 30
        temp = f"--ray=--temp-dir={self.folder}/{number}"
        return ["--ports", f"{first}-{first + 29}", temp, "--ray=--num-cpus=1", "--ray=--object-store-memory=100000000"]

    def raylet(self, address: str) -> psutil.Process:
        """The Ray node with this address."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if f"--node_ip_address={address}" in words and any(str(self.folder) in word for word in words):
                return process
        raise AssertionError(f"no node at {address}")

    def processes(self) -> list[psutil.Process]:
        """Everything that was started here, known by the token file in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_AUTH_TOKEN_PATH") == self.environment["RAY_AUTH_TOKEN_PATH"]:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return found


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody uses."""
    for first in range(21000 + os.getpid() % 200 * 100, 60000, count):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="df", dir="/tmp"))  # Ray's sockets need a short path.
    made = Cluster(folder, free_ports(110))
    made.environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "DFBENCH_HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    try:
        made.fine(
            *["up", "--here", "--address", "127.0.0.1", "--port", str(made.ports)],
            *["--dashboard-port", str(made.ports + 1), *made.place(0)],
        )
        with ThreadPoolExecutor() as both:
            list(both.map(made.join, (1, 2)))
        yield made
    finally:
        left = made.processes()
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def intruder(cluster: Cluster) -> subprocess.Popen[str]:
    """A `ray start` without the token. Ray takes its time to refuse it, so it is started first and looked at later."""
    environment = {**cluster.environment, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    where = [f"--address={cluster.address}", f"--node-ip-address={INTRUDER}", f"--temp-dir={cluster.folder}/intruder"]
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *where],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(autouse=True)
def our_token(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in the test's own process has the cluster's token too."""
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", cluster.environment["RAY_AUTH_TOKEN_PATH"])


def here(*words: str) -> tuple[int, str]:
    """Exit status and output of a command run in this process, which spares its imports; errors as `main` has them."""
    done = CliRunner().invoke(cli.app, list(words))
    if isinstance(done.exception, DfbenchError):
        return 2 if isinstance(done.exception, UsageError) else 1, str(done.exception)
    return done.exit_code, done.output


def until(holds: Callable[[], bool], within_s: float = 200) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def test_every_node_is_listed_with_what_it_is(cluster: Cluster) -> None:
    until(lambda: "no readings" not in here("nodes", "--address", cluster.address)[1])
    status, text = here("nodes", "--address", cluster.address, "--format", "json")
    document = json.loads(text)
    assert status == 0
    assert document["open"] is False
    assert document["warnings"] == []
    assert [node["role"] for node in document["nodes"]] == ["head", "node", "node"]
    assert {node["name"] for node in document["nodes"][1:]} == {"127.0.0.3", "127.0.0.4"}
    for node in document["nodes"]:
        assert node["state"] == "idle"
        assert node["memory_free"] > 0
        assert node["versions"]["dfbench/python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_version_mismatch_is_refused_with_the_reason(cluster: Cluster) -> None:
    elsewhere = cluster.folder / "site" / "transformers-9.9.9.dist-info"
    elsewhere.mkdir(parents=True)
    (elsewhere / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    before = len(read_head(cluster.address).nodes)
    other = cluster.folder / "other"
    words = ["join", cluster.address, "--no-model", "--node-address", "127.0.0.3", f"--ray=--temp-dir={other}"]
    done = cluster.run(*words, PYTHONPATH=str(elsewhere.parent))
    assert done.returncode == 2
    assert "transformers is 9.9.9 here and" in done.stderr
    assert "it is a node already" in done.stderr  # all objections at once: this machine has joined
    assert len(done.stderr.splitlines()) == 1
    assert len(read_head(cluster.address).nodes) == before
    assert not other.exists()


def test_who_has_no_token_is_refused_everywhere(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = str(cluster.folder / "no-token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", nothing)
    for words in (["nodes"], ["submit", "quick"], ["join", cluster.address], ["submit", "quick", "--detach"]):
        status, text = here(*words, *(["--address", cluster.address] if words[0] != "join" else []))
        assert status == 2
        assert f"there is none at {nothing}: copy" in text
    with pytest.raises(ClusterError, match="refuses the token of this machine"):
        read_head(cluster.address, token="guess")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{cluster.ports + 1}/api/jobs/", timeout=10)
    assert refused.value.code == 401


def test_a_sweep_goes_on_when_a_node_dies(cluster: Cluster) -> None:
    (cluster.folder / "sweep.yaml").write_text(SWEEP)
    run_dir = cluster.folder / "run"
    words = ["submit", "sweep.yaml", "--address", cluster.address, "--run", str(run_dir)]
    notes = cluster.folder / "notes"
    notes.mkdir()
    # The workers, one a node, stop in the middle of a shard, and go on once one of them is dead.
    held = {**cluster.environment, "DFBENCH_FAULT": "worker.job:hold@3", "DFBENCH_FAULT_DIR": str(notes)}
    with (cluster.folder / "out").open("w") as out:
        driver = subprocess.Popen(cluster.command(*words), env=held, cwd=cluster.folder, stdout=out, stderr=out)
        try:
            until(lambda: len([*notes.iterdir()]) == 3 or driver.poll() is not None)
            assert driver.poll() is None, (cluster.folder / "out").read_text()
            until(lambda: _busy(cluster.address) >= {"127.0.0.3", "127.0.0.4"})
            cluster.raylet("127.0.0.4").kill()
            # Its worker outlives it for a moment, and released at once might end its shard.
            until(lambda: '"worker lost"' in (run_dir / "log" / "driver.jsonl").read_text())
            (notes / "worker.job.go").touch()
            assert driver.wait(timeout=300) == 0, (cluster.folder / "out").read_text()
        finally:
            driver.kill()
            driver.wait()
    assert "(raylet)" not in (cluster.folder / "out").read_text()  # Ray's own account of it fills pages
    with Ledger.open(run_dir, readonly=True) as book:
        counts = book.counts()
        assert (counts.done, counts.total) == (PROMPTS * ARMS, PROMPTS * ARMS)
        assert {worker.node for worker in book.workers()} >= {"127.0.0.3", "127.0.0.4"}
        assert any(failure.node == "127.0.0.4" for failure, _ in book.failures())
    query = "select count(*) as n, count(distinct job_id) as ids from jobs where not warmup"
    status, text = here("sql", str(run_dir), query, "--format", "csv")
    assert (status, text.split()) == (0, ["n,ids", f"{PROMPTS * ARMS},{PROMPTS * ARMS}"])


def _busy(address: str) -> set[str]:
    """The nodes that `dfbench nodes` shows with a shard in hand."""
    document = json.loads(here("nodes", "--address", address, "--format", "json")[1])
    return {node["name"] for node in document["nodes"] if node["state"] == "busy" and node["shards"]}


def test_ray_itself_takes_no_node_without_the_token(cluster: Cluster, intruder: subprocess.Popen[str]) -> None:
    said = intruder.communicate(timeout=300)[0]
    assert intruder.returncode != 0, said
    assert INTRUDER not in {node.name for node in read_head(cluster.address).nodes}


def test_the_dead_node_is_listed_as_gone(cluster: Cluster) -> None:
    until(lambda: "127.0.0.4: gone: " in here("nodes", "--address", cluster.address)[1])
    assert here("nodes", "--address", cluster.address)[0] == 1


def test_from_a_machine_that_is_no_node_the_head_drives_and_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "raylets", lambda head, labelled=False: iter(()))
    at = ["--address", cluster.address]
    away = cluster.folder / "away.yaml"
    away.write_text(SWEEP.replace("steady", "away").replace(f"prompts: {PROMPTS}", "prompts: 3"))
    status, said = here("submit", str(away), "--detach", *at)
    assert status == 0
    assert said.startswith("away: 6 jobs in 3 shards")  # the head's word, which would be its refusal
    assert f"dfbench status --address {cluster.address}" in said
    traces = cluster.folder / "traces.jsonl"
    traces.write_text(json.dumps({"workload": "w", "prompt_id": "p", "prompt_ids": [5, 6], "output_ids": [7, 8] * 9}))
    status, said = here("replay", str(traces), "--arms", "pld", *at)  # two drivers at once
    assert status == 0, said
    assert "1 answers of 18 tokens from 1 file" in said and f"the run is on {cluster.address}" in said
    runs = cluster.folder / "home" / "runs"
    assert [_is_done(run) for run in runs.glob("replay-traces-*")] == [True]
    (run,) = runs.glob("away-*")
    until(lambda: _is_done(run))
    query = "select count(distinct job_id) as ids from jobs where not warmup"
    with ThreadPoolExecutor() as both:
        standing = both.submit(cluster.fine, "status", f"runs/{run.name}", *at)
        counted = both.submit(cluster.fine, "sql", f"runs/{run.name}", query, "--format", "csv", *at)
    assert "done, 6 of 6 jobs done" in standing.result()
    assert counted.result().split() == ["ids", "6"]
    assert not (cluster.folder / "runs").exists()
    token = auth_token()
    assert token
    for file in (cluster.folder / "home").rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes(), file


def _is_done(run_dir: Path) -> bool:
    if not (run_dir / "ledger.db").is_file():
        return False
    with Ledger.open(run_dir, readonly=True) as book:
        return book.state == "done"


def test_leaving_and_ending_leave_nothing_behind(cluster: Cluster) -> None:
    assert here("join", "--leave", cluster.address)[0] == 0
    assert [node.is_head for node in read_head(cluster.address).alive] == [True]
    assert here("down", "--here", "--port", str(cluster.ports))[0] == 0
    until(lambda: not cluster.processes())
    with pytest.raises(ClusterError, match="no Ray head answers"):
        read_head(cluster.address)
