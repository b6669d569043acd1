"""`dfbench up` and `dfbench down` for real: two machines that are network namespaces, each with its own sshd and home.

Each machine is a network, process and mount namespace, so that Ray, ssh and even a `ray stop` of Ray's own see nothing
but their machine. Needs root, sshd, rsync and iproute2; elsewhere the test is skipped and the schema tests stand alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sshd", "ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter")
HEAD, WORKER = "10.77.0.1", "10.77.0.2"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.name != "posix" or os.getuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root and {', '.join(TOOLS)}",
    ),
]


@dataclass
class Machine:
    """One namespace with an sshd in it. `pid` is the first process inside."""

    name: str
    address: str
    home: Path
    outer: subprocess.Popen[bytes]
    pid: int

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """A command on this machine, as its root would type it."""
        environment = {
            "HOME": str(Path.home()),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "USER": "root",
            "LANG": "C.UTF-8",
        }
        inside = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", *words]
        return subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=timeout)

    def dfbench(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dfbench.cluster.cli", *words)


def script(folder: Path, home: Path) -> str:
    """What a machine does first: a home and a Ray folder of its own, then sshd. What Python needs stays reachable."""
    user = Path.home()
    lines = ["set -e"]
    for needed in {Path(sys.base_prefix), Path(sys.prefix), ROOT}:
        if needed.is_relative_to(user):
            inside = home / needed.relative_to(user)
            lines += [f"mkdir -p '{inside}'", f"mount --bind '{needed}' '{inside}'"]
    lines += [
        f"mkdir -p /tmp/ray '{home}/ray'",
        f"mount --bind '{home}/ray' /tmp/ray",
        f"mount --rbind '{home}' '{user}'",
        "ip link set lo up",
        "mkdir -p /run/sshd",
        f"exec {shutil.which('sshd')} -D -e -f '{folder}/sshd_config'",
    ]
    return "\n".join(lines)


def boot(folder: Path, name: str, address: str) -> Machine:
    home = folder / name
    (home / ".ssh").mkdir(parents=True)
    for key in ("id_ed25519", "id_ed25519.pub"):
        shutil.copy(folder / key, home / ".ssh" / key)
    shutil.copy(folder / "id_ed25519.pub", home / ".ssh" / "authorized_keys")
    # The head looks for workers to start each second in place of each fifth.
    quick = "RAY_USAGE_STATS_ENABLED=0 AUTOSCALER_UPDATE_INTERVAL_S=1"
    profile = f"export PATH={Path(sys.executable).parent}:$PATH {quick}\n"
    for file in (".profile", ".bash_profile", ".bashrc"):
        (home / file).write_text(profile)
    outer = subprocess.Popen(
        ["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", script(folder, home)],
        stderr=(folder / f"{name}.log").open("wb"),
    )
    deadline = time.monotonic() + 120
    while not (children := psutil.Process(outer.pid).children()):
        assert time.monotonic() < deadline and outer.poll() is None, (folder / f"{name}.log").read_text()
        time.sleep(0.05)
    return Machine(name, address, home, outer, children[0].pid)


def connect(one: Machine, other: Machine) -> None:
    """A cable between the two."""
    links = (f"{one.name}-{os.getpid() % 10000}", f"{other.name}-{os.getpid() % 10000}")
    call("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
    for machine, link in zip((one, other), links, strict=True):
        call("ip", "link", "set", link, "netns", str(machine.pid))
        inside = ["nsenter", "-t", str(machine.pid), "-n"]
        call(*inside, "ip", "addr", "add", f"{machine.address}/24", "dev", link)
        call(*inside, "ip", "link", "set", link, "up")


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="dfs", dir="/tmp"))
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_ed25519"))
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nPermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPidFile none\nSubsystem sftp internal-sftp\n"
    )
    booted: list[Machine] = []
    try:
        for name, address in (("a", HEAD), ("b", WORKER)):
            booted.append(boot(folder, name, address))
        try:
            connect(*booted)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield booted[0], booted[1], folder
    finally:
        for machine in booted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(machine.pid, signal.SIGKILL)  # The first process of a namespace takes all others along.
            machine.outer.wait(timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_cluster_comes_up_over_ssh_and_goes_down_again(machines: tuple[Machine, Machine, Path]) -> None:
    head, worker, folder = machines
    config = yaml.safe_load((ROOT / "ray_config.yaml").read_text(encoding="utf-8"))
    config["provider"].update(head_ip=HEAD, worker_ips=[WORKER])
    config["auth"] = {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    file = folder / "ray_config.yaml"
    file.write_text(yaml.safe_dump(config, width=10_000))

    up = head.dfbench("up", "--config", str(file))
    assert up.returncode == 0, f"{up.stdout[-3000:]}\n{up.stderr[-3000:]}"
    assert "2 of 2 nodes are up" in up.stdout

    listed = head.dfbench("nodes", "--address", HEAD)
    assert f"{WORKER}  node" in listed.stdout, listed.stdout + listed.stderr
    assert listed.stdout.count("versions: ") == 1, listed.stdout  # both have the head's
    assert "asks for no token" not in listed.stderr

    token = worker.home / ".ray" / "auth_token"
    assert token.read_text() == (head.home / ".ray" / "auth_token").read_text()
    assert token.stat().st_mode & 0o077 == 0
    stranger = worker.run(
        "env", "RAY_AUTH_TOKEN_PATH=/none", sys.executable, "-m", "dfbench.cluster.cli", "nodes", "--address", HEAD
    )
    assert stranger.returncode == 2
    assert "asks for a token and there is none" in stranger.stderr

    down = head.dfbench("down", "--config", str(file))
    assert down.returncode == 0, down.stdout[-3000:]
    for machine in (head, worker):
        deadline = time.monotonic() + 120
        while (left := machine.run("ps", "-eo", "args").stdout) and ("raylet/raylet" in left or "gcs_server" in left):
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
