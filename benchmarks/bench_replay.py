"""How fast replay is: output tokens a second for each drafter, two workers against one, a whole tune, memory.

    make bench-replay                       everything; minutes
    python benchmarks/bench_replay.py --tokens 1000000 --only memory

The path that is timed is a worker's: decode, drafter, rows, Arrow tables. CPU time is printed beside wall time, since
other processes disturb the latter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dfbench.analysis import stats
from dfbench.cluster import driver, replay, tune, verify_cost
from dfbench.cluster.commit import Committer, FinishedShard
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.runspec import ShardReader
from dfbench.cluster.sources import LogSource, SourceOptions
from dfbench.drafters import registry
from dfbench.workers.actor import Worker
from dfbench.workers.spec import ArmSpec, JobSpec, PromptSpec, ShardSpec, TargetSpec

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces_smollm2.jsonl"
ROUNDS = 5
GOALS = {"pld": 200_000, "cacheback": 100_000, "suffix": 100_000, "cacheback-tree": 20_000}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ar": ("ar", {}),
    "pld": ("pld", {}),
    "cacheback": ("cacheback", {}),
    "suffix": ("suffix", {}),
    "suffix-tree": ("suffix", {"mode": "tree"}),
    "cacheback-tree": ("cacheback", {"draft": "tree"}),
    "cacheback-merged": ("cacheback", {"draft": "tree", "merge": True}),
    "sam": ("sam", {}),
    "ngram-cache": ("ngram-cache", {}),
    "ngram-trie": ("ngram-trie", {}),
}


def prompts() -> list[PromptSpec]:
    """The recorded SmolLM2 answers where they are at hand, else made-up ones that repeat about as much."""
    if TRACES.is_file():
        rows = [json.loads(line) for line in TRACES.read_text().splitlines()]
    else:
        rows = [next(made_up(number)) for number in range(87)]
    return [
        PromptSpec(
            row["workload"], f"{row['workload']}-{row['prompt_id']}", "bench", "", tuple(row["prompt_ids"]), "",
            recorded_ids=tuple(row["output_ids"]),
        )
        for row in rows
    ]  # fmt: skip


def made_up(seed: int, length: int = 184) -> Iterator[dict[str, Any]]:
    """Answers of about `length` tokens in which phrases return, without end."""
    source = random.Random(seed)
    while True:
        phrases = [[source.randrange(3, 49_000) for _ in range(source.randrange(2, 9))] for _ in range(24)]
        text: list[int] = []
        while len(text) < 3 * length:
            text += source.choice(phrases) if source.random() < 0.6 else [source.randrange(3, 49_000)]
        yield {
            "workload": "made-up",
            "prompt_id": seed,
            "prompt_ids": text[: 2 * length],
            "output_ids": text[2 * length :],
        }


def shard(arm: ArmSpec, texts: list[PromptSpec]) -> ShardSpec:
    jobs = tuple(JobSpec(f"{arm.name}-{text.prompt_id}", "bench", text.prompt_id, arm.name) for text in texts)
    return ShardSpec("bench", "shard", "bench", tuple(texts), (arm,), jobs, max_new_tokens=2**20)


def arm_spec(name: str) -> ArmSpec:
    drafter, options = ARMS[name]
    return ArmSpec(name, drafter, registry.parse_options(drafter, options).model_dump(mode="json"))


def loaded() -> Worker:
    worker = Worker(TargetSpec("recorded", model="bench"), node="bench")
    worker.load()
    return worker


def work(worker: Worker, job: ShardSpec) -> int:
    """Run a shard; the number of output tokens."""
    parts = (part.tables["jobs"] for part in worker.run(job) if "jobs" in part.tables)  # others only show life
    return sum(len(jobs["output_ids"].combine_chunks().flatten()) for jobs in parts)


def per_drafter() -> None:
    """Output tokens a second on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    texts, worker = prompts(), loaded()
    known = set(registry.names())
    print(f"{'drafter':18}{'tokens/s (CPU)':>16}{'(wall)':>12}{'goal':>10}")
    for name, (drafter, _) in ARMS.items():
        if drafter not in known:
            continue
        job = shard(arm_spec(name), texts)
        work(worker, job)  # compiles, where there is something to compile
        cpu, wall = [], []
        for _ in range(ROUNDS):
            began, began_cpu = time.perf_counter(), time.process_time()
            tokens = work(worker, job)
            wall.append(tokens / (time.perf_counter() - began))
            cpu.append(tokens / (time.process_time() - began_cpu))
        goal = f"{GOALS[name]:,}" if name in GOALS else ""
        print(f"{name:18}{statistics.median(cpu):16,.0f}{statistics.median(wall):12,.0f}{goal:>10}", flush=True)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def one_of(core: int, seconds: float, spin: bool, ready: Any, found: Any) -> None:
    """One of several processes: as many rounds of `pld`, or of plain counting, as fit into some seconds."""
    os.sched_setaffinity(0, {core})
    if spin:
        round_of: Callable[[], int] = count
    else:
        worker, job = loaded(), shard(arm_spec("pld"), prompts())
        round_of = partial(work, worker, job)
    round_of()
    ready.wait()
    done, began, began_cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        done += round_of()
    found.put((done / (time.perf_counter() - began), done / (time.process_time() - began_cpu)))


