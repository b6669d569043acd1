"""How the analysis keeps up with a large run, and what its intervals cover.

    python benchmarks/bench_analysis.py [--prompts 13021] [--run DIR] [--coverage-runs 2000]

Makes a run of about 10 M step rows and 20 M token rows (13,021 prompts × 6 arms × 256 tokens), or takes the one in
DIR, and prints: opening it, the headline views together, peak memory, `status` of a running sweep of 100,000 jobs, and
the coverage of every kind of interval on skewed data at 30 prompts, beside percentile and BCa intervals.
Views are timed in a fresh process, so that peak memory is theirs alone. CPU time is printed beside wall time: on a
machine that is busy with other work it says more.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "analysis"))

from bulk import make_bulk
from simulation import METHODS, bca_interval, coverage, draw, percentile_interval, truths

from dfbench.analysis import open_run
from dfbench.cluster import status
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import PlannedShard, RunSpec
from dfbench.workers.spec import ArmSpec, JobSpec, TargetSpec

HEADLINE = ("cells", "mat", "speedup", "speedup_le_mat", "losslessness", "divergences")
GOALS = {"opening, s": 0.2, "headline views together, s": 3.0, "peak memory, GB": 2.0, "status, s": 1.0}


def timed_views(run: Path) -> dict[str, float]:
    """In this process: opening (median of 5), each headline view in turn, peak memory."""
    openings = []
    for _ in range(5):
        began = time.perf_counter()
        con = open_run(run)
        openings.append(time.perf_counter() - began)
    found = {"opening, s": statistics.median(openings)}
    began, used = time.perf_counter(), time.process_time()
    for view in HEADLINE:
        at = time.perf_counter()
        con.sql(f"from {view}").to_arrow_table()
        found[f"  {view}, s"] = time.perf_counter() - at
    found["headline views together, s"] = time.perf_counter() - began
    found["  CPU time of these, s"] = time.process_time() - used
    found["peak memory, GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def timed_status(folder: Path, jobs: int = 100_000) -> float:
    """Median time to read the status of a running sweep of this many jobs, half of them done."""
    arms = ("ar", "pld", "cacheback", "suffix")
    run = RunSpec("bench", "bench", "", TargetSpec(kind="scripted"), tuple(ArmSpec(arm, arm) for arm in arms))
    shards = (
        PlannedShard(
            f"s{number}", "code", (f"p{number}",),
            [JobSpec(f"s{number}-{arm}", "code", f"p{number}", arm, arm_order=order) for order, arm in enumerate(arms)],
            256,
        )
        for number in range(jobs // len(arms))
    )  # fmt: skip
    folder.mkdir()
    with Ledger.create(folder, run, shards, state="running") as ledger:
        half = jobs // len(arms) // 2
        with ledger.transaction() as db:
            db.execute("update shards set state = 'done', attempts = 1 where position < ?", (half,))
            db.execute(
                "update jobs set state = 'done', attempt = 1 where shard_id in "
                "(select shard_id from shards where state = 'done')"
            )
    times = []
    for _ in range(5):
        began = time.perf_counter()
        status.read(folder)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def other_coverage(prompts: int, runs: int) -> dict[str, float]:
    """Coverage of percentile and BCa intervals of MAT on the same data, for comparison."""
    generator, truth = np.random.default_rng(11), truths()["MAT (ratio)"]
    hits = {"percentile": 0, "BCa": 0}
    for _ in range(runs):
        data = draw(generator, prompts)
        for name, method in (("percentile", percentile_interval), ("BCa", bca_interval)):
            found = method(data["tokens"], data["steps"])
            hits[name] += found.lo <= truth <= found.hi
    return {name: count / runs for name, count in hits.items()}


def report(found: dict[str, float]) -> None:
    """A line for each figure, goals beside."""
    for name, value in found.items():
        goal = GOALS.get(name)
        verdict = "" if goal is None else f"   goal ≤ {goal}: {'met' if value <= goal else 'NOT met'}"
        print(f"{name:<32} {value:8.3f}{verdict}", flush=True)


def main() -> None:
    """Parse, make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=13_021)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--coverage-runs", type=int, default=2000)
    parser.add_argument("--views-only", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.views_only:
        print(json.dumps(timed_views(options.views_only)))
        return
    with tempfile.TemporaryDirectory(prefix="dfbench-bench-") as name:
        folder = Path(name)
        run = options.run or make_bulk(folder / "run", prompts=options.prompts, per_file=1960)
        counts = open_run(run).sql("select (select count(*) from steps), (select count(*) from tokens)").fetchall()
        print(f"{counts[0][0]:,} step rows, {counts[0][1]:,} token rows", flush=True)
        child = subprocess.run(
            [sys.executable, __file__, "--views-only", str(run)], check=True, capture_output=True, text=True
        )
        report(json.loads(child.stdout))
        report({"status, s": timed_status(folder / "sweep")})
    print(f"coverage at 30 prompts ({options.coverage_runs} runs; goal 93–97 %):")
    reached = coverage(prompts=30, runs=options.coverage_runs, seed=7)
    for kind, share in {**reached, **other_coverage(30, options.coverage_runs)}.items():
        print(f"  {kind:<34} {share:.1%}{'' if kind in METHODS else '   (not used)'}")


if __name__ == "__main__":
    main()
