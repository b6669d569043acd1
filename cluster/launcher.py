"""`dfbench up` and `dfbench down`: a whole cluster from ray_config.yaml, or just the head on this machine.

`ray up` does the work; around it this module checks the file, makes the token, sets what Ray 2.60 needs, and waits
until every machine of the file is seen, because `ray up` itself returns when the head is up.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dfbench.cluster import processes, start, systemd
from dfbench.cluster.head import DEFAULT_PORT, Head, parse_address, read_head, shut_down, token_path
from dfbench.errors import ClusterError

CONFIG = "ray_config.yaml"
DASHBOARD_PORT = 8265
VISIBLE_WITHIN_S = 300.0
_PLACEHOLDERS = ipaddress.ip_network("192.0.2.0/24")
_START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")


@dataclass(frozen=True)
class Cluster:
    """What dfbench needs from a launcher file; `path` is the file itself."""

    path: Path
    head: str
    workers: tuple[str, ...]


def load_config(path: Path) -> Cluster:
    """Read and check a launcher file as `ray up` would, and for what would leave the cluster open or half started.

    Raises ClusterError naming what to write instead.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(
            f"there is no {path}: name the launcher file with --config, or start a head on this machine with --here."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(config, Mapping):
        raise ClusterError(f"{path} is not a launcher file: it needs `provider` with head_ip and worker_ips.")
    _check_schema(path, dict(config))
    provider = config["provider"]
    hosts = [str(provider["head_ip"]), *map(str, provider["worker_ips"])]
    _check_hosts(path, hosts)
    _check_auth(path, config)
    return Cluster(path, hosts[0], tuple(hosts[1:]))


def _check_schema(path: Path, config: dict[str, Any]) -> None:
    provider = config.get("provider")
    if not isinstance(provider, Mapping) or provider.get("type") != "local":
        raise ClusterError(f"{path}: provider.type must be local; dfbench starts workstations, not cloud machines.")
    for key, kind in (("head_ip", str), ("worker_ips", list)):
        if not isinstance(provider.get(key), kind):
            raise ClusterError(
                f"{path}: provider.{key} is missing: write the head's address and a list of the workers'."
            )
    import click
    import jsonschema
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    schema = Path(str(ray.autoscaler.__file__)).with_name("ray-schema.json")
    try:
        jsonschema.validate(config, json.loads(schema.read_text()))  # Filling in defaults trips over what this catches.
        validate_config(prepare_config(config))
    except jsonschema.ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path) or "the file"
        raise ClusterError(f"{path}: Ray refuses {where}: {error.message}.") from error
    except (ValueError, RuntimeError, click.ClickException) as error:
        raise ClusterError(f"{path}: Ray refuses it: {' '.join(str(error).split()).rstrip('.')}.") from error


def _check_hosts(path: Path, hosts: list[str]) -> None:
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            continue  # A host name, which ssh will resolve.
        if address in _PLACEHOLDERS:
            raise ClusterError(f"{path} still has the example address {host}: write your machines' own addresses.")
        if address.is_global:
            raise ClusterError(
                f"{path}: {host} is a public address, and Ray runs whatever code it is sent: write a private one."
            )
    if len(set(hosts)) < len(hosts):
        raise ClusterError(f"{path} names a machine twice: head_ip and worker_ips must all differ.")


def _check_auth(path: Path, config: Mapping[str, Any]) -> None:
    for key in _START_COMMANDS:
        if not any("RAY_AUTH_MODE=" in command for command in config.get(key, ())):
            raise ClusterError(
                f"{path}: {key} does not set RAY_AUTH_MODE, which Ray then guesses: write "
                "`export RAY_AUTH_MODE=token;` before `ray start`."
            )


def up(path: Path, say: Callable[[str], None], wait_s: float = VISIBLE_WITHIN_S) -> Head:
    """Start a launcher file's cluster and wait until every machine is seen. Raises ClusterError naming the missing."""
    cluster = load_config(path)
    if start.ensure_token():
        say(f"made a token for this cluster: {token_path()}")
    _ray("up", cluster)
    return _await_nodes(cluster, say, wait_s)


def down(path: Path, say: Callable[[str], None]) -> None:
    """End the cluster of a launcher file on every machine, those that joined by hand too.

    `ray down` of Ray 2.60 ends the head of a local cluster and leaves its workers running, so they are told first.
    """
    cluster = load_config(path)
    try:
        head = read_head(f"{cluster.head}:{DEFAULT_PORT}")
    except ClusterError as error:
        say(f"no node was told: {error}")
    else:
        for node in head.alive:
            if not node.is_head:
                told = shut_down(node, head)
                say(f"{node.name}: " + ("ended" if told else "out of reach; its Ray ends a minute after the head"))
    _ray("down", cluster)


