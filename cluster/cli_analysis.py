"""Commands: sql, report, compare, verify, compact, export (guard is in a module of its own)."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfbench.cluster.cli_options import AsJson, Elsewhere, RunArgument, asks_head, elsewhere
from dfbench.cluster.cli_screen import screen, show
from dfbench.errors import QueryError, RunError, unknown

if TYPE_CHECKING:
    import duckdb


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(sql)
    app.command()(report)
    app.command()(compare)
    app.command()(verify)
    app.command()(compact)
    app.command()(export)


def sql(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [QUERY]", help="A run directory and a query, or either.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table, csv, json, markdown or parquet.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write the answer to this file.")] = None,
    list_views: Annotated[
        bool, typer.Option("--views", help="List the views, what they mean, and their columns.")
    ] = False,
    address: Elsewhere = "",
) -> None:
    """Ask a run in SQL; without a query, a prompt. The connection reads the run's records and nothing else."""
    if asks_head(address) and not (words or list_views):
        raise QueryError("through --address there is no prompt: give a query.")
    _ask_head(address, {"--out": out, "--format parquet": form == "parquet"})
    from dfbench.analysis import query

    if list_views:
        _print_views()
        return
    if form not in query.FORMATS:
        raise QueryError(unknown("format", form, query.FORMATS))
    if form == "parquet" and out is None:
        raise QueryError("Parquet goes to a file: write --out FILE.")
    run, text = _run_and_query(words or [])
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read()
    con = _open(run)
    if text is None:
        from dfbench.cluster.cli_sqlshell import shell

        shell(con)
        return
    answer = query.run_query(con, text)
    if out is not None:
        query.save(answer, "csv" if form == "table" else form, out)
        typer.echo(f"{answer.num_rows} rows written to {out}", err=True)
    elif form == "table":
        show(answer)
    else:
        typer.echo(query.text(answer, form), nl=False)


def report(
    run: RunArgument = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for pasting.")] = False,
    as_json: AsJson = False,
    seed_table: Annotated[
        bool, typer.Option("--seed-table", help="Print the seed report's table beside this run's figures.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the full report to this file; it needs no network.")
    ] = None,
    charts: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write every chart as SVG and PNG into this folder.")
    ] = None,
    address: Elsewhere = "",
) -> None:
    """Print the headline table and the checks of a run, or write its full report."""
    _ask_head(address, {"--html": html, "--charts": charts})
    from dfbench.analysis import console, seed

    con = _open(run, quiet=True)
    if html or charts:
        _write_report(con, run, html, charts)
    elif seed_table:
        screen().print(seed.seed_table(con))
    elif as_json:
        typer.echo(json.dumps(console.as_json(con), indent=2, default=str, ensure_ascii=False))
    elif markdown:
        typer.echo(console.markdown(con), nl=False)
    else:
        screen().print(console.headline(con))


def _write_report(con: duckdb.DuckDBPyConnection, run: str | None, html: Path | None, charts: Path | None) -> None:
    """The full report and its charts as files."""
    from dfbench.analysis import report as reports
    from dfbench.analysis.rundir import find_run
    from dfbench.cluster.cli_report import write_report

    if html:
        write_report(con, find_run(run), html)
        typer.echo(f"report written to {html}")
    if charts:
        typer.echo(f"{len(reports.export_charts(con, charts))} files written to {charts}")


def compare(
    a: Annotated[str, typer.Argument(metavar="RUN_A", help="The run to start from.")],
    b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run to compare with it.")],
    across: Annotated[
        list[str] | None, typer.Option(help="Compare although the runs differ in this: device, model, revision, dtype.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with 1 where it is so in any cell. 'mat < -1%': B is more than 1 % below A; 'mat < -0.05': more "
            "than 0.05 below A; 'mat < 1.2' (no sign, no %): B itself is below 1.2."
        ),
    ] = None,
    address: Elsewhere = "",
) -> None:
    """Compare two runs prompt by prompt: what changed, how sure that is, and what differs in set-up."""
    elsewhere(address)
    from dfbench.analysis import compare as comparing
    from dfbench.analysis.console import comparison

    conditions = {text: comparing.parse_condition(text) for text in fail_if or []}
    found = comparing.compare(_open(a), _open(b), across or [])
    for text, condition in conditions.items():
        if not any(map(condition.judges, found.changes)):
            raise QueryError(
                f"--fail-if '{text}': no arm that drafts has a {condition.metric} in both runs, so nothing could fail: "
                f"leave it out, or write one of {', '.join(sorted({change.metric for change in found.changes}))}."
            )
    screen().print(comparison(found))
    failed = [(text, change) for text, met in conditions.items() for change in found.changes if met.met(change)]
    for text, change in failed:
        typer.echo(f"fails '{text}' ({change.a:.3f} → {change.b:.3f}): {change.words}", err=True)
    if failed:
        raise typer.Exit(1)


