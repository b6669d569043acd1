"""The chaos trials: each breaks something at a known point, then submits again and counts the jobs.

A trial takes a folder of its own, a cluster and a seeded random generator, and returns which faults were reached. A
fault cannot be missed: where it comes from outside, the run is held at a named point until it has happened (`Held`).

What is promised after each: every planned job is there exactly once, with sound rows; no worker outlives its driver;
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

import network
import psutil
from kit import Drive, Held, committed, done, events, live_files, tally, wait_for, workers_of
from raykit import Cluster
from runkit import make_run

GCS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long a driver looks for a head that is gone before Ray ends the process."""

COMMIT_POINTS = ("before_write", "before_rename", "after_rename", "inside", "after")
SHARDS = 16
HOLD_AT = 6
"""Every worker comes to this job at the latest: its warm-up is the first two of them."""


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

    Raises AssertionError where a promise is broken, network.NotPossible where this machine cannot make the trial.
    """
    began = time.monotonic()
    folder.mkdir(parents=True)
    reached = TRIALS[name](folder, cluster, random.Random(seed))
    run = folder / "run"
    if always_again or not done(run):
        finish(run, cluster.address)
    lost, duplicated = tally(run)
    wait_for(lambda: not workers_of(run), f"the end of all workers ({name})", 60)
    assert reached, f"{name}: the fault was not reached"
    return Report(name, reached, lost, duplicated, time.monotonic() - began)


def finish(run: Path, address: str, tries: int = 3) -> Drive:
    """Submit again until the run is done; most trials need it once."""
    for _ in range(tries):
        drive = Drive(run, address)
        if drive.wait() == 0:
            return drive
    raise AssertionError(f"the run did not finish after {tries} submits:\n{drive.text()[-3000:]}")


def plan(folder: Path, shards: int = SHARDS) -> Path:
    """A run of short jobs, two a shard."""
    run = folder / "run"
    make_run(run, shards, step_ms=1.0).close()
    (folder / "notes").mkdir()
    return run


# --- a process dies at a point of its own ----------------------------------------------------------------------------


def driver_dies_at(point: str) -> Trial:
    """With `commit_s` 0 a commit holds at most one shard a worker, so even the third one always comes."""

    def trial(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
        run, notes = plan(folder), folder / "notes"
        fault, workers = f"{point}:kill@{rng.randint(1, 3)}", rng.randint(1, 2)
        drive = Drive(run, cluster.address, fault=fault, notes=notes, commit_s=0.0, workers_per_node=workers)
        assert drive.wait() == -signal.SIGKILL, drive.text()
        return [path.name for path in notes.iterdir()]

    return trial


def worker_dies_at(point: str) -> Trial:
    """A worker has a part a shard at least, and two jobs; it dies at one of the first."""

    def trial(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
        run, notes = plan(folder), folder / "notes"
        drive = Drive(run, cluster.address, fault=f"{point}:kill@{rng.randint(1, SHARDS)}", notes=notes)
        assert drive.wait() == 0, drive.text()
        assert [event["kind"] for event in events(run, "worker lost")] == ["worker"]
        return [path.name for path in notes.iterdir()]

    return trial


# --- something is broken while the run is held ------------------------------------------------------------------------


def driver_dies_anywhen(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """Its worker stops before the last of its jobs, so it is at work whenever it dies."""
    run = plan(folder)
    drive = Drive(run, cluster.address, held=Held("worker.job", SHARDS, folder / "notes"))
    wait_for(lambda: bool(events(run, "begin")), "the driver's beginning")
    time.sleep(rng.uniform(0.0, 4.0))
    assert drive.process.poll() is None, drive.text()
    drive.kill()
    return ["driver.anywhen"]


def worker_dies_anywhen(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """One or both of two workers, at work or held."""
    run = plan(folder)
    held = Held("worker.job", SHARDS, folder / "notes")
    drive = Drive(run, cluster.address, held=held, workers_per_node=2)
    wait_for(lambda: drive.over() or len(workers_of(run)) == 2, "two workers")
    time.sleep(rng.uniform(0.0, 1.0))
    for pid in workers_of(run)[: rng.randint(1, 2)]:
        os.kill(pid, signal.SIGKILL)
    held.release()
    assert drive.wait() == 0, drive.text()
    assert "worker" in [event["kind"] for event in events(run, "worker lost")]
    return ["worker.anywhen"]


def _caught(folder: Path, cluster: Cluster, rng: random.Random, node: object, **options: float) -> tuple[Drive, Held]:
    """A run whose workers, one of them on this node, are held in the middle of a shard."""
    held = Held("worker.job", rng.randint(1, HOLD_AT), folder / "notes")
    drive = Drive(folder / "run", cluster.address, held=held, **options)
    raylet = cluster.raylet(node)
    wait_for(lambda: drive.over() or bool(held.pids() & {*family(raylet)}), "a held job on the node")
    assert not drive.over(), drive.text()
    return drive, held


def node_dies(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run, node = plan(folder), cluster.add(1)
    drive, held = _caught(folder, cluster, rng, node)
    cluster.remove(node)
    # Its workers may outlive it for a moment: released at once, they might end all there is to do.
    wait_for(lambda: drive.over() or bool(events(run, "worker lost")), "the loss of its worker")
    held.release()
    assert drive.wait() == 0, drive.text()
    assert events(run, "worker lost"), drive.text()
    return ["node.killed"]


def raylet_dies(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run, node = plan(folder), cluster.add(1)
    drive, held = _caught(folder, cluster, rng, node)
    os.kill(cluster.raylet(node), signal.SIGKILL)
    wait_for(lambda: drive.over() or bool(events(run, "worker lost")), "the loss of its worker")  # as above
    held.release()
    assert drive.wait() == 0, drive.text()
    assert events(run, "worker lost"), drive.text()
    assert "(raylet)" not in drive.text(), drive.text()  # Ray's own account of it fills pages
    cluster.remove(node)
    return ["raylet.killed"]


def node_freezes(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """A node stops for less time than is given it: nothing is lost and nothing runs elsewhere."""
    run, node = plan(folder), cluster.add(1)
    drive, held = _caught(folder, cluster, rng, node, silence_s=60.0)
    with frozen(cluster.raylet(node)):
        held.release()
        time.sleep(2.0)
    assert drive.wait() == 0, drive.text()
    assert events(run, "worker lost") == []
    cluster.remove(node)
    return ["node.frozen.shortly"]


def node_stays_frozen(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """A node stops until it is given up, by the driver or by Ray's health check, and wakes up when all is done."""
    run, node = plan(folder), cluster.add(1)
    by_driver = rng.random() < 0.5
    drive, held = _caught(folder, cluster, rng, node, silence_s=6.0 if by_driver else 60.0)
    with frozen(cluster.raylet(node)):
        held.release()
        assert drive.wait() == 0, drive.text()
    assert "node" in [event["kind"] for event in events(run, "worker lost")]
    cluster.remove(node)
    return ["node.frozen.given up by " + ("the driver" if by_driver else "the health check")]


