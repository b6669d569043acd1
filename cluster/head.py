"""What a cluster's head tells whoever asks: its nodes, its versions, and whether it asks for a token at all.

Read over gRPC, from the same service that `ray start` talks to, so that neither membership nor `ray.init` is needed:
a workstation is compared with the head *before* it joins, and a laptop lists nodes without becoming one. Ray's own
client is not used because it ends the whole process on an unreadable token file and waits 40 s for a head that is not
there.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from dfbench.cluster.processes import raylets
from dfbench.errors import ClusterError

DEFAULT_PORT = 6379
NAMESPACE = b"dfbench"
STACK_KEY = b"stack"
NOTICES = b"driver:"
"""What drivers say about their work is under this and their Ray job. See `notice`."""
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Node:
    """One node as the head knows it. `resources` are Ray's totals; `reason` says why a dead node is dead."""

    node_id: str
    name: str
    address: str
    hostname: str
    port: int
    alive: bool
    is_head: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    started_ms: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Head:
    """A cluster's head: `open` = it answers without a token. `announced` are versions written by `nodes --announce`;
    `notices` what the drivers at work say, see `notice`."""

    address: str
    open: bool
    nodes: tuple[Node, ...]
    ray: str | None = None
    python: str | None = None
    dashboard: str | None = None
    announced: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[Mapping[str, Any], ...] = ()

    @property
    def node(self) -> Node | None:
        """The head's own node, None while it has none."""
        return next((node for node in self.nodes if node.is_head and node.alive), None)

    @property
    def alive(self) -> list[Node]:
        """The nodes that are up, the head first."""
        return sorted((node for node in self.nodes if node.alive), key=lambda node: (not node.is_head, node.address))


