"""The command line: parse, call, print. The only place that prints or exits.

Exit status: 0 fine; 1 a finding, or failed shards remain; 2 the request was wrong.
Each `cli_*.py` beside this file adds its commands to the one app; heavy imports stay inside the commands.
"""

from __future__ import annotations

import logging
import os
import sys

import typer

from dfbench import __version__
from dfbench.cluster import cli_analysis, cli_guard, cli_nodes, cli_replay, cli_run, cli_tools
from dfbench.errors import DfbenchError, UsageError

app = typer.Typer(
    name="dfbench",
    help="Benchmark draft-free speculative decoding: sweep → Ray → Parquet → SQL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log to the terminal, debug messages included."),
) -> None:
    if version:
        typer.echo(f"dfbench {__version__}")
        raise typer.Exit
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


for commands in (cli_run, cli_analysis, cli_guard, cli_replay, cli_nodes, cli_tools):
    commands.register(app)


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        app()
    except UsageError as error:
        typer.echo(f"dfbench: {error}", err=True)
        sys.exit(2)
    except DfbenchError as error:
        typer.echo(f"dfbench: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("dfbench: interrupted; run the same command again to go on where it stopped.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
