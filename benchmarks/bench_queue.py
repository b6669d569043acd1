"""What the queue costs and how it scales, with targets that cost nothing or only sleep.

    python benchmarks/bench_queue.py                 all three parts, about six minutes on two quiet cores
    python benchmarks/bench_queue.py --jobs 10000    a shorter run

1. Jobs of zero cost through driver, Ray, one worker, records and ledger: time and CPU a job, memory of driver and
   worker at each tenth of the run.
2. The plan of a million jobs: time, memory, size of the ledger; what a status and a window of the queue cost on it.
3. The same work on 1, 2, 4, 8 and 16 workers whose targets sleep: efficiency against one worker.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pyarrow.parquet as pq

from dfbench.cluster import driver, upkeep
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import PlannedShard, RunSpec, write_prompts
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, TargetSpec

ARMS = (ArmSpec("ar", "ar"), ArmSpec("pld", "pld"), ArmSpec("cacheback", "cacheback"))
TOKENS = 4
SHARDS_A_WORKER = 10
SLEEPING_TOKENS = 8
MEGABYTE = 2**20
T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs of zero cost (part 1)")
    parser.add_argument("--plan", type=int, default=1_000_000, help="jobs of the large plan (part 2)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="worker counts (part 3)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="what a pass of a sleeping target takes (part 3)")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dfbench-bench-"))
    try:
        if given.jobs:
            overhead(folder / "overhead", given.jobs)
        if given.plan:
            large_plan(folder / "plan", given.plan)
        if given.workers:
            scaling(folder / "scaling", given.workers, given.step_ms)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def make(run_dir: Path, jobs: int, arms: tuple[ArmSpec, ...], cap: int, **options: float) -> Ledger:
    """A planned run of a scripted target: all arms of a prompt are one shard."""
    run_dir.mkdir(parents=True)
    prompts = -(-jobs // len(arms))
    write_prompts(run_dir, (prompt(i) for i in range(prompts)))
    run = RunSpec("bench", "bench", "sha", TargetSpec(kind="scripted", options=dict(options)), arms)
    return Ledger.create(run_dir, run, shards(prompts, arms, cap))


def prompt(i: int) -> PromptSpec:
    return PromptSpec("bench", f"p{i}", "bench", "", (3 + i % 50, 4, 5, 6), f"{i:016x}")


def shards(prompts: int, arms: tuple[ArmSpec, ...], cap: int) -> Iterator[PlannedShard]:
    for i in range(prompts):
        jobs = [JobSpec(f"{i:012x}{k:04x}", "bench", f"p{i}", arm.name, arm_order=k) for k, arm in enumerate(arms)]
        yield PlannedShard(f"{i:016x}", "bench", [f"p{i}"], jobs, cap)


@dataclass
class Memory:
    """Resident memory of driver and workers, read at each tenth of a run."""

    jobs: int
    rows: list[tuple[int, float, float]] = field(default_factory=list)

    def __call__(self, progress: driver.Progress) -> None:
        if progress.counts.done >= len(self.rows) * self.jobs / 10:
            self.rows.append((progress.counts.done, resident(driver_process()), sum(map(resident, worker_processes()))))


def driver_process() -> psutil.Process:
    return psutil.Process()


def worker_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "ray::Worker" in " ".join(child.cmdline())]


def resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / MEGABYTE


def cpu_seconds() -> float:
    """CPU time of this process and of everything below it that still lives, Ray's own processes included."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def overhead(run_dir: Path, jobs: int) -> None:
    print(f"1. {jobs:,} jobs of zero cost, {len(ARMS)} arms a shard, {TOKENS} tokens, one worker")
    make(run_dir, jobs, ARMS, TOKENS).close()
    memory = Memory(jobs)
    marks: list[tuple[float, float, int]] = []

    def watch(progress: driver.Progress) -> None:
        memory(progress)
        if progress.workers:
            marks.append((time.monotonic(), cpu_seconds(), progress.counts.done))

    result = driver.run(run_dir, driver.Options(workers_per_node=1), on_progress=watch)
    (began, cpu_began, _), (ended, cpu_ended, done) = marks[0], marks[-1]
    print(f"   {done:,} jobs in {ended - began:.1f} s: {done / (ended - began):,.0f} jobs/s")
    print(
        f"   {1000 * (ended - began) / done:.2f} ms a job, {1000 * (cpu_ended - cpu_began) / done:.2f} ms of CPU a job"
    )
    print("   jobs done     driver MiB   worker MiB")
    for at, mine, theirs in memory.rows:
        print(f"   {at:>9,}   {mine:>10.0f}   {theirs:>10.0f}")
    findings, seconds = timed(lambda: upkeep.verify(run_dir))
    print(f"   state {result.state}, verify: {len(findings)} findings in {seconds:.1f} s, {upkeep.describe(run_dir)}\n")


