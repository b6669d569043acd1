"""Command: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dfbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dfbench.workers.calibrate import Bandwidth, Point
    from dfbench.workers.spec import EngineMode


def calibrate(
    out: Annotated[Path, typer.Option(help="Parquet file to write, for --verify-cost.")] = Path("calibration.parquet"),
    model: Annotated[str | None, typer.Option(help="Hub id or local folder; by default the embedded model.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    engine: Annotated[str, typer.Option(help="cached, recompute or compiled.")] = "cached",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:0.")] = "auto",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache, comma-separated.")] = "128,512,2048",
    samples: Annotated[int, typer.Option(min=2, help="Timed passes at every width.")] = 15,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """What a pass costs here: forward time by number of queries and context, and the memory's read bandwidth."""
    from dfbench.analysis.rundir import require_not_own

    require_not_own(out)
    if out.is_dir():
        raise UsageError(f"{out} is a folder: write --out with the name of a file in it.")
    if out.exists() and not force:
        raise UsageError(f"{out} is there already: write another --out, or --force.")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}: write an --out in a folder that exists.")
    sizes = _contexts(contexts)

    import pyarrow.parquet as pq

    from dfbench.workers import actor, provenance
    from dfbench.workers import calibrate as calibration
    from dfbench.workers.engine import TorchTarget
    from dfbench.workers.spec import EMBEDDED_MODEL, TargetSpec

    asked = TargetSpec(model=model or EMBEDDED_MODEL, dtype=dtype, engine=cast("EngineMode", engine), device=device)
    target = cast(TorchTarget, actor.load_target(asked))
    facts = provenance.record_facts(provenance.worker_facts(target), "calibrate")
    settings = calibration.Settings(contexts=sizes, samples=samples, read_samples=max(samples, 5))
    table = calibration.calibrate(target, facts, settings)
    points = calibration.curve(table)
    if not points:
        raise UsageError(
            f"no context of {contexts} fits the model's {target.context_limit} tokens: write shorter ones."
        )
    pq.write_table(table, out)
    typer.echo(f"{facts.model}, {facts.dtype}, {facts.engine}, {facts.device}; {facts.stack}")
    _print(points, calibration.bandwidth(table))
    typer.echo(f"{calibration.verdict(points)}\n{table.num_rows} rows → {out}; use them with --verify-cost {out}")


def _contexts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"--contexts '{text}' is no list of lengths: write it like 128,512.")
    return found


def _print(points: Sequence[Point], read: Bandwidth | None) -> None:
    typer.echo("context  queries  median ms   × one query   95 % interval")
    for point in points:
        mark = "   too noisy to quote" if point.noisy else ""
        typer.echo(
            f"{point.context:7d}  {point.queries:7d}  {point.median_ns / 1e6:9.2f}   {point.ratio:11.2f}"
            f"   {point.ratio_lo:.2f} to {point.ratio_hi:.2f}{mark}"
        )
    if read is not None:
        low, high = read.lo / 1e9, read.hi / 1e9
        typer.echo(f"memory is read at {read.median / 1e9:.1f} GB/s ({low:.1f} to {high:.1f})")
