"""The chaos trials: each breaks something at a known point, then submits again and counts the jobs.

A trial takes a folder of its own, a cluster and a seeded random generator, and returns which faults were reached. What
is promised after each: every planned job is there exactly once, with sound rows; no worker outlives its driver;
nothing hangs longer than `kit.BOUND_S`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kit import Drive, committed, done, events, tally, wait_for, workers_of
from raykit import Cluster
from runkit import make_run

GCS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long a driver looks for a head that is gone before Ray ends the process."""

COMMIT_POINTS = ("before_write", "before_rename", "after_rename", "inside", "after")


@dataclass
class Report:
    """What one trial showed."""

    name: str
    reached: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    seconds: float = 0.0


Trial = Callable[[Path, Cluster, random.Random], list[str]]


def attempt(name: str, folder: Path, cluster: Cluster, seed: int, *, always_again: bool = True) -> Report:
    """Run one trial, submit again (only where something is left, unless `always_again`), and count.

    Raises AssertionError where a promise is broken.
    """
    trial = TRIALS[name]
    began = time.monotonic()
    folder.mkdir(parents=True)
    reached = trial(folder, cluster, random.Random(seed))
    run = folder / "run"
    if always_again or trial is records_break or not done(run):
        finish(run, cluster.address)
    lost, duplicated = tally(run)
    wait_for(lambda: not workers_of(run), f"the end of all workers ({name})", 30)
    return Report(name, reached, lost, duplicated, time.monotonic() - began)


def finish(run: Path, address: str, tries: int = 3) -> None:
    """Submit again until the run is done; most trials need it once."""
    for _ in range(tries):
        drive = Drive(run, address)
        if drive.wait() == 0:
            return
    raise AssertionError(f"the run did not finish after {tries} submits:\n{drive.text()[-3000:]}")


def plan(folder: Path, shards: int = 24, step_ms: float = 4.0) -> Path:
    """A run whose work takes a second or two."""
    run = folder / "run"
    make_run(run, shards, step_ms=step_ms).close()
    (folder / "notes").mkdir()
    return run


def under_way(run: Path, drive: Drive, jobs: int = 1) -> None:
    """Wait until some jobs are committed."""
    wait_for(lambda: drive.process.poll() is not None or committed(run) >= jobs, "the first commit")
    assert drive.process.poll() is None, drive.text()


