"""Commands: replay, tune, record."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfbench.cluster.cli_options import Address
from dfbench.errors import UsageError, WorkloadError

if TYPE_CHECKING:
    from dfbench.cluster.sources import Summary
    from dfbench.cluster.tune import Finding, Tuned

SourceArgument = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A run, a file of token ids or logs, or a folder of such files.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="For text: a local folder, the embedded model's name, or a hub id.")
]
WorkloadName = Annotated[str | None, typer.Option(help="Workload of what names none; by default the source's name.")]
Vocabulary = Annotated[int | None, typer.Option(min=1, help="Size of the vocabulary; rows beyond it are left out.")]
Thinking = Annotated[bool, typer.Option("--enable-thinking", help="Render prompts with the template's thinking mode.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(replay)
    app.command()(tune)
    app.command()(record)


def replay(
    source: SourceArgument,
    arms: Annotated[
        list[str] | None,
        typer.Option(help="A drafter (pld), one with a preset (pld:hf), or a YAML file of arms; may be given again."),
    ] = None,
    tokenizer: Tokenizer = None,
    workload: WorkloadName = None,
    vocab_size: Vocabulary = None,
    enable_thinking: Thinking = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Replay no more of an answer than this.")] = None,
    verify_cost: Annotated[
        str | None,
        typer.Option(help="Predict speedups: a calibrated run, a Parquet or JSON file of a cost curve, or 'example'."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run directory; by default runs/replay-SOURCE-TIME.")] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start afresh, even where an unfinished replay could go on.")
    ] = False,
    address: Address = "local",
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Keep counts and step rows, no text and no token id.")
    ] = False,
    hash_ids: Annotated[bool, typer.Option("--hash-ids", help="Keep token ids under secret random names.")] = False,
) -> None:
    """How many tokens a step any drafter would have had accepted on recorded answers. Needs no model."""
    from dfbench.analysis.runsql import write_run_sql
    from dfbench.cluster import cli_run, remote, runs
    from dfbench.cluster import replay as replays
    from dfbench.cluster import verify_cost as costs
    from dfbench.cluster.sources import SourceOptions
    from dfbench.cluster.sources_run import RunSource

    parsed = replays.parse_arms(arms or ["pld", "cacheback"])
    if remote.needed(address):
        values: dict[str, str | int | Path | None] = {
            "--tokenizer": _for_the_head(tokenizer),
            "--workload": workload,
            "--vocab-size": vocab_size,
        }
        values |= {"--max-new-tokens": max_new_tokens, "--run": run}
        flags = {"--enable-thinking": enable_thinking, "--new": new, "--no-text": no_text, "--hash-ids": hash_ids}
        told = [word for name, value in values.items() if value is not None for word in (name, str(value))]
        told += [name for name, wanted in flags.items() if wanted]
        raise typer.Exit(remote.replay(source, parsed, verify_cost, told, address, typer.echo))
    options = replays.ReplayOptions(
        SourceOptions(tokenizer, workload, vocab_size, enable_thinking, not no_text, hash_ids),
        max_new_tokens=max_new_tokens,
    )
    curve = costs.load(verify_cost) if verify_cost is not None else None
    found = replays.open_source(source, options.source)
    made = replays.prepare(found, parsed, options)
    where = runs.place(made, run, new=new)  # type: ignore[arg-type]
    if where.resumed:
        typer.echo(f"going on with {where.run_dir} (--new starts afresh)")
    else:
        replays.create(where.run_dir, made)
        runs.point_latest(where.run_dir)
        _summary(found.summary)
    try:
        cli_run.drive(where.run_dir, made.sweep, address=address)
    finally:
        if no_text:
            replays.forget_ids(where.run_dir)
    if curve is not None:
        costs.keep(where.run_dir, curve)
        write_run_sql(where.run_dir)
        _predictions(where.run_dir, curve.label, found.path if isinstance(found, RunSource) else None)


def _for_the_head(tokenizer: str | None) -> str | None:
    """A tokenizer's folder in full: it must lie at the same place there, as a model does."""
    if tokenizer is None or not Path(tokenizer).expanduser().is_dir():
        return tokenizer
    return str(Path(tokenizer).expanduser().absolute())


