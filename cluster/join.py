"""`dfbench join HEAD`: make this workstation a node, after checking all that would spoil a sweep later.

    read the head ─► versions ─► device, memory ─► model ─► ray start with labels, token, ports ─► wait until it is seen

Everything is checked before anything starts, and every objection is reported at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from dfbench.cluster import model_check, processes, stack, start, systemd
from dfbench.cluster.head import Head, is_loopback, parse_address, read_head
from dfbench.errors import ClusterError, ModelError
from dfbench.workers import telemetry
from dfbench.workers.spec import EMBEDDED_MODEL, TargetSpec

SPARE_MEMORY = 2 * 10**9
"""Host memory that a node needs beside the model: Ray, the actor, the object store's first bytes."""
VISIBLE_WITHIN_S = 30.0
LEAVE_PATIENCE_S = 35.0


@dataclass(frozen=True)
class JoinOptions:
    """What a user may say. `model` None = do not check for one; `open` = join a head that asks for no token."""

    model: TargetSpec | None = field(default_factory=TargetSpec)
    ports: str = start.PORTS
    address: str | None = None
    open: bool = False
    block: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `problem` says what keeps this machine out, None = fine."""

    name: str
    seen: str
    problem: str | None = None


def join(head_address: str, options: JoinOptions, say: Callable[[str], None]) -> str:
    """Check this machine against the head, start Ray, wait until the head sees it. Returns how to leave.

    Raises ClusterError with every objection in one sentence; then nothing was started. With `block` it never returns:
    this process becomes Ray's.
    """
    head = check_all(head_address, options, say)
    own = options.address or start.own_address(head.address)
    command = start.node_command(head.address, own, start.Ports.parse(options.ports), list(options.extra))
    environment = start.environment(auth=not head.open)
    if options.block:
        os.execvpe(command[0], [*command, "--block"], environment)
    known = {node.node_id for node in head.nodes}
    start.run(command, environment, lambda: processes.end(_here(head, own), LEAVE_PATIENCE_S))
    _wait_until_seen(head, known)
    return f"to leave: dfbench join --leave {head.address}"


def check_all(head_address: str, options: JoinOptions, say: Callable[[str], None]) -> Head:
    """Read the head and make every check. Raises ClusterError with all objections in one sentence."""
    head = read_head(head_address)
    checks = check(head, options)
    for one in checks:
        say(f"{'no ' if one.problem else 'ok '} {one.name}: {one.seen}")
    if objections := [one.problem for one in checks if one.problem]:
        raise ClusterError(f"this machine cannot join {head.address}: {'; '.join(objections)}.")
    return head


def check(head: Head, options: JoinOptions) -> list[Check]:
    """Every check, in the order a user would make them."""
    found = [_check_door(head, options), _check_versions(head), _check_here(head, options)]
    found.append(_check_memory())
    if options.model is not None:
        found.append(_check_model(options.model))
    return found


def _check_door(head: Head, options: JoinOptions) -> Check:
    if not head.open:
        return Check("head", f"{head.address} asks for a token, and ours is right")
    if is_loopback(head.address) or options.open:
        return Check("head", f"{head.address} is open: whoever reaches it can run code on every node")
    return Check(
        "head",
        f"{head.address} asks for no token",
        "the head is open, so whoever reaches it could run code on this machine: start it with `dfbench up`, which "
        "makes a token, or accept that with --open",
    )


def _check_versions(head: Head) -> Check:
    mine = stack.stack()
    theirs = head_versions(head)
    if "dfbench/dfbench" not in theirs:
        silent = (
            "the head does not say which versions it has: on the head, run `dfbench nodes --announce`, or start it "
            "with `dfbench up`"
        )
        return Check("versions", "unknown on the head", silent)
    objections = stack.differences(mine, theirs)
    problem = f"{'; '.join(objections)}: install what the head has" if objections else None
    return Check("versions", ", ".join(stack.phrases(mine)), problem)


def head_versions(head: Head) -> dict[str, str]:
    """The versions that nodes must match: those the head's node is labelled with, or that were announced."""
    labelled = stack.versions(head.node.labels) if head.node else {}
    return labelled if "dfbench/dfbench" in labelled else stack.versions(head.announced)


