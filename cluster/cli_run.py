"""Commands: submit, status, retry, cancel, demo."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfbench.cluster import cli_streams
from dfbench.cluster.cli_options import Address, AsJson, Elsewhere, HereOrElsewhere, RunArgument, elsewhere
from dfbench.cluster.cli_screen import screen
from dfbench.errors import DfbenchError, RunError, SweepError, WorkloadError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from dfbench.cluster.driver import Result
    from dfbench.cluster.plan import Plan
    from dfbench.cluster.status import Status
    from dfbench.cluster.sweep import Sweep

logger = logging.getLogger(__name__)

AllowChange = Annotated[
    bool, typer.Option("--allow-version-change", help="Go on although software versions differ from the run's.")
]


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(submit)
    app.command()(status)
    app.command()(retry)
    app.command()(cancel)
    app.command()(demo)


def submit(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP", help="Sweep file, built-in sweep (quick, qwen3-8b, cacheback), or run directory."
        ),
    ],
    run: Annotated[Path | None, typer.Option(help="Run directory; by default runs/NAME-TIME.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Start afresh, even where an unfinished run could go on.")] = False,
    address: Address = "local",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting: model.dtype=float32.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Local folder, GGUF file or hub id to use as the model.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Take a workload's prompts from this JSONL file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Only devices whose name holds this, such as 'RTX 5090'.")] = None,
    workers_per_node: Annotated[int | None, typer.Option(min=1, help="Workers on each node.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List shards and jobs, run nothing, write nothing.")
    ] = False,
    patience: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for a worker, and for a --device that no node has yet."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run the driver on the cluster's head and return.")] = False,
    allow_version_change: AllowChange = False,
) -> None:
    """Run a sweep, or go on with it: the same command again runs only what is missing.

    A run directory in place of a sweep goes on from that directory alone.
    """
    from dfbench.cluster import plan as planning
    from dfbench.cluster import remote, run_place, runs

    if run_place.exists(Path(sweep)) and not (detach or remote.needed(address)):
        if run or new or set_ or model or workload or device or workers_per_node or dry_run:
            raise RunError(f"{sweep} is a run, which goes on as it was begun: leave the other options out.")
        _drive_again(Path(sweep), address, allow_version_change, patience, resume=True)
        return
    effective = effective_sweep(sweep, set_, model, workload, device, workers_per_node)
    if detach or remote.needed(address):
        told = remote.SubmitOptions(str(run) if run else None, new, allow_version_change, dry_run, patience)
        raise typer.Exit(remote.submit(effective, address, told, typer.echo, detach=detach))
    made = planning.plan(effective)
    if dry_run:
        _list_plan(made)
        return
    where = runs.place(made, run, new=new)
    if where.resumed:
        _resume(where.run_dir)
    else:
        runs.create(where.run_dir, made)
        typer.echo(f"{made.sweep.name}: {made.job_count} jobs in {made.shard_count} shards → {where.run_dir}")
    runs.point_latest(where.run_dir)
    drive(where.run_dir, made.sweep, address=address, allow_version_change=allow_version_change, patience=patience)


def effective_sweep(
    source: str,
    overrides: list[str] | None = None,
    model: str | None = None,
    files: list[str] | None = None,
    device: str | None = None,
    workers_per_node: int | None = None,
) -> Sweep:
    """The sweep with everything that the command line says on top."""
    from dfbench.cluster import sweep_file
    from dfbench.cluster.sweep import validate

    data = sweep_file.read(source)
    for override in overrides or []:
        sweep_file.apply_override(data, override)
    if model is not None:
        given = data.get("model")
        kept = (
            {key: given[key] for key in given if key not in ("revision", "digest")} if isinstance(given, dict) else {}
        )
        data["model"] = {**kept, "id": model}
    for entry in files or []:
        _use_file(data, entry)
    if device is not None:
        data["device_filter"] = device
    if workers_per_node is not None:
        data["workers_per_node"] = workers_per_node
    return validate(data, source)


def _use_file(data: dict[str, Any], entry: str) -> None:
    """`name=FILE`: that workload's prompts come from the file as they are, without data set or template."""
    name, equals, file = entry.partition("=")
    if not equals or not name or not file:
        raise WorkloadError(f"--workload '{entry}' must be NAME=FILE, such as chat=prompts.jsonl.")
    workloads = data.get("workloads")
    if not isinstance(workloads, list):
        raise SweepError("the sweep has no list of `workloads` that --workload could change.")
    names = [item.get("name") if isinstance(item, dict) else item for item in workloads]
    if name not in names:
        raise WorkloadError(f"--workload: {unknown('workload of the sweep', name, map(str, names))}")
    at = names.index(name)
    given = {"name": name} if isinstance(workloads[at], str) else dict(workloads[at])
    for key in ("dataset", "template", "chat"):
        given.pop(key, None)
    workloads[at] = {**given, "file": str(Path(file).expanduser().resolve())}


