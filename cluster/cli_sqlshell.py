"""The prompt of `dfbench sql`: history, completion, `.views`, `.schema`, `.quit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from dfbench.analysis.query import listed, names, needs_more, run_query
from dfbench.cluster.cli_screen import show
from dfbench.errors import QueryError, unknown

if TYPE_CHECKING:
    import duckdb

HELP = (
    ".views lists the views, .schema VIEW its columns, .quit ends; a view's name shows it, anything else is a query. "
    "An empty line sends what is not complete."
)


def shell(con: duckdb.DuckDBPyConnection) -> None:
    """Answer queries until the person has had enough."""
    session: PromptSession[str] = PromptSession(
        "dfbench> ", history=_history(), completer=_completer(), multiline=True, key_bindings=_keys(con),
        prompt_continuation="    ...> ",
    )  # fmt: skip
    typer.echo(HELP)
    while True:
        try:
            line = session.prompt().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line in (".quit", ".exit", ".q"):
            return
        if line:
            try:
                respond(con, line)
            except QueryError as error:
                typer.echo(str(error), err=True)
            except KeyboardInterrupt:
                typer.echo("the query was stopped.", err=True)


def respond(con: duckdb.DuckDBPyConnection, line: str) -> None:
    """Answer one line of the prompt. Raises QueryError."""
    command, _, argument = line.partition(" ")
    if line in names():
        show(run_query(con, f"from {line}"))
    elif not line.startswith("."):
        show(run_query(con, line))
    elif command == ".views":
        for view in listed():
            typer.echo(f"{view.name}: {view.meaning}")
    elif command == ".schema":
        _schema(argument.strip())
    else:
        typer.echo(HELP)


def _schema(name: str) -> None:
    known = {view.name: view for view in listed()}
    if name and name not in known:
        raise QueryError(unknown("view", name, known))
    for view in [known[name]] if name else known.values():
        typer.echo(f"{view.name}: {view.meaning}")
        for column in view.columns:
            typer.echo(f"  {column.name:<24} {column.type:<10} {column.note}".rstrip())


def _history() -> History:
    """History in the user's state folder, or none where there is no such folder or it cannot be written."""
    try:
        file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dfbench" / "sql_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except (OSError, RuntimeError):  # A RuntimeError where nobody's home is known.
        return InMemoryHistory()
    return FileHistory(str(file))


def _completer() -> WordCompleter:
    words = {column.name for view in listed() for column in view.columns} | {view.name for view in listed()}
    return WordCompleter([*sorted(words), ".views", ".schema", ".quit"])


def _keys(con: duckdb.DuckDBPyConnection) -> KeyBindings:
    """Enter sends what is complete, or was followed by an empty line; otherwise it begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text.strip()
        empty_line = not buffer.document.current_line.strip()
        if empty_line or text.startswith(".") or not needs_more(con, text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    return keys
