"""Arguments and options that mean the same wherever a command has them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Run directory or its name under runs/; the newest by default.")
]
Address = Annotated[
    str, typer.Option(help="Ray cluster to run on: auto, or host:port of its head. Default: a Ray on this machine.")
]
Elsewhere = Annotated[
    str, typer.Option("--address", help="Ask the cluster's head, host:port or auto, about a run that it drives.")
]
HereOrElsewhere = Annotated[
    str,
    typer.Option(
        "--address",
        help="host:port: on that cluster's head, a run that it drives. auto: a run that lies here, on the cluster of "
        "this machine. Default: on a Ray on this machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def asks_head(address: str) -> bool:
    """Whether an `Elsewhere` names another machine's run."""
    return address not in ("", "local")


def elsewhere(address: str, say: Callable[[str], None] = typer.echo, *, drives: bool = False) -> None:
    """Where a head's address is given, run this very command there and exit with its status.

    `drives`: it needs a cluster itself, so that `auto` is where, and not of what.
    """
    from dfbench.cluster import remote

    if asks_head(address) and not (drives and address == "auto"):
        raise typer.Exit(remote.forward(sys.argv[1:], address, say, drives=drives))