def _list_plan(plan: Plan) -> None:
    arms = ", ".join(arm.name for arm in plan.sweep.arms)
    typer.echo(f"{plan.sweep.name}: {plan.job_count} jobs in {plan.shard_count} shards; arms {arms}")
    for shard in plan.shards():
        typer.echo(f"shard {shard.shard_id}  {shard.workload}  {len(shard.jobs)} jobs, cap {shard.max_new_tokens}")
        for job in shard.jobs:
            typer.echo(f"  {job.job_id}  {job.prompt_id}  {job.arm}  repeat {job.repeat}  turn {job.turn}")


def _resume(run_dir: Path) -> None:
    """Say where an earlier run stands, and take back a cancel."""
    from dfbench.cluster.ledger import Ledger
    from dfbench.cluster.run_place import driver_lock

    with Ledger.open(run_dir) as ledger:
        counts = ledger.counts()
        typer.echo(f"going on with {run_dir}: {counts.done} of {counts.total} jobs are done (--new starts afresh)")
        if ledger.state == "cancelled":
            with driver_lock(run_dir):  # a driver that is still there, maybe suspended, is to see the cancel
                typer.echo(f"it was cancelled: {ledger.resume()} jobs are pending again")


def drive(
    run_dir: Path,
    sweep: Sweep,
    *,
    address: str = "local",
    allow_version_change: bool = False,
    patience: float | None = None,
) -> None:
    """Run what is left of a run, show how far it is, end with the headline table. Exit status 1 if jobs failed."""
    from rich.console import Console

    from dfbench.cluster import driver, progress

    console = Console()
    options = driver.Options(
        address=address,
        workers=sweep.workers,
        workers_per_node=sweep.workers_per_node,
        device=sweep.device_filter,
        max_attempts=sweep.max_attempts,
        progress_s=sweep.progress_deadline_s,
        allow_version_change=allow_version_change,
        patience_s=patience,
    )
    with cli_streams.unheard(), progress.shown(console) as show:
        result = driver.run(
            run_dir,
            options,
            on_progress=show,
            on_files=_write_run_sql,
            on_note=lambda note: console.print(note, highlight=False, markup=False, soft_wrap=True),
        )
    _finish(run_dir, result)


def _write_run_sql(run_dir: Path) -> None:
    """Keep `run.sql` in step with the committed files, so that DuckDB's own shell opens the run."""
    from dfbench.analysis.runsql import write_run_sql

    try:
        write_run_sql(run_dir)
    except (DfbenchError, OSError) as error:
        # A convenience, made anew at every commit: its failure is no reason to stop a sweep.
        logger.warning("run.sql could not be written: %s", error)


def _finish(run_dir: Path, result: Result) -> None:
    """The headline table, where the run stands, and what to do next."""
    counts = result.counts
    if counts.done:
        headline(run_dir)
    if counts.failed:
        typer.echo(f"{counts.failed} of {counts.total} jobs failed; to run them again: dfbench retry {run_dir}")
    elif counts.cancelled:
        typer.echo(f"cancelled with {counts.done} of {counts.total} jobs done; the same submit goes on with the rest")
    else:
        typer.echo(f"{counts.done} jobs done; next: dfbench report {run_dir}")
    if counts.failed or counts.done < counts.total:
        raise typer.Exit(1)


def headline(run_dir: Path) -> None:
    """Print the run's headline table and the checks beneath."""
    from dfbench.analysis import console
    from dfbench.analysis.store import open_run

    connection = open_run(run_dir)
    try:
        screen().print(console.headline(connection))
    finally:
        connection.close()