def parse_address(text: str) -> str:
    """`host[:port]` with Ray's port filled in. Raises ClusterError for anything else."""
    host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("["):
        host, _, rest = host.partition("]")
        host, port = host + "]", rest.lstrip(":") or port
    elif host.count(":") == 1:
        host, port = host.split(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(
            f"'{text}' is not the address of a head: write host or host:port, such as 192.168.1.10:6379."
        )
    return f"{host}:{port}"


def auth_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The cluster's token, from where Ray takes it: RAY_AUTH_TOKEN, or the file at `token_path`."""
    if token := environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    try:
        return token_path(environ).read_text().strip() or None
    except OSError:
        return None


def token_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that holds the token on this machine."""
    return Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def default_address(environ: Mapping[str, str] = os.environ) -> str:
    """The head that this machine belongs to: RAY_ADDRESS, else that of the Ray node running here, else loopback."""
    named = environ.get("RAY_ADDRESS", "")
    if named and "://" not in named and named not in ("auto", "local"):
        return named
    here = {address for head in (True, False) for _, address in raylets(head, labelled=True)}
    return here.pop() if len(here) == 1 else "127.0.0.1"


def own_cluster(environ: Mapping[str, str] = os.environ) -> str:
    """What `auto` means here: RAY_ADDRESS, else the head of this machine's one Ray node, else "auto" for Ray to tell.

    Raises ClusterError where nodes of several clusters run: Ray would take the one that was started last.
    """
    if environ.get("RAY_ADDRESS", "auto") not in ("auto", "local", ""):
        return environ["RAY_ADDRESS"]
    found: set[str] = set()
    for labelled in (True, False):
        found = found or {address for head in (True, False) for _, address in raylets(head, labelled=labelled)}
    if len(found) > 1:
        raise ClusterError(
            f"nodes of several Ray clusters run on this machine ({', '.join(sorted(found))}): write --address with the "
            "head of the one that is meant."
        )
    return found.pop() if found else "auto"


def is_loopback(address: str) -> bool:
    """Whether `host:port` can only be reached from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def read_head(address: str, token: str | None = None) -> Head:
    """Ask the head at `address`, first without a token and then with it: so an open head shows.

    Raises ClusterError when nothing answers there, or when the head wants a token that this machine does not have.
    """
    address = parse_address(address)
    with _Service(address) as service:
        try:
            return _describe(service, address, open_=True)
        except PermissionError:
            pass
        service.token = token if token is not None else auth_token()
        try:
            return _describe(service, address, open_=False)
        except PermissionError as error:
            raise ClusterError(_no_token(address, service.token)) from error


def announce(address: str, stack: Mapping[str, str], token: str | None = None) -> None:
    """Write this machine's versions to the head, for one that was started without dfbench's labels."""
    head = read_head(address, token)
    with _Service(head.address, None if head.open else token or auth_token()) as service:
        service.put(STACK_KEY, json.dumps(dict(stack), sort_keys=True).encode())


def shut_down(node: Node, head: Head, token: str | None = None) -> bool:
    """Tell a node to end its Ray, from wherever its port can be reached; whether it answered."""
    with _Service(f"{node.address}:{node.port}", None if head.open else token or auth_token()) as service:
        try:
            service.shut_down_node()
        except (ClusterError, PermissionError):
            return False
    return True


def _no_token(address: str, token: str | None) -> str:
    if token is None:
        return (
            f"the head at {address} asks for a token and there is none at {token_path()}: copy the head's "
            "~/.ray/auth_token there."
        )
    return f"the head at {address} refuses the token of this machine: copy ~/.ray/auth_token from the head once more."


def _describe(service: _Service, address: str, open_: bool) -> Head:
    nodes = tuple(sorted((_node(raw) for raw in service.nodes()), key=lambda node: node.started_ms))
    metadata = json.loads(service.get(b"CLUSTER_METADATA", b"cluster") or b"{}")
    dashboard = service.get(b"dashboard", b"dashboard") or service.get(b"dashboard", b"")
    return Head(
        address,
        open_,
        nodes,
        ray=metadata.get("ray_version"),
        python=metadata.get("python_version"),
        dashboard=dashboard.decode() if dashboard else None,
        announced=json.loads(service.get(STACK_KEY, NAMESPACE) or b"{}"),
        notices=tuple(_notices(service)),
    )


def _notices(service: _Service) -> Iterator[Mapping[str, Any]]:
    """What the drivers wrote whose Ray jobs are not over: one that was killed leaves its last words behind."""
    keys = service.keys(NOTICES)
    at_work = service.live_jobs() if keys else set()
    for key in keys:
        if key.removeprefix(NOTICES).decode(errors="replace") in at_work and (text := service.get(key, NAMESPACE)):
            yield json.loads(text)


def _node(raw: Any) -> Node:
    alive = raw.state == 0
    return Node(
        node_id=raw.node_id.hex(),
        name=raw.node_name or raw.node_manager_address,
        address=raw.node_manager_address,
        hostname=raw.node_manager_hostname,
        port=raw.node_manager_port,
        alive=alive,
        is_head=raw.is_head_node,
        labels=dict(raw.labels),
        resources=dict(raw.resources_total),
        started_ms=raw.start_time_ms,
        reason="" if alive else raw.death_info.reason_message,
    )


class _Service:
    """The head's gRPC service. PermissionError = it wants another token; ClusterError = nobody answers."""

    def __init__(self, address: str, token: str | None = None) -> None:
        # Untyped, generated and slow to import: all three reasons to take them as they come.
        grpc: Any = import_module("grpc")
        self._grpc = grpc
        self._messages: Any = import_module("ray.core.generated.gcs_service_pb2")
        self._stubs: Any = import_module("ray.core.generated.gcs_service_pb2_grpc")
        self.address, self.token = address, token
        # Inside a private network a proxy from the environment is never the way to the head.
        self._channel = grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))

    def __enter__(self) -> _Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def nodes(self) -> list[Any]:
        stub = self._stubs.NodeInfoGcsServiceStub(self._channel)
        return list(self._call(stub.GetAllNodeInfo, self._messages.GetAllNodeInfoRequest()).node_info_list)

    def get(self, key: bytes, namespace: bytes) -> bytes:
        stub = self._stubs.InternalKVGcsServiceStub(self._channel)
        request = self._messages.InternalKVGetRequest(namespace=namespace, key=key)
        return bytes(self._call(stub.InternalKVGet, request).value)

    def put(self, key: bytes, value: bytes) -> None:
        stub = self._stubs.InternalKVGcsServiceStub(self._channel)
        request = self._messages.InternalKVPutRequest(namespace=NAMESPACE, key=key, value=value, overwrite=True)
        self._call(stub.InternalKVPut, request)

    def keys(self, prefix: bytes) -> list[bytes]:
        stub = self._stubs.InternalKVGcsServiceStub(self._channel)
        request = self._messages.InternalKVKeysRequest(prefix=prefix, namespace=NAMESPACE)
        return sorted(self._call(stub.InternalKVKeys, request).results)

    def live_jobs(self) -> set[str]:
        """The ids of Ray's jobs that are not over."""
        stub = self._stubs.JobInfoGcsServiceStub(self._channel)
        request = self._messages.GetAllJobInfoRequest(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        return {job.job_id.hex() for job in self._call(stub.GetAllJobInfo, request).job_info_list if not job.is_dead}

    def shut_down_node(self) -> None:
        messages: Any = import_module("ray.core.generated.node_manager_pb2")
        stubs: Any = import_module("ray.core.generated.node_manager_pb2_grpc")
        stub = stubs.NodeManagerServiceStub(self._channel)
        self._call(stub.ShutdownRaylet, messages.ShutdownRayletRequest(graceful=True))

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        metadata = [("authorization", f"Bearer {self.token}")] if self.token else []
        try:
            return method(request, timeout=TIMEOUT_S, metadata=metadata)
        except self._grpc.RpcError as error:
            if error.code() == self._grpc.StatusCode.UNAUTHENTICATED:
                raise PermissionError(error.details()) from error
            raise ClusterError(
                f"no Ray head answers at {self.address}: check the address and the firewall, and that it runs."
            ) from error