def count() -> int:
    """Work that shares nothing with another core but the machine itself."""
    total = 0
    for number in range(200_000):
        total += number
    return 200_000 if total else 0


def rate(workers: int, spin: bool = False, seconds: float = 2.0) -> tuple[float, float]:
    """Tokens (or counts) a second of all workers together: of wall time, and of each one's own CPU time."""
    context = multiprocessing.get_context("spawn")
    ready, found = context.Barrier(workers), context.Queue()
    running = [context.Process(target=one_of, args=(core, seconds, spin, ready, found)) for core in range(workers)]
    for process in running:
        process.start()
    rates = [found.get() for _ in running]
    for process in running:
        process.join()
    return sum(wall for wall, _ in rates), sum(cpu for _, cpu in rates)


def scaling() -> None:
    """Two workers against one, in turns; beside them, what plain counting gains here from a second core."""
    for what, spin in (("two workers against one", False), ("two cores against one, plain counting", True)):
        pairs = [(rate(2, spin), rate(1, spin)) for _ in range(7)]
        for place, clock in enumerate(("wall time", "CPU time")):
            ratios = [two[place] / one[place] for two, one in pairs]
            listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{what}, {clock}: {statistics.median(ratios):.2f} × (rounds {listed})", flush=True)
    print("goal: 1.80 × for two workers", flush=True)


def live_speed() -> None:
    """Plain decoding of the embedded model, so that the other figures can be set beside it."""
    from dfbench.workers.engine import load_target
    from dfbench.workers.loop import decode

    target = load_target(TargetSpec("torch"))
    drafter = registry.create("ar", {})
    rates = []
    for text in prompts()[:3]:
        trace = decode(target, drafter, text.prompt_ids, max_new_tokens=33)
        rates.append(len(trace.steps) / sum(step.step_ns for step in trace.steps) * 1e9)
    live = statistics.median(rates)
    print(f"live, SmolLM2, AR: {live:.1f} tokens/s; 2,000 times that is {2000 * live:,.0f}", flush=True)


def whole(tokens: int) -> None:
    """A long log replayed by the real driver and one or two workers on Ray: all of it, and its steady part."""
    rates = {}
    for workers in (1, 2):
        with tempfile.TemporaryDirectory(prefix="dfbench-bench-") as name:
            written = _write_log(Path(name) / "log.jsonl", tokens)
            options = replay.ReplayOptions(SourceOptions())
            source = replay.open_source(Path(name) / "log.jsonl", options.source)
            began = time.perf_counter()
            replay.create(Path(name) / "run", replay.prepare(source, replay.parse_arms(["pld"]), options))
            planned, marks = time.perf_counter() - began, [(0.0, 0)]
            began = time.perf_counter()
            driver.run(
                Path(name) / "run",
                driver.Options(workers=workers),
                on_progress=partial(_mark, marks, began),
            )
            total = time.perf_counter() - began
            going = [mark for mark in marks if mark[1] > 0]
            share = (going[-1][1] - going[0][1]) / going[-1][1]
            rates[workers] = steady = share * written / (going[-1][0] - going[0][0])
            print(
                f"{workers} workers, pld, {written:,} tokens: planned in {planned:.1f} s, driven in {total:.1f} s "
                f"({written / total:,.0f} tokens/s), steady {steady:,.0f} tokens/s",
                flush=True,
            )
    print(f"whole command, two workers against one, steady: {rates[2] / rates[1]:.2f} ×", flush=True)