def _ray(verb: str, cluster: Cluster) -> None:
    arguments = ["-y", *(["--no-config-cache", "--disable-usage-stats"] if verb == "up" else []), str(cluster.path)]
    # Autoscaler v2 counts the head as one of the local provider's workers, and so starts one too few.
    environment = {**start.environment(auth=True), "RAY_UP_enable_autoscaler_v2": "0"}
    status = subprocess.run(start.ray(verb, *arguments), env=environment, check=False).returncode
    if status:
        raise ClusterError(f"`ray {verb}` ended with status {status}: its own message is above.")


def _await_nodes(cluster: Cluster, say: Callable[[str], None], wait_s: float) -> Head:
    address = f"{cluster.head}:{DEFAULT_PORT}"
    wanted = 1 + len(cluster.workers)
    deadline, seen = time.monotonic() + wait_s, -1
    while True:
        head = read_head(address)
        if len(head.alive) != seen:
            seen = len(head.alive)
            say(f"{seen} of {wanted} nodes are up")
        if seen >= wanted:
            return head
        if time.monotonic() > deadline:
            here = {node.address for node in head.alive} | {node.hostname for node in head.alive}
            missing = ", ".join(host for host in cluster.workers if host not in here)
            raise ClusterError(f"the head is up but {missing} did not come: try `ssh` from the head to it by hand.")
        time.sleep(0.5)


@dataclass(frozen=True)
class HeadOptions:
    """A head on this machine. `address` None = the one towards the network; `open` = no token; `extra` is for Ray."""

    address: str | None = None
    port: int = DEFAULT_PORT
    dashboard_port: int = DASHBOARD_PORT
    ports: str = start.PORTS
    open: bool = False
    public: bool = False
    block: bool = False
    extra: tuple[str, ...] = ()


def up_here(options: HeadOptions, say: Callable[[str], None]) -> str:
    """Start a head on this machine, labelled with its versions and asking for a token; returns its address."""
    host = options.address or start.own_address("192.0.2.1")
    start.check_private(host, options.public)
    if processes.head_processes(options.port):
        raise ClusterError(
            f"a head serves port {options.port} of this machine already: end it, or take another --port."
        )
    address = parse_address(f"{host}:{options.port}")
    if not options.open and start.ensure_token():
        say(f"made a token for this cluster: {token_path()}")
    command = start.head_command(address, options.dashboard_port, start.Ports.parse(options.ports), list(options.extra))
    environment = start.environment(auth=not options.open)
    if options.block:
        os.execvpe(command[0], [*command, "--block"], environment)
    start.run(command, environment, lambda: _end_head(options.port))
    return address


def systemd_unit(options: HeadOptions) -> str:
    """A unit that keeps a head running on this machine. Its token must be there first: a service asks nobody."""
    host = options.address or start.own_address("192.0.2.1")
    start.check_private(host, options.public)
    if not options.open:
        start.ensure_token()
    arguments = ["up", "--here", "--block", "--address", host, "--port", str(options.port)]
    arguments += ["--dashboard-port", str(options.dashboard_port), "--ports", options.ports]
    arguments += [flag for flag, wanted in (("--open", options.open), ("--public", options.public)) if wanted]
    arguments += [f"--ray={extra}" for extra in options.extra]
    return systemd.unit("dfbench-head", f"dfbench head at {host}:{options.port}", arguments, auth=not options.open)


def down_here(port: int, say: Callable[[str], None]) -> None:
    """End the head that serves this port on this machine, and nothing else of Ray."""
    ending = f":{port}"
    heads = [(raylet, at) for raylet, at in processes.raylets(head=True, labelled=True) if at.endswith(ending)]
    if not heads:
        raise ClusterError(f"no head that dfbench started serves port {port} of this machine: there is nothing to end.")
    _end_head(port)
    say(f"ended the head at {heads[0][1]}")


def _end_head(port: int) -> None:
    """End the node first, which drains, and then what serves it."""
    processes.end([raylet for raylet, at in processes.raylets(head=True) if at.endswith(f":{port}")], patience_s=35)
    processes.end(processes.head_processes(port), patience_s=3)