def status(
    run: RunArgument = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until the run is over.")] = False,
    as_json: AsJson = False,
    address: Elsewhere = "",
) -> None:
    """Done, running, failed and left, by arm and by node, with rate and time left. Needs no Ray."""
    elsewhere(address, cli_streams.watched if watch else typer.echo)
    import json

    from rich.live import Live

    from dfbench.analysis.rundir import find_run
    from dfbench.cluster import status as standing

    run_dir = find_run(run)
    console = screen()
    now = standing.read(run_dir)
    if as_json:
        typer.echo(json.dumps(now.as_json(), ensure_ascii=False))
    elif not watch:
        console.print(standing.render(now))
    elif not console.is_terminal:
        _watch_plainly(run_dir, now, console)
    else:
        with Live(standing.render(now), console=console, auto_refresh=False) as live:
            while now.driver and not cli_streams.reader_gone():
                time.sleep(1.0)
                now = standing.read(run_dir)
                live.update(standing.render(now), refresh=True)


def _watch_plainly(run_dir: Path, now: Status, console: Console) -> None:
    """For a file or a pipe, such as another machine that asks the head: a line now and then, the tables at the end."""
    from dfbench.cluster import progress
    from dfbench.cluster import status as standing

    said, said_at = "", float("-inf")
    while now.driver and not cli_streams.reader_gone():
        line = standing.line(now)
        if line != said and time.monotonic() - said_at >= progress.PLAIN_EVERY_S:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            said, said_at = line, time.monotonic()
        time.sleep(1.0)
        now = standing.read(run_dir)
    console.print(standing.render(now))


def retry(
    run: RunArgument = None,
    shard: Annotated[list[str] | None, typer.Option(help="Only this shard; may be given again.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only jobs that last failed by this kind, such as oom.")] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only mark them; the next submit runs them.")] = False,
    address: HereOrElsewhere = "local",
    allow_version_change: AllowChange = False,
) -> None:
    """Run failed jobs again, each together with a fresh AR run to pair it with."""
    elsewhere(address, drives=True)
    from dfbench.analysis.rundir import find_run
    from dfbench.cluster.ledger import Ledger
    from dfbench.cluster.run_place import driver_alive

    run_dir = find_run(run)
    with Ledger.open(run_dir) as ledger:
        count = ledger.retry(tuple(shard or ()), kind)
    if count:
        typer.echo(f"{count} failed jobs are pending again in {run_dir}")
    else:
        typer.echo(f"no {'such failed' if shard or kind else 'failed'} job in {run_dir}")
    if not count or no_run:
        return
    if driver_alive(run_dir):
        typer.echo("the driver at work there takes them up; see: dfbench status --watch")
        return
    _drive_again(run_dir, address, allow_version_change)


def _drive_again(
    run_dir: Path, address: str, allow_version_change: bool, patience: float | None = None, *, resume: bool = False
) -> None:
    """Go on with a run from its directory alone; with `resume`, say where it stands and take back a cancel."""
    from dfbench.cluster import sweep_file

    sweep = sweep_file.load_run(run_dir)  # Before anything changes: the folder may be damaged.
    if resume:
        _resume(run_dir)
    drive(run_dir, sweep, address=address, allow_version_change=allow_version_change, patience=patience)


def cancel(run: RunArgument = None, address: Elsewhere = "") -> None:
    """Take back everything that is not done; a driver at work stops soon. What is done stays."""
    elsewhere(address)
    from dfbench.analysis.rundir import find_run
    from dfbench.cluster.ledger import Ledger

    run_dir = find_run(run)
    with Ledger.open(run_dir) as ledger:
        count = ledger.cancel()
    typer.echo(f"{count} jobs of {run_dir} cancelled; the same submit would go on with them")


def demo(
    address: Address = "local",
    new: Annotated[bool, typer.Option("--new", help="Start afresh, even where an unfinished run could go on.")] = False,
    allow_version_change: AllowChange = False,
) -> None:
    """The main job on the embedded model: the quick sweep, its headline table and checks, its report."""
    submit("quick", new=new, address=address, allow_version_change=allow_version_change)
    from dfbench.analysis.rundir import find_run
    from dfbench.analysis.store import open_run
    from dfbench.cluster import cli_report

    run_dir = find_run()
    with open_run(run_dir) as connection:
        cli_report.write_report(connection, run_dir, run_dir / cli_report.REPORT_FILE)
    typer.echo(f"report written to {run_dir / cli_report.REPORT_FILE}")
