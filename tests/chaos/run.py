"""The long form of the chaos suite: `make chaos`. Prints every trial, then the totals; the exit status is 1 on a loss.

python tests/chaos/run.py                       five rounds of every trial: more than a hundred trials
python tests/chaos/run.py --rounds 1 --seed 7   one round of another seed
python tests/chaos/run.py --only "disk full"    one kind of trial
python tests/chaos/run.py --jobs 4              four trials at a time, each on a cluster of its own
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from network import NotPossible
from raykit import Cluster
from trials import TRIALS, Report, attempt


@dataclass(frozen=True)
class Result:
    """How one trial went: a report, or why it broke a promise, or why this machine cannot make it."""

    name: str
    seed: int
    report: Report | None = None
    broken: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        head = f"{self.name:<42} seed {self.seed:<3}"
        if self.report is not None:
            return f"{head} {self.report.seconds:5.1f} s  {', '.join(self.report.reached)}"
        return f"{head} BROKEN {self.broken}" if self.broken else f"{head} skipped: {self.skipped}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", choices=sorted(TRIALS))
    parser.add_argument("--keep", type=Path, help="keep the runs of failed trials here")
    given = parser.parse_args()
    names = [given.only] if given.only else list(TRIALS)
    trials = [(name, given.seed + number) for number in range(given.rounds) for name in names]
    began, results = time.monotonic(), []
    for result in at_once(trials, given.jobs, given.keep):
        results.append(result)
        print(f"{len(results):>4} {result}", flush=True)
    return summary(results, time.monotonic() - began)


def at_once(
    trials: list[tuple[str, int]], jobs: int, keep: Path | None = None, *, always_again: bool = True
) -> Iterator[Result]:
    """The results of these trials (name and seed) as they come, from so many processes. See `trials.attempt`."""
    context = multiprocessing.get_context("spawn")
    todo, results = context.Queue(), context.Queue()
    arguments = (todo, results, keep, always_again)
    processes = [context.Process(target=work, args=arguments) for _ in range(min(jobs, len(trials)))]
    for trial in [*trials, *[None] * len(processes)]:
        todo.put(trial)
    for process in processes:
        process.start()
    for _ in trials:
        yield _next(results, processes)
    for process in processes:
        process.join()


def _next(results: Any, processes: list[Any]) -> Result:
    while True:
        alive = any(process.is_alive() for process in processes)
        try:
            return results.get(timeout=1.0)  # type: ignore[no-any-return]
        except queue.Empty:
            if not alive:
                raise RuntimeError("the processes that make trials have died") from None


def work(todo: Any, results: Any, keep: Path | None, always_again: bool) -> None:
    """Make trials until there are no more, on one cluster; after a broken one on a fresh one."""
    folder = Path(tempfile.mkdtemp(prefix="dfbench-chaos-"))
    cluster = Cluster(cpus=1)
    try:
        while (trial := todo.get()) is not None:
            name, seed = trial
            place = folder / f"{name} {seed}".replace(" ", "-")
            result = one(name, seed, place, cluster, always_again)
            if result.broken:
                if keep is not None:
                    shutil.copytree(place, keep / place.name, dirs_exist_ok=True)
                cluster.close()
                cluster = Cluster(cpus=1)
            shutil.rmtree(place, ignore_errors=True)
            results.put(result)
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def one(name: str, seed: int, place: Path, cluster: Cluster, always_again: bool) -> Result:
    try:
        return Result(name, seed, attempt(name, place, cluster, seed, always_again=always_again))
    except NotPossible as error:
        return Result(name, seed, skipped=str(error))
    except Exception as error:
        return Result(name, seed, broken=f"{type(error).__name__}: {error}")


def summary(results: list[Result], seconds: float) -> int:
    """Print the totals; 0 when every trial kept every promise."""
    made = [result for result in results if not result.skipped]
    reports = [result.report for result in made if result.report is not None]
    lost, duplicated = sum(r.lost for r in reports), sum(r.duplicated for r in reports)
    survived = sum(not (report.lost or report.duplicated) for report in reports)
    print(
        f"\n{len(made)} trials in {seconds / 60:.0f} min, {sum(bool(r.reached) for r in reports)} faults reached, "
        f"{survived} survived, {lost} lost, {duplicated} duplicated"
    )
    for result in results:
        if result.broken or result.skipped:
            print(result)
    return int(survived < len(made) or bool(lost or duplicated))


if __name__ == "__main__":
    sys.exit(main())