def _mark(marks: list[tuple[float, int]], began: float, now: driver.Progress) -> None:
    if now.counts.done > marks[-1][1]:
        marks.append((time.perf_counter() - began, now.counts.done))


def whole_tune() -> None:
    """The built-in search space over the recorded answers."""
    rows = list(LogSource(TRACES, SourceOptions())) if TRACES.is_file() else _recordings()
    began, began_cpu = time.perf_counter(), time.process_time()
    result = tune.tune(rows, verify_cost.load("example"), stats.ratio_interval)
    print(
        f"tune: {result.configurations} configurations over {len(rows)} answers, {result.evaluations} replays: "
        f"{time.perf_counter() - began:.0f} s, {time.process_time() - began_cpu:.0f} s of CPU (goal 120)",
        flush=True,
    )


def _recordings() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made-up.jsonl"
        file.write_text("".join(json.dumps(next(made_up(n)) | {"prompt_id": n}) + "\n" for n in range(87)))
        return list(LogSource(file, SourceOptions()))


def memory(tokens: int) -> None:
    """Resident memory of reading, planning and replaying a log of this many output tokens."""
    with tempfile.TemporaryDirectory(prefix="dfbench-bench-") as name:
        folder = Path(name)
        written = _write_log(folder / "log.jsonl", tokens)
        size = (folder / "log.jsonl").stat().st_size / 2**20
        print(f"memory: a log of {written:,} output tokens, {size:.0f} MiB", flush=True)
        process = psutil.Process()
        warm = _watch("before", process)
        options = replay.ReplayOptions(SourceOptions())
        source = replay.open_source(folder / "log.jsonl", options.source)
        prepared = replay.prepare(source, replay.parse_arms(["pld"]), options)
        began = time.perf_counter()
        replay.create(folder / "run", prepared)
        _watch(f"read and planned in {time.perf_counter() - began:.0f} s", process)
        began = time.perf_counter()
        resident = _drive(folder / "run", process)
        print(f"  replayed in {time.perf_counter() - began:.0f} s; {max(resident) - warm:+.0f} MiB at the peak")
        fifths = [np.median(part) for part in np.array_split(resident, 5) if len(part)]
        print(f"  median of each fifth: {', '.join(f'{part:.0f}' for part in fifths)} MiB", flush=True)


def _write_log(file: Path, tokens: int) -> int:
    written, number = 0, 0
    answers = made_up(1)
    with file.open("w") as out:
        while written < tokens:
            row = next(answers)
            out.write(json.dumps(row | {"prompt_id": f"p{number}"}) + "\n")
            written, number = written + len(row["output_ids"]), number + 1
    return written


def _watch(what: str, process: psutil.Process) -> float:
    resident = process.memory_info().rss / 2**20
    print(f"  {resident:6.0f} MiB  {what}", flush=True)
    return float(resident)


def _drive(run_dir: Path, process: psutil.Process) -> list[float]:
    """What a driver with one worker does, in this process; MiB after every commit."""
    with Ledger.open(run_dir) as ledger:
        ledger.begin()
        reader, worker = ShardReader(run_dir, ledger.run), Worker(ledger.run.target, node="bench")
        ready = worker.load()
        committer = Committer(ledger, ready.eos_ids)
        after, resident = -1, []
        while rows := ledger.pending(64, after):
            for row in rows:
                finished = FinishedShard(reader.shard(row), worker.worker_id)
                finished.parts.extend(worker.run(finished.spec))
                committer.add(finished)
                after = row.position
                if committer.due():
                    committer.flush()
                    resident.append(process.memory_info().rss / 2**20)
        committer.flush()
        return [*resident, process.memory_info().rss / 2**20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["live", "drafters", "scaling", "whole", "tune", "memory"])
    parser.add_argument("--tokens", type=int, default=10_000_000, help="size of the log whose memory is watched")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {load:.1f} before this began", flush=True)
    parts: dict[str, Callable[[], None]] = {
        "live": live_speed,
        "drafters": per_drafter,
        "scaling": scaling,
        "whole": lambda: whole(given.tokens // 4),
        "tune": whole_tune,
        "memory": lambda: memory(given.tokens),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            part()


if __name__ == "__main__":
    main()
