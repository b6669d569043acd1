"""Commands: up, down, nodes, join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dfbench.cluster.cli_options import AsJson

if TYPE_CHECKING:
    from dfbench.cluster.nodes import NodeReport

_CONFIG = typer.Option(Path("ray_config.yaml"), "--config", help="Launcher file of the cluster.")
_HERE = typer.Option(False, "--here", help="Only a head, on this machine; others then `dfbench join` it.")
_PORTS = typer.Option("6380-6479", help="Range of ports for this node's services and workers.")
_BLOCK = typer.Option(False, "--block", help="Stay in the foreground until the node ends.")
_RAY = typer.Option([], "--ray", help="Another option for `ray start`, such as --ray=--num-gpus=1.")


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(up)
    app.command()(down)
    app.command()(nodes)
    app.command()(join)


def up(
    config: Path = _CONFIG,
    here: bool = _HERE,
    address: str = typer.Option("", help="With --here: the private address others reach this machine at."),
    port: int = typer.Option(6379, help="With --here: the head's port."),
    dashboard_port: int = typer.Option(8265, help="With --here: port for submitting from other machines."),
    ports: str = _PORTS,
    open_: bool = typer.Option(False, "--open", help="With --here: ask nobody for a token. Anyone can then run code."),
    public: bool = typer.Option(False, "--public", help="With --here: allow an address the internet may reach."),
    systemd: bool = typer.Option(False, "--systemd", help="With --here: print a unit that starts it at every boot."),
    block: bool = _BLOCK,
    ray: list[str] = _RAY,
) -> None:
    """Start the cluster of ray_config.yaml, or a head on this machine, with a token that all must show."""
    from dfbench.cluster import launcher
    from dfbench.cluster.head import token_path

    if not here:
        head = launcher.up(config, typer.echo)
        typer.echo(f"up: {head.address}. Next: dfbench nodes --address {head.address}")
        return
    options = launcher.HeadOptions(
        address or None, port, dashboard_port, ports, open=open_, public=public, block=block, extra=tuple(ray)
    )
    if systemd:
        typer.echo(launcher.systemd_unit(options), nl=False)
        return
    started = launcher.up_here(options, typer.echo)
    copy = "" if open_ else f"copy {token_path()} to ~/.ray/auth_token there, then "
    typer.echo(f"up: {started}. On each workstation: {copy}dfbench join {started}")
    typer.echo("to end it: dfbench down --here" + (f" --port {port}" if port != 6379 else ""))


def down(
    config: Path = _CONFIG,
    here: bool = typer.Option(False, "--here", help="Only the head on this machine."),
    port: int = typer.Option(6379, help="With --here: the head's port."),
) -> None:
    """End the cluster of ray_config.yaml, or the head on this machine."""
    from dfbench.cluster import launcher

    if here:
        launcher.down_here(port, typer.echo)
    else:
        launcher.down(config, typer.echo)


def join(
    head: str = typer.Argument("", help="The head's address, host or host:port."),
    model: str = typer.Option("", help="Model that this node must have or be able to get (ID, ID@REVISION or PATH)."),
    dtype: str = typer.Option("bfloat16", help="Dtype that the model must fit in."),
    no_model: bool = typer.Option(False, "--no-model", help="Do not look for a model."),
    node_address: str = typer.Option("", help="Address that others reach this machine at, if not the obvious one."),
    ports: str = _PORTS,
    open_: bool = typer.Option(False, "--open", help="Join a head that asks for no token."),
    check: bool = typer.Option(False, "--check", help="Only check; start nothing."),
    systemd: bool = typer.Option(False, "--systemd", help="Print a unit that joins at every boot; start nothing."),
    leave: bool = typer.Option(False, "--leave", help="Leave: end this machine's node and nothing else."),
    block: bool = _BLOCK,
    ray: list[str] = _RAY,
) -> None:
    """Make this workstation a node of HEAD, once its versions, device, memory and model are right for it."""
    from dfbench.cluster import join as joining
    from dfbench.errors import ClusterError

    if leave:
        joining.leave(head or None, typer.echo)
        return
    if not head:
        raise ClusterError("name the head to join: dfbench join HEAD, such as 192.168.1.10.")
    options = joining.JoinOptions(
        None if no_model else _model(model, dtype), ports, node_address or None, open_, block, tuple(ray)
    )
    if systemd:
        typer.echo(joining.systemd_unit(head, options), nl=False)
    elif check:
        joining.check_all(head, options, typer.echo)
        typer.echo("this machine can join.")
    else:
        typer.echo(joining.join(head, options, typer.echo))


def nodes(
    address: str = typer.Option("", help="The head; default: RAY_ADDRESS, else this machine's own."),
    labels: bool = typer.Option(False, "--labels", help="Print this machine's labels for `ray start --labels`."),
    announce: bool = typer.Option(
        False, "--announce", help="Write this machine's versions to the head, which has none."
    ),
    as_json: AsJson = False,
    format_: str = typer.Option("", "--format", hidden=True),
) -> None:
    """List the cluster node by node: device, memory, versions, work, and what is wrong with each."""
    from dfbench.cluster import head as heads
    from dfbench.cluster import nodes as listing
    from dfbench.cluster import stack, start
    from dfbench.errors import ClusterError, unknown

    if format_ not in ("", "table", "json"):
        raise ClusterError(unknown("format", format_, ("table", "json")))
    if labels:
        typer.echo(stack.format_labels(start.node_labels()))
        return
    at = heads.parse_address(address or heads.default_address())
    if announce:
        heads.announce(at, stack.stack())
        typer.echo(f"{at} now says that nodes need {', '.join(stack.phrases(stack.stack()))}.")
        return
    head = heads.read_head(at)
    reports = listing.report(head)
    warnings = listing.warnings(head)
    if as_json or format_ == "json":
        document = {"address": at, "open": head.open, "warnings": warnings, "nodes": [r.as_json() for r in reports]}
        typer.echo(json.dumps(document, indent=2))
    else:
        for line in _table(reports):
            typer.echo(line)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    if warnings or any(report.problems for report in reports):
        raise typer.Exit(1)


def _model(text: str, dtype: str) -> Any:
    from dfbench.workers.spec import TargetSpec

    if not text:
        return TargetSpec(dtype=dtype)
    name, _, revision = text.partition("@")
    return TargetSpec(model=name, revision=revision or None, dtype=dtype)


def _table(reports: list[NodeReport]) -> list[str]:
    """Aligned columns, then each node's versions once and its problems."""
    rows = [("node", "role", "state", "device", "memory free", "device memory free", "jobs/s", "shard")]
    rows += [
        (
            report.name,
            report.role,
            report.state,
            f"{report.devices} x {report.device}" if report.devices > 1 else report.device,
            _share(report.memory_free, report.memory_total),
            _share(report.device_memory_free, report.device_memory_total),
            "-" if report.rate is None else f"{report.rate:.2f}",
            " ".join(report.shards) or "-",
        )
        for report in reports
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *_versions(reports), *(f"{r.name}: {problem}" for r in reports for problem in r.problems)]


def _versions(reports: list[NodeReport]) -> list[str]:
    """One line for each set of versions; a healthy cluster has one."""
    from dfbench.cluster import stack

    sets: dict[str, list[str]] = {}
    for report in reports:
        if report.versions:
            sets.setdefault(", ".join(stack.phrases(report.versions)), []).append(report.name)
    if len(sets) == 1:
        return [f"versions: {next(iter(sets))}"]
    return [f"versions of {', '.join(names)}: {versions}" for versions, names in sets.items()]


def _share(free: int | None, total: int | None) -> str:
    return "-" if free is None or total is None else f"{free / 1e9:.1f} of {total / 1e9:.1f} GB"