def node_joins(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """While the only worker is held, a node joins; it must be at work before either goes on."""
    run = plan(folder)
    held = Held("worker.job", rng.randint(1, HOLD_AT), folder / "notes")
    drive = Drive(run, cluster.address, held=held)
    wait_for(lambda: drive.over() or bool(held.pids()), "a held worker")
    node = cluster.add(1)
    wait_for(lambda: drive.over() or len(held.pids()) > 1, "work on the new node")
    held.release()
    assert drive.wait() == 0, drive.text()
    cluster.remove(node)
    return ["node.joined"] if len(events(run, "node joined")) == 2 else []


def head_dies(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """The head goes for good; a new one comes up, and the same command goes on there."""
    os.environ[GCS_PATIENCE] = "5"
    plan(folder)
    try:
        doomed = Cluster(cpus=1)
        try:
            drive, held = _caught(folder, doomed, rng, doomed.nodes[0])
        finally:
            doomed.close()
        held.release()
        assert drive.wait() != 0, drive.text()
    finally:
        del os.environ[GCS_PATIENCE]
    return ["head.killed"]


def two_drivers(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder)
    held = Held("driver.dispatched", rng.randint(1, SHARDS), folder / "notes")
    first = Drive(run, cluster.address, held=held)
    wait_for(lambda: first.over() or bool(held.pids()), "the first driver at work")
    second = Drive(run, cluster.address)
    assert second.wait() == 1
    assert "another driver" in second.text()
    held.release()
    assert first.wait() == 0, first.text()
    return ["driver.second"]


def clock_goes_back(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    run = plan(folder)
    held = Held("driver.collected", rng.randint(1, SHARDS), folder / "notes")
    drive = Drive(run, cluster.address, held=held, clock_back_s=rng.uniform(60, 1e6))
    wait_for(lambda: drive.over() or bool(held.pids()), "the driver at work")
    drive.set_clock_back()
    held.release()
    assert drive.wait() == 0, drive.text()
    times = [event["at"] for event in events(run, "begin") + events(run, "end")]
    return ["clock.back"] if times != sorted(times) else []


# --- the network -----------------------------------------------------------------------------------------------------


def cable_is_cut(given_up: bool) -> Trial:
    """A node in a network namespace of its own, behind a router; the router's link to it goes down and comes back."""

    def trial(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
        run = plan(folder)
        with network.cable() as cable:
            near = Cluster(cpus=1, address=cable.near)
            try:
                with cable.node(near.address, folder / "node.log") as raylet:
                    silence = rng.choice([6.0, 60.0]) if given_up else 60.0
                    held = Held("worker.job", rng.randint(1, HOLD_AT), folder / "notes")
                    drive = Drive(run, near.address, held=held, silence_s=silence)
                    wait_for(lambda: drive.over() or bool(held.pids() & {*family(raylet)}), "a held job over there")
                    assert not drive.over(), drive.text()
                    cable.cut()
                    held.release()
                    if given_up:
                        assert drive.wait() == 0, drive.text()
                        cable.mend()
                    else:
                        time.sleep(3.0)
                        cable.mend()
                        assert drive.wait() == 0, drive.text()
                    lost = [event["kind"] for event in events(run, "worker lost")]
                    assert ("node" in lost) if given_up else not lost, lost
                    wait_for(lambda: not workers_of(run), "the end of the workers behind the cable", 60)
            finally:
                near.close()
        return ["network.cut.long" if given_up else "network.cut.short"]

    return trial


# --- the disk --------------------------------------------------------------------------------------------------------


def disk_fills(folder: Path, cluster: Cluster, rng: random.Random) -> list[str]:
    """A tmpfs of 6 MB is full when the driver comes to write; a fault in its place where mounting is not allowed."""
    with _small_disk(folder / "run") as mounted:
        run, notes = plan(folder), folder / "notes"
        if not mounted:
            drive = Drive(run, cluster.address, fault="commit.before_rename:raise@2", notes=notes, commit_s=0.0)
        else:
            held = Held("commit.before_write", rng.randint(1, 3), notes)
            drive = Drive(run, cluster.address, held=held, commit_s=0.0)
            wait_for(lambda: drive.over() or bool(held.pids()), "a commit about to write")
            filler = run / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as handle:
                while True:
                    handle.write(b"x" * 4096)
            held.release()
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
    """A flipped byte, a cut or a missing file among the committed records of a run that is half or wholly done."""
    run = plan(folder)
    if rng.random() < 0.5:
        drive = Drive(run, cluster.address, fault="commit.before_write:kill@3", notes=folder / "notes", commit_s=0.0)
        assert drive.wait() == -signal.SIGKILL, drive.text()
    else:
        assert (drive := Drive(run, cluster.address)).wait() == 0, drive.text()
    assert committed(run)
    victim = rng.choice(live_files(run))
    harm = rng.choice(["flip", "cut", "missing"])
    if harm == "flip":
        data = bytearray(victim.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
    elif harm == "cut":
        os.truncate(victim, rng.randrange(victim.stat().st_size))
    else:
        victim.unlink()
    derived = victim.name.startswith("sums-")
    said = "were added up again, since they" if derived else "will run again, since their records"
    assert f"{said} cannot be trusted" in finish(run, cluster.address).text()
    return [f"records.{harm}"]


# --- processes -------------------------------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process and everything below it, for a while."""
    stopped = family(pid)
    for one in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)


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
    "node frozen for less than it is given": node_freezes,
    "node frozen until it is given up": node_stays_frozen,
    "cable cut for less than it is given": cable_is_cut(given_up=False),
    "cable cut until it is given up": cable_is_cut(given_up=True),
    "node joins": node_joins,
    "head lost": head_dies,
    "disk full": disk_fills,
    "records broken": records_break,
    "two drivers": two_drivers,
    "clock set back": clock_goes_back,
}
