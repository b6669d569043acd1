"""The command line: parse, call, print. The only place that prints or exits.

Exit status: 0 fine; 1 a finding, or failed shards remain; 2 the request was wrong.
Each `cli_*.py` beside this file adds its commands to the one app; heavy imports stay inside the commands.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import sys

import typer

from dfbench import __version__
from dfbench.cluster import cli_analysis, cli_guard, cli_nodes, cli_replay, cli_run, cli_streams, cli_tools
from dfbench.errors import DfbenchError, UsageError

logger = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit status after Ctrl-C, by the custom of shells: 128 and the number of the signal."""

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
    cli_streams.open_streams()
    streams = sys.stdout, sys.stderr
    try:
        app()
    except UsageError as error:
        _say(str(error))
        sys.exit(2)
    except DfbenchError as error:
        _say(str(error))
        sys.exit(1)
    except SystemExit as ended:
        # Typer makes exit statuses of both: Ctrl-C is its 130, a broken pipe its 1 (and another stdout).
        # A command that chose this status itself has said what it means.
        if ended.code == INTERRUPTED and isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):
            _say("interrupted; run the same command again to go on where it stopped.")
        elif isinstance(broken := ended.__context__, BrokenPipeError):
            sys.stdout, sys.stderr = streams
            sys.exit(0 if cli_streams.reader_gone() else _refused(broken))
        raise
    except sqlite3.Error as error:
        logger.debug("the ledger", exc_info=True)
        _say(
            f"the run's ledger cannot be used ({error}): run the command again, and if that does not help, "
            "submit the sweep to a new directory."
        )
        sys.exit(1 if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY else 2)
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        _say("a path begins with '~' and there is no such home folder: write it in full.")
        sys.exit(2)
    except UnicodeError as error:
        logger.debug("not text", exc_info=True)
        _say(f"what was given is not UTF-8 text: {error}.")
        sys.exit(2)
    except OSError as error:
        logger.debug("the system refused", exc_info=True)
        cli_streams.give_up()
        sys.exit(_refused(error))


def _say(what: str) -> None:
    """What went wrong, in a sentence. The exit status says it too: a stream that takes nothing must not change that."""
    with cli_streams.unheard():
        typer.echo(f"dfbench: {what}", err=True)


_WRONG_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR)
"""What only another path would mend: the request was wrong."""


def _refused(error: OSError) -> int:
    """Say in one sentence what the system would not do; the exit status. `--verbose` shows where it happened."""
    if error.errno == errno.ENAMETOOLONG:
        _say("a path that was given is longer than the file system allows: write a shorter one.")
        return 2
    what = f"'{error.filename}': " if error.filename else ""
    _say(f"the system refused: {what}{error.strerror or error}.")
    return 2 if error.errno in _WRONG_PLACE else 1


if __name__ == "__main__":
    main()