def _check_here(head: Head, options: JoinOptions) -> Check:
    """Whether this machine is a node of this head already, at the address that it would have."""
    here = _here(head, options.address or start.own_address(head.address))
    if here:
        return Check("node", "already joined", f"it is a node already (process {here[0].pid})")
    return Check("node", f"{start.device_name()}, not joined yet")


def _here(head: Head, own: str) -> list[psutil.Process]:
    """The nodes of this head that run on this machine at this address."""
    if own == "127.0.0.1" and head.node:
        own = head.node.address  # What Ray makes of it.
    return [
        process
        for process, address in processes.raylets(head=False)
        if address == gcs_address(head) and processes.own_address(process) == own
    ]


def _check_memory() -> Check:
    free = psutil.virtual_memory().available
    problem = None
    if free < SPARE_MEMORY:
        problem = (
            f"only {free / 1e9:.1f} GB of memory are free and a node needs {SPARE_MEMORY / 1e9:.0f} GB: close something"
        )
    gpus = [
        f"{device.name} {device.memory_free / 1e9:.1f} of {device.memory_total / 1e9:.1f} GB free"
        for device in telemetry.devices()
        if device.memory_free is not None and device.memory_total is not None
    ]
    return Check("memory", ", ".join([f"{free / 1e9:.1f} GB free", *gpus]), problem)


def _check_model(spec: TargetSpec) -> Check:
    """Whether the model is here, or can be had, and fits the device."""
    try:
        seen, problem = model_check.fit(spec, model_check.availability(spec))
    except ModelError as error:
        return Check("model", spec.model, str(error).rstrip("."))
    return Check("model", seen, problem)


def leave(head_address: str | None, say: Callable[[str], None]) -> None:
    """End this machine's node, and nothing else: running work is given up and done again elsewhere."""
    nodes = list(processes.raylets(head=False))
    wanted = parse_address(head_address) if head_address else None
    if wanted is not None:
        aliases = _aliases(wanted)
        nodes = [(process, address) for process, address in nodes if address in aliases]
    if not nodes:
        raise ClusterError(f"this machine is no node{f' of {wanted}' if wanted else ''}: there is nothing to leave.")
    if len({address for _, address in nodes}) > 1:
        listed = ", ".join(sorted({address for _, address in nodes}))
        raise ClusterError(f"this machine is a node of several heads: name one of {listed}.")
    processes.end([process for process, _ in nodes], LEAVE_PATIENCE_S)
    say(f"left {nodes[0][1]}")


def systemd_unit(head_address: str, options: JoinOptions) -> str:
    """A unit that joins at every boot and again whenever the node ends."""
    head = parse_address(head_address)
    arguments = ["join", head, "--block", "--ports", options.ports]
    if options.open:
        arguments.append("--open")
    if options.address:
        arguments += ["--node-address", options.address]
    arguments += ["--no-model"] if options.model is None else _model_arguments(options.model)
    arguments += [f"--ray={extra}" for extra in options.extra]
    return systemd.unit("dfbench-node", f"dfbench node of {head}", arguments, auth=not options.open)


def _model_arguments(spec: TargetSpec) -> list[str]:
    if spec.model == EMBEDDED_MODEL:
        return []
    return ["--model", f"{spec.model}@{spec.revision}" if spec.revision else spec.model]


def _wait_until_seen(head: Head, known: set[str]) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while time.monotonic() < deadline:
        now = read_head(head.address)
        if any(node.alive and node.node_id not in known for node in now.nodes):
            return
        time.sleep(0.5)
    raise ClusterError(f"Ray started here, but {head.address} does not see this node: open the ports in the firewall.")


def gcs_address(head: Head) -> str:
    """The head's address as its nodes' processes name it: Ray turns loopback addresses into real ones."""
    host = head.node.address if head.node else head.address.rpartition(":")[0]
    return f"{host}:{head.address.rpartition(':')[2]}"


def _aliases(address: str) -> set[str]:
    try:
        return {address, gcs_address(read_head(address))}
    except ClusterError:
        return {address}  # The head may be gone; its nodes can be ended all the same.