def driver_dies_at(point: str) -> Trial:
    def trial(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
        run, notes = plan(folder), folder / "notes"
        drive = Drive(run, cluster.address, fault=f"{point}:kill@{rng.randint(1, 3)}", notes=notes)
        assert drive.wait() == -signal.SIGKILL, drive.text()
        return [path.name for path in notes.iterdir()]

    return trial


def driver_dies_anywhen(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder, 60)
    drive = Drive(run, cluster.address)
    wait_for(lambda: bool(events(run, "begin")), "the driver's beginning")
    time.sleep(rng.uniform(0.0, 4.0))
    alive = drive.process.poll() is None
    drive.kill()
    return ["driver.anywhen"] if alive else []


def worker_dies_at(point: str) -> Trial:
    def trial(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
        run, notes = plan(folder), folder / "notes"
        drive = Drive(run, cluster.address, fault=f"{point}:kill@{rng.randint(1, 8)}", notes=notes)
        assert drive.wait() == 0, drive.text()
        assert [event["kind"] for event in events(run, "worker lost")] == ["worker"]
        return [path.name for path in notes.iterdir()]

    return trial


def worker_dies_anywhen(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder, 60)
    drive = Drive(run, cluster.address)
    under_way(run, drive)
    time.sleep(rng.uniform(0.0, 1.0))
    victims = workers_of(run)
    for pid in victims[: rng.randint(1, 2)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert drive.wait() == 0, drive.text()
    return ["worker.anywhen"] if victims else []


def node_dies(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run, node = plan(folder, 60, 8.0), cluster.add()
    drive = Drive(run, cluster.address)
    under_way(run, drive, rng.randint(1, 40))
    cluster.remove(node)
    assert drive.wait() == 0, drive.text()
    return ["node.killed"]


def raylet_dies(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run, node = plan(folder, 60, 8.0), cluster.add()
    drive = Drive(run, cluster.address)
    under_way(run, drive, rng.randint(1, 40))
    os.kill(cluster.raylet(node), signal.SIGKILL)
    assert drive.wait() == 0, drive.text()
    cluster.remove(node)
    return ["raylet.killed"]


def node_freezes(seconds: float) -> Trial:
    """A node that stops answering, as behind a cut cable, for shorter or longer than the health check allows."""

    def trial(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
        run, node = plan(folder, 60, 8.0), cluster.add()
        drive = Drive(run, cluster.address)
        under_way(run, drive, rng.randint(1, 20))
        stopped = _family(cluster.raylet(node))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert drive.wait() == 0, drive.text()
        cluster.remove(node)
        return [f"node.frozen.{seconds:.0f}s"]

    return trial


def _family(pid: int) -> list[int]:
    import psutil

    parent = psutil.Process(pid)
    return [pid, *(child.pid for child in parent.children(recursive=True))]


def node_joins(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder, 80, 8.0)
    drive = Drive(run, cluster.address)
    under_way(run, drive)
    node = cluster.add()
    assert drive.wait() == 0, drive.text()
    joined = len(events(run, "node joined"))
    cluster.remove(node)
    return ["node.joined"] if joined >= 2 else []


def head_dies(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """The head goes for good; a new one comes up, and the same command goes on there."""
    os.environ[GCS_PATIENCE] = "5"
    run = plan(folder, 60, 8.0)
    try:
        doomed = Cluster(nodes=1)
        try:
            drive = Drive(run, doomed.address)
            under_way(run, drive, rng.randint(1, 30))
        finally:
            doomed.close()
        assert drive.wait() != 0, drive.text()
    finally:
        del os.environ[GCS_PATIENCE]
    return ["head.killed"]


def disk_fills(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """A tmpfs of 6 MB fills up while records are committed; a fault in its place where mounting is not allowed."""
    with _small_disk(folder / "run") as mounted:
        run, notes = plan(folder, 200, 0.0), folder / "notes"
        if not mounted:
            drive = Drive(run, cluster.address, fault="commit.before_rename:raise@2", notes=notes)
        else:
            drive = Drive(run, cluster.address)
            wait_for(lambda: bool(events(run, "begin")), "the driver's beginning")
            filler = run / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as handle:
                while True:
                    handle.write(b"x" * 4096)
        assert drive.wait() == 1, drive.text()
        assert "make room" in drive.text(), drive.text()
        if mounted:
            filler.unlink()
            finish(run, cluster.address)
            shutil.copytree(run, folder / "copy")
        return ["disk.full"]


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[bool]:
    place.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], capture_output=True
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)
            copy = place.parent / "copy"
            if copy.exists():
                place.rmdir()
                copy.rename(place)


def records_break(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """A flipped byte, a cut or a missing file among the records of a run that is half or wholly done."""
    run = plan(folder)
    drive = Drive(run, cluster.address)
    if rng.random() < 0.5:
        under_way(run, drive)
        drive.kill()
    else:
        assert drive.wait() == 0, drive.text()
    victims = sorted((run / "records").rglob("*.parquet"))
    victim = rng.choice(victims)
    harm = rng.choice(["flip", "cut", "missing"])
    if harm == "flip":
        data = bytearray(victim.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
    elif harm == "cut":
        os.truncate(victim, rng.randrange(victim.stat().st_size))
    else:
        victim.unlink()
    return [f"records.{harm}"]


def two_drivers(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder, 60)
    first = Drive(run, cluster.address)
    wait_for(lambda: bool(events(run, "begin")), "the first driver's beginning")
    second = Drive(run, cluster.address)
    assert second.wait() == 1
    assert "another driver" in second.text()
    assert first.wait() == 0, first.text()
    return ["driver.second"]


def clock_goes_back(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder, 60)
    drive = Drive(run, cluster.address, clock_back_s=rng.uniform(60, 1e6))
    under_way(run, drive)
    drive.set_clock_back()
    assert drive.wait() == 0, drive.text()
    times = [event["at"] for event in events(run, "begin") + events(run, "end")]
    return ["clock.back"] if times != sorted(times) else []


TRIALS: dict[str, Trial] = {
    **{f"driver at commit.{point}": driver_dies_at(f"commit.{point}") for point in COMMIT_POINTS},
    "driver at driver.dispatched": driver_dies_at("driver.dispatched"),
    "driver at driver.collected": driver_dies_at("driver.collected"),
    "driver at any moment": driver_dies_anywhen,
    "worker at worker.job": worker_dies_at("worker.job"),
    "worker at worker.part": worker_dies_at("worker.part"),
    "worker at any moment": worker_dies_anywhen,
    "node killed": node_dies,
    "raylet killed": raylet_dies,
    "node frozen shorter than the health check": node_freezes(2.0),
    "node frozen longer than the health check": node_freezes(12.0),
    "node joins": node_joins,
    "head lost": head_dies,
    "disk full": disk_fills,
    "records broken": records_break,
    "two drivers": two_drivers,
    "clock set back": clock_goes_back,
}