def verify(run: RunArgument = None, address: Elsewhere = "") -> None:
    """Check files against the ledger's checksums, rows against the identities of the format, sums against the rows."""
    elsewhere(address)
    from dfbench.analysis.rundir import PROMPTS_FILE, find_run
    from dfbench.cluster import upkeep

    path = find_run(run)
    findings = upkeep.verify(path)
    if not (path / PROMPTS_FILE).is_file():
        findings.append(f"{PROMPTS_FILE} is missing: the run cannot go on, be guarded or be replayed without it.")
    for line in findings:
        typer.echo(line)
    typer.echo(f"{path}: {len(findings)} findings." if findings else f"{path}: every file and row is as committed.")
    if findings:
        raise typer.Exit(1)


def compact(run: RunArgument = None, address: Elsewhere = "") -> None:
    """Merge a run's record files into few large ones; readers that are open are not disturbed."""
    elsewhere(address)
    from dfbench.analysis import write_run_sql
    from dfbench.analysis.rundir import find_run
    from dfbench.cluster import upkeep
    from dfbench.cluster.ledger import Ledger
    from dfbench.cluster.run_place import driver_alive, driver_lock

    path = find_run(run)
    if not driver_alive(path):
        _require_sound(path)
    with driver_lock(path), Ledger.open(path) as ledger:
        before = ledger.file_count()
        merged = upkeep.compact(ledger, at_least=2)
        after = ledger.file_count()
    write_run_sql(path)
    typer.echo(f"{path}: {before} files, now {after}." if merged else f"{path}: {before} files, nothing to merge.")


def _require_sound(path: Path) -> None:
    """Raise RunError where a committed file is damaged; before the lock is made, so that a refusal leaves nothing."""
    from dfbench.cluster import upkeep
    from dfbench.cluster.ledger import Ledger

    with Ledger.open(path) as ledger:  # a reader would leave SQLite's own side files
        broken = [f"{file.name} ({reason})" for file in ledger.files() if (reason := upkeep.damage(path, file))]
    if broken:
        raise RunError(f"{path} holds damaged files, {', '.join(broken)}: submit it again, which makes them anew.")


def export(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder, .duckdb file or URL (s3://…) to write.")],
    run: RunArgument = None,
    form: Annotated[
        str | None, typer.Option("--format", help="parquet, csv or duckdb; by default what TARGET's name says.")
    ] = None,
    run_option: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
) -> None:
    """Write a run's tables elsewhere, as one Parquet or CSV file a table or as a DuckDB file."""
    from dfbench.analysis import export as exporting

    form = form or ("duckdb" if target.endswith(".duckdb") else "parquet")
    for name, count in exporting.export(_open(run or run_option), target, form):
        typer.echo(f"{name}: {count} rows")


def _print_views() -> None:
    from dfbench.analysis.query import listed

    views = listed()
    width = max(len(view.name) for view in views)
    across = screen().width
    for view in views:
        typer.echo(f"{view.name:<{width}}  {view.meaning}")
        columns = ", ".join(str(column) for column in view.columns)
        typer.echo(textwrap.fill(columns, across, initial_indent="    ", subsequent_indent="    "))


def _open(run: str | Path | None, *, quiet: bool = False) -> duckdb.DuckDBPyConnection:
    """Open a run; what it lacks goes to standard error."""
    from dfbench.analysis.store import open_run, problems

    con = open_run(run)
    if not quiet:
        for problem in problems(con):
            typer.echo(f"note: {problem.detail}", err=True)
    return con


def _run_and_query(words: list[str]) -> tuple[Path | None, str | None]:
    """Which of at most two words is a run and which a query. A view's name alone asks for all of it."""
    from dfbench.analysis.query import names
    from dfbench.analysis.rundir import find_run

    if len(words) > 2:
        raise QueryError('put the query in quotes: dfbench sql RUN "select …".')
    if len(words) == 2:
        run, text = find_run(words[0]), words[1]
    elif words and not _is_query(words[0], names()):
        run, text = find_run(words[0]), None
    else:
        run, text = None, words[0] if words else None
    if text in names():
        text = f"from {text}"
    return run, text


def _ask_head(address: str, files: Mapping[str, object]) -> None:
    """Where an address is given, run this command on the head; `files` are options that would make files there."""
    given = [name for name, value in files.items() if value]
    if asks_head(address) and given:
        raise QueryError(f"what comes through --address is text: leave out {' and '.join(given)}.")
    elsewhere(address)


def _is_query(word: str, views: list[str]) -> bool:
    try:
        is_path = Path(word).exists()
    except OSError:
        is_path = False
    return not is_path and (word in views or any(character.isspace() for character in word))