def _summary(summary: Summary) -> None:
    for line in summary.lines():
        typer.echo(line)


def _predictions(run_dir: Path, curve: str, live: Path | None) -> None:
    """The view `speedup_model` of a replay; beside it, for a live run's replay, what that run measured."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    measured = _measured(live) if live is not None else {}
    table = Table(title=Text(f"speedup_model from: {curve}"), title_justify="left")
    answers, modelled = _modelled(run_dir, curve)
    compared = ("measured", "error") if measured else ()
    for column in ("workload", "arm", answers, "MAT", "speedup_model", "95 %", *compared):
        table.add_column(column, justify="left" if column in ("workload", "arm") else "right")
    errors = []
    for workload, arm, prompts, mat, speedup, low, high in modelled:
        between = f"{low:.3f}–{high:.3f}" if low is not None else "none"
        cells = [workload, arm, str(prompts), f"{mat:.3f}", f"{speedup:.3f}", between]
        timed = measured.get((workload, arm))
        if timed is not None:
            if arm != "ar":
                errors.append(abs(speedup / timed - 1))
            cells += [f"{timed:.3f}", f"{speedup / timed - 1:+z.1%}"]
        table.add_row(*cells)
    Console(width=None if Console().is_terminal else 120).print(table)
    if errors:
        error = statistics.median(errors)
        typer.echo(f"prediction against measurement: median absolute error {error:.1%} over {len(errors)} cells")
    typer.echo("speedup_model leaves out the drafter's own time and everything else that a pass does not cost.")


def _modelled(run_dir: Path, curve: str) -> tuple[str, list[tuple[Any, ...]]]:
    """What its prompts are called; (workload, arm, prompts, MAT, speedup_model, its interval's ends) of every cell."""
    from dfbench.analysis.counting import counted
    from dfbench.analysis.store import open_run

    with open_run(run_dir) as connection:
        cells = connection.execute(
            "select workload, arm, prompts, mat, speedup_model, speedup_model_lo, speedup_model_hi from speedup_model "
            "where curve = ? and speedup_model is not null order by all",
            [curve],
        ).fetchall()
        return counted(connection).answers, cells


def _measured(run_dir: Path) -> dict[tuple[str, str], float]:
    """What a live run measured, by workload and arm; nothing where it timed nothing."""
    from dfbench.analysis.store import open_run

    with open_run(run_dir) as connection:
        rows = connection.sql(
            "select workload, arm, speedup_decode from speedup where speedup_decode is not null"
        ).fetchall()
    return {(workload, arm): value for workload, arm, value in rows}


def _between(interval: object) -> str:
    return f"{interval.lo:.3f}–{interval.hi:.3f}" if interval is not None else "none"  # type: ignore[attr-defined]


def tune(
    source: SourceArgument,
    verify_cost: Annotated[
        str, typer.Option(help="What a pass costs: a calibrated run, a Parquet or JSON file of a curve, or 'example'.")
    ],
    tokenizer: Tokenizer = None,
    workload: WorkloadName = None,
    only: Annotated[str | None, typer.Option(help="Tune for this workload of the source alone.")] = None,
    vocab_size: Vocabulary = None,
    enable_thinking: Thinking = False,
    sample: Annotated[int, typer.Option(min=10, help="Most answers used: a uniform sample of the source.")] = 500,
    max_queries: Annotated[int, typer.Option(min=1, help="Most tokens in one pass.")] = 128,
) -> None:
    """The best drafter and settings for a workload, found by replay, with settings to paste into serving engines."""
    from dfbench.analysis import stats
    from dfbench.cluster import replay as replays
    from dfbench.cluster import tune as tuning
    from dfbench.cluster import verify_cost as costs
    from dfbench.cluster.sources import SourceOptions
    from dfbench.drafters.base import DrafterContext

    curve = costs.load(verify_cost)
    options = SourceOptions(tokenizer, workload, vocab_size, enable_thinking)
    found = replays.open_source(source, options)
    chosen = tuning.sample((r for r in found if only is None or r.workload == only), sample)
    _summary(found.summary)
    if not chosen:
        raise UsageError(f"the source has no workload '{only}': leave out --only, or write one that it has.")
    context = DrafterContext(found.vocabulary or 2**31 - 1, found.eos_ids)
    tuned = tuning.tune(chosen, curve, stats.ratio_interval, context=context, max_queries=max_queries, on_rung=_on_rung)
    _report(tuned, curve.label)


def _on_rung(rung: int, configurations: int, answers: int) -> None:
    typer.echo(f"rung {rung + 1}: {configurations} configurations over {answers} answers", err=True)


def _report(tuned: Tuned, curve: str) -> None:
    """The winner, the front, and settings for every engine that can run something."""
    from dfbench.cluster.settings import ENGINES, paste

    typer.echo(
        f"{tuned.configurations} configurations, {tuned.evaluations} replays; chosen on {tuned.tuning_prompts} "
        f"answers, figures from {tuned.held_out_prompts} held-out ones; costs: {curve}"
    )
    typer.echo("\nMAT against queries a step: what no other arm beats (gains under 1 % left out)")
    typer.echo(f"{'queries/step':>12}{'MAT':>8}{'speedup_model':>15}{'95 %':>14}  arm")
    shown = 0.0
    for finding in tuned.front:
        if finding.held_out.mat > shown * 1.01:
            shown = finding.held_out.mat
            typer.echo(_row(finding))
    typer.echo(f"\nbest: {_sentence(tuned.best)}")
    typer.echo("(chosen on the other answers, as each line below is: on the held-out ones another may come out ahead)")
    for engine in ENGINES:
        chosen = tuned.engines.get(engine.name)
        if chosen is None:
            typer.echo(f"\n{engine.name}: no arm that it can run was searched")
            continue
        typer.echo(f"\n{engine.name}: {_sentence(chosen)}")
        for line in paste(engine, chosen.config.options):
            typer.echo(f"    {line}")


def _row(finding: Finding) -> str:
    score, between = finding.held_out, _between(finding.interval)
    return f"{score.queries:12.2f}{score.mat:8.3f}{score.speedup:15.3f}{between:>14}  {finding.config.name}"


def _sentence(finding: Finding) -> str:
    score = finding.held_out
    return (
        f"{finding.config.name}: speedup_model {score.speedup:.2f} "
        f"({_between(finding.interval) if finding.interval is not None else 'too few for an interval'}) "
        f"at MAT {score.mat:.2f} and {score.queries:.1f} queries a step"
    )


def record(
    endpoint: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server: http://localhost:8000/v1.")],
    workload: Annotated[
        list[str],
        typer.Option(metavar="NAME[=FILE]", help="A built-in workload, or NAME=FILE.jsonl; may be given again."),
    ],
    out: Annotated[Path, typer.Option(help="The log, JSON Lines; what it holds already is not asked again.")],
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; by default the first that the server lists.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each workload.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 1,
    key_env: Annotated[str, typer.Option(help="Environment variable that holds the API key.")] = "OPENAI_API_KEY",
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Ask for token ids too (vLLM): then nothing is tokenised again.")
    ] = False,
) -> None:
    """Ask a served model every prompt of a workload, greedily, and keep the answers as a log for replay."""
    from pydantic import ValidationError

    from dfbench.cluster import endpoint as endpoints
    from dfbench.cluster import sweep_errors, workloads
    from dfbench.cluster.sweep import Workload

    server = endpoints.Endpoint(endpoint, model, endpoints.key_from(key_env))
    extra = {"return_token_ids": True} if token_ids else {}
    options = endpoints.RecordOptions(max_tokens, concurrency, extra)
    failures: list[str] = []
    for entry in workload:
        name, _, file = entry.partition("=")
        try:
            asked = Workload(name=name, file=file or None)
        except ValidationError as error:
            raise WorkloadError(f"--workload '{entry}': {sweep_errors.sentence(Workload, error)}") from error
        rows = endpoints.rows_of(workloads.load(asked), prompts)
        done = endpoints.record(rows, name, server, out, options)
        typer.echo(f"{name}: {done.answers} answers recorded, {done.skipped} prompts were there already → {out}")
        failures += [f"{name} {failure}" for failure in done.failures]
    for failure in failures:
        typer.echo(f"failed: {failure}", err=True)
    if failures:
        raise typer.Exit(1)
