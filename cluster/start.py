"""How a Ray process is started on this machine: its environment, address, ports, labels and token.

Shared by the head (`dfbench up --here`) and the nodes (`dfbench join`).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dfbench.cluster import stack
from dfbench.cluster.head import parse_address, token_path
from dfbench.errors import ClusterError
from dfbench.workers import provenance, telemetry

PORTS = "6380-6479"
_TOO_SLOW = "timed out during startup"
HEALTH_CHECK = {
    # Three missed checks of 3 s, one each 2 s: a dead cable shows after about 15 s instead of Ray's 64 s. Much tighter
    # and a node that is merely busy is declared dead.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class Ports:
    """One range a node, so that one firewall rule opens it: six services, Ray Client (on a head), then the workers."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Ports:
        """`FIRST-LAST`. Raises ClusterError for anything else, and for a range with no room for workers."""
        first, _, last = text.partition("-")
        if not (first.isdecimal() and last.isdecimal()) or not 1024 <= int(first) <= int(last) < 65536:
            raise ClusterError(f"'{text}' is not a range of ports: write FIRST-LAST, such as {PORTS}.")
        if int(last) - int(first) < 15:
            raise ClusterError(f"the ports {text} are too few: a node needs 16 or more, such as {PORTS}.")
        return cls(int(first), int(last))

    def arguments(self) -> list[str]:
        """As `ray start` takes them."""
        services = (
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
        )
        named = [f"--{name}={self.first + place}" for place, name in enumerate(services)]
        return [*named, f"--min-worker-port={self.client + 1}", f"--max-worker-port={self.last}"]

    @property
    def client(self) -> int:
        """Port of Ray Client, which `ray start --head` starts unasked and which has no off switch."""
        return self.first + 6


def environment(auth: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every Ray process needs to be told: whether it asks for a token above all, which Ray otherwise guesses."""
    return {
        **base,
        # What the head's job server runs is found beside this Python, whatever the PATH of a service.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{base.get('PATH', os.defpath)}",
        **HEALTH_CHECK,
        "RAY_AUTH_MODE": "token" if auth else "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Each machine has a Python of its own; Ray must not rebuild the driver's on the others.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


def ray(*arguments: str) -> list[str]:
    """The `ray` command of this Python, wherever PATH points."""
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def run(command: list[str], environment: dict[str, str], clean: Callable[[], None]) -> None:
    """Run a `ray start` that returns; `clean` ends what a failed one left. Raises ClusterError with Ray's last line.

    Ray gives a node 30 s to come up and has no setting for it: on a machine that is busy now, a second try is due.
    """
    for last in (False, True):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not done.returncode:
            return
        clean()
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reason = said[-1].rstrip(".") if said else f"exit status {done.returncode}"
        if last or _TOO_SLOW not in reason:
            raise ClusterError(f"Ray did not start: {reason}.")


def head_command(address: str, dashboard_port: int, ports: Ports, extra: list[str]) -> list[str]:
    """`ray start --head` bound to a private address, its dashboard (for Ray Jobs) too."""
    host, _, port = address.rpartition(":")
    bound = [f"--node-ip-address={host}", f"--port={port}", f"--dashboard-host={host}"]
    return ray(
        "start",
        "--head",
        *bound,
        f"--dashboard-port={dashboard_port}",
        *_common(ports),
        f"--ray-client-server-port={ports.client}",
        *extra,
    )


def node_command(head: str, own: str, ports: Ports, extra: list[str]) -> list[str]:
    """`ray start` of a node of `head` that others reach at `own`."""
    return ray("start", f"--address={head}", f"--node-ip-address={own}", *_common(ports), *extra)


def _common(ports: Ports) -> list[str]:
    labels = stack.format_labels(node_labels())
    # The driver reads its workers' logs from files; a log monitor would only send them over the network.
    return [f"--labels={labels}", *ports.arguments(), "--include-log-monitor=false", "--disable-usage-stats"]


def node_labels() -> dict[str, str]:
    """This machine's labels: its versions and its device."""
    return {**stack.stack(), **device_label()}


def device_label() -> dict[str, str]:
    """The label that names this machine's device."""
    return {stack.DEVICE_LABEL: stack.label_value(device_name())}


def device_name() -> str:
    """The first NVIDIA device's name, else "cpu" and its model."""
    found = telemetry.devices()
    return found[0].name if found else f"cpu {provenance.cpu_model()}"


def own_address(head: str) -> str:
    """The address of this machine that others reach it at: that of the interface towards the head."""
    host, _, port = parse_address(head).rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))  # A datagram socket: nothing is sent.
        except OSError as error:
            raise ClusterError(f"there is no route to '{host}': check the address.") from error
        return str(probe.getsockname()[0])


def check_private(address: str, allow_public: bool) -> None:
    """Raise ClusterError for an address that the whole internet may reach, unless that is wanted."""
    host = address.rpartition(":")[0] or address
    try:
        public = ipaddress.ip_address(socket.gethostbyname(host)).is_global
    except OSError as error:
        raise ClusterError(f"'{host}' is no address of this network: write the head's private address.") from error
    if public and not allow_public:
        raise ClusterError(
            f"{host} is a public address, and Ray runs whatever code it is sent: write the address in your own network."
        )


def ensure_token() -> bool:
    """Make the cluster's token if this machine has none; True when it was made now. Only its owner may read it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return False
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if not path.read_text().strip():
            raise ClusterError(f"the token file {path} is empty: delete it and try again.") from None
        path.chmod(0o600)
        return False
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
    return True