def large_plan(run_dir: Path, jobs: int) -> None:
    print(f"2. the plan of {jobs:,} jobs")
    before = resident(psutil.Process())
    cpu = time.process_time()
    ledger, seconds = timed(lambda: make(run_dir, jobs, ARMS, TOKENS))
    cpu = time.process_time() - cpu
    size = (run_dir / "ledger.db").stat().st_size / MEGABYTE
    grown = resident(psutil.Process()) - before
    print(f"   planned in {seconds:.1f} s ({cpu:.1f} s of CPU), {grown:+.0f} MiB, ledger {size:.0f} MiB")
    counts, seconds = timed(ledger.counts)
    print(f"   status: {counts.total:,} jobs counted in {1000 * seconds:.0f} ms")
    _, seconds = timed(lambda: ledger.pending(256, after=jobs // len(ARMS) // 2))
    print(f"   a window of 256 shards from the middle: {1000 * seconds:.1f} ms")
    started, seconds = timed(lambda: driver.ShardReader(run_dir, ledger.run))
    print(f"   opening the prompts: {seconds:.1f} s, {resident(psutil.Process()) - before:+.0f} MiB in all\n")
    del started
    ledger.close()


def scaling(run_dir: Path, workers: list[int], step_ms: float) -> None:
    """Jobs a second of sleeping targets while all workers are at work, against as many times what one alone does.

    What starting costs (loading, the last shards with fewer workers than before) is left out: it does not grow with the
    sweep. What remains is what dispatch, records and commits take from the workers, and what they take from each other.
    """
    print(f"3. targets that sleep {step_ms:g} ms a pass, {SHARDS_A_WORKER} shards of {len(ARMS)} jobs a worker")
    alone = 0.0
    for count in workers:
        place = run_dir / str(count)
        make(place, SHARDS_A_WORKER * count * len(ARMS), ARMS, SLEEPING_TOKENS, step_ms=step_ms, period=1000).close()
        driver.run(place, driver.Options(workers=count, workers_per_node=count))
        rate, window = steady_rate(place)
        alone = alone or rate / count
        print(
            f"   {count:>3} workers: {rate:6.2f} jobs/s over {window:.0f} s, {rate / count:.3f} each, "
            f"efficiency {rate / count / alone:.3f}",
            flush=True,
        )


def steady_rate(run_dir: Path) -> tuple[float, float]:
    """Jobs a second between the last worker's first job and the first worker's last, and how many seconds that was.

    A job counts by the share of it that falls into that time.
    """
    jobs: dict[str, list[tuple[float, float]]] = {}
    with Ledger.open(run_dir, readonly=True) as ledger:
        for file in ledger.files("jobs"):
            table = pq.read_table(run_dir / file.name, columns=["worker_id", "began_at", "wall_ns", "warmup"])
            for worker, began, wall, warmup in zip(*(column.to_pylist() for column in table.columns), strict=True):
                if not warmup:
                    jobs.setdefault(worker, []).append((began.timestamp(), began.timestamp() + wall / 1e9))
    start = max(min(begin for begin, _ in spans) for spans in jobs.values())
    stop = min(max(end for _, end in spans) for spans in jobs.values())
    done = sum(
        max(min(end, stop) - max(begin, start), 0) / (end - begin) for spans in jobs.values() for begin, end in spans
    )
    return done / (stop - start), stop - start


def timed(action: Callable[[], T]) -> tuple[T, float]:
    began = time.monotonic()
    result = action()
    return result, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
