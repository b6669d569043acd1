"""Command: guard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfbench.cluster import cli_streams
from dfbench.cluster.cli_options import HereOrElsewhere, RunArgument, elsewhere

if TYPE_CHECKING:
    from dfbench.analysis.guard import Verdict


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(guard)


def guard(
    run: RunArgument = None,
    join_only: Annotated[
        bool, typer.Option("--join-only", help="Judge the recorded logits alone, without loading the model.")
    ] = False,
    address: HereOrElsewhere = "local",
) -> None:
    """Check that every output is AR's, and show what explains each difference. Exit status 1 on any finding."""
    elsewhere(address, drives=True)
    from dfbench import analysis
    from dfbench.analysis.guard import judge
    from dfbench.analysis.rundir import find_run

    run_dir = find_run(run)
    if not join_only:
        _examine(run_dir, address)
    with analysis.open_run(run_dir) as con:
        verdict = judge(con, join_only=join_only)
    _print(verdict)
    if not verdict.ok:
        raise typer.Exit(1)


def _examine(run_dir: Path, address: str) -> None:
    """Re-run what the judge needs the model for; nothing is done twice when it was interrupted."""
    from rich.console import Console

    from dfbench.cluster import driver, progress
    from dfbench.cluster import guard as model_work

    guard_dir = model_work.prepare(run_dir)
    console = Console(stderr=True)
    with cli_streams.unheard(), progress.shown(console) as show:
        result = driver.run(
            guard_dir,
            driver.Options(address=address),
            on_progress=show,
            on_note=lambda note: console.print(note, highlight=False, markup=False, soft_wrap=True),
        )
    if result.counts.failed:
        typer.echo(f"guard: {result.counts.failed} outputs could not be examined: see {guard_dir}/log.", err=True)
    model_work.adopt(run_dir)


def _print(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Losslessness", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    columns = {
        "workload": "workload", "arm": "arm", "pairs_compared": "pairs", "tokens_compared": "tokens",
        "tokens_identical": "same", "divergences": "part", "ties": "tie", "ulps": "≤4ulp",
        "unresolved": "open", "violations": "bad", "control_divergences": "control",
    }  # fmt: skip
    for name, title in columns.items():
        table.add_column(title, justify="left" if name in ("workload", "arm") else "right", no_wrap=True)
    for cell in verdict.cells:
        table.add_row(*(f"{cell[name]:,}" if isinstance(cell[name], int) else str(cell[name]) for name in columns))
    console.print(table)
    console.print(
        "pairs and tokens compared; tokens the same as AR's; outputs that part from AR's, by what the logits there say"
        " (tie, within 4 ulp, open without a witness, bad); control: outputs that part at the arm's query widths with"
        " no draft accepted.\n",
        style="dim",
        soft_wrap=True,
    )
    console.print(verdict.line(), highlight=False, soft_wrap=True, markup=False)
    for note in verdict.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    for finding in verdict.findings[:50]:
        console.print(f"FINDING ({finding.check}): {finding.message}", highlight=False, soft_wrap=True, markup=False)
    if len(verdict.findings) > 50:
        console.print(f"… and {len(verdict.findings) - 50} more findings.")
    checks = ", ".join(verdict.checks)
    state = "no finding" if verdict.ok else f"{len(verdict.findings)} findings"
    console.print(f"{state}; checks: {checks}.", highlight=False, soft_wrap=True)
