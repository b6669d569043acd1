"""What commands show of tables: on a terminal of some width, or on a page where the output goes elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console


def screen() -> Console:
    """The terminal; a file or pipe has no width, and a table cut at 80 columns would lose figures."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=200)


def show(answer: pa.Table) -> None:
    """Print a query's answer for people; what an `explain` drew as it is."""
    from dfbench.analysis.query import plan_text, terminal

    if (plan := plan_text(answer)) is not None:
        typer.echo(plan)
        return
    there = screen()
    drawn, note = terminal(answer, there.width)
    there.print(drawn)
    typer.echo(note)
