"""The ledger: plans come in whole, states follow from what happened, one driver a run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runkit import ARMS, make_run, planned, prompt

from dfbench.cluster import ledger_schema, run_place
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import Failure, Outcome, RecordFile
from dfbench.cluster.run_place import driver_alive, driver_lock, require_usable
from dfbench.cluster.runspec import PlannedShard, RunSpec, ShardReader, write_prompts
from dfbench.errors import RunError
from dfbench.workers.spec import JobSpec, TargetSpec


def failure(shard: str, job: str | None, attempt: int = 1, kind: str = "error") -> Failure:
    return Failure(shard, job, attempt, kind, "message", "node", "worker")


def test_a_plan_comes_back_in_order(tmp_path: Path) -> None:
    with make_run(tmp_path, 5) as ledger:
        rows = ledger.pending(10)
        assert [row.shard_id for row in rows] == ["s0", "s1", "s2", "s3", "s4"]
        assert [job.arm for job in rows[1].jobs] == ["pld", "ar"]
        assert rows[0].attempt == 1
        assert ledger.counts().pending == 10
        assert ledger.counts().total == 10
        assert [row.shard_id for row in ledger.pending(2, after=rows[1].position)] == ["s2", "s3"]
        assert ledger.state == "planned"


def test_a_reader_puts_shards_together(tmp_path: Path) -> None:
    with make_run(tmp_path, 3, warmups=2) as ledger:
        reader = ShardReader(tmp_path, ledger.run)
        shard = reader.shard(ledger.pending(1)[0])
    assert shard.prompts == (prompt("p0"),)
    assert shard.warmup == (prompt("warm0"), prompt("warm1"))
    assert shard.arms == ARMS
    assert shard.max_new_tokens == 12
    with pytest.raises(RunError, match="no prompt 'p9'"):
        reader.prompt("w", "p9")


def test_a_failed_plan_leaves_no_ledger(tmp_path: Path) -> None:
    def broken() -> object:
        yield from planned(2)
        yield PlannedShard("s0", "w", ["p0"], [], 4)  # a shard id that is already there

    run = RunSpec("run", "test", "sha", TargetSpec(kind="scripted"), ARMS)
    with pytest.raises(sqlite3.IntegrityError):
        Ledger.create(tmp_path, run, broken())  # type: ignore[arg-type]
    assert not run_place.exists(tmp_path)
    with Ledger.create(tmp_path, run, planned(2)) as ledger:
        assert ledger.counts().pending == 4
    with pytest.raises(RunError, match="already holds a run"):
        Ledger.create(tmp_path, run, planned(2))


def test_a_commit_settles_jobs_and_shards(tmp_path: Path) -> None:
    file = RecordFile("records/0/jobs-000000.parquet", "jobs", 0, 3, 100, "ab")
    with make_run(tmp_path, 3) as ledger:
        outcomes = [
            Outcome("s0", 1, "worker", ("j0-ar", "j0-pld")),
            Outcome("s1", 1, "worker", ("j1-ar",), (failure("s1", "j1-pld"),)),
            Outcome("s2", 1, "worker", ("j2-ar",)),
        ]
        ledger.commit([file], outcomes, {file.name: {"s0", "s1", "s2"}})
        assert (ledger.counts().done, ledger.counts().failed, ledger.counts().pending) == (4, 1, 1)
        assert ledger.counts().shards == {"done": 1, "failed": 1, "pending": 1}
        assert ledger.files() == [file]
        assert ledger.shards_of(file.name) == {"s0", "s1", "s2"}
        assert ledger.counts_by_arm()["pld"].failed == 1
        (row,) = ledger.pending(9)
        assert (row.shard_id, row.attempt) == ("s2", 2)
        assert ledger.end() == "planned"


def test_what_is_left_of_a_shard_runs_beside_a_fresh_reference(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        ledger.commit([], [Outcome("s0", 1, "w", ("j0-ar",), (failure("s0", "j0-pld"),))], {})
        assert ledger.pending(9) == []
        assert ledger.end() == "done"
        assert ledger.retry() == 1
        assert ledger.state == "planned"
        (row,) = ledger.pending(9)
        assert [(job.arm, job.pair_only) for job in row.jobs] == [("ar", True), ("pld", False)]
        assert row.attempt == 2
        assert row.strikes == 0


def test_a_later_turn_needs_the_earlier_answers_of_the_reference(tmp_path: Path) -> None:
    jobs = [
        JobSpec(f"{arm}{turn}", "w", "p0" if not turn else f"p0#{turn + 1}", arm, turn=turn)
        for turn in range(3)
        for arm in ("ar", "pld")
    ]
    plan = iter([PlannedShard("s", "w", ["p0"], jobs, 8)])
    with make_run(tmp_path, 1, plan=plan) as ledger:
        done = tuple(job.job_id for job in jobs if job.job_id != "pld1")
        ledger.commit([], [Outcome("s", 1, "w", done, (failure("s", "pld1"),))], {})
        ledger.retry()
        (row,) = ledger.pending(9)
    assert [(job.job_id, job.pair_only) for job in row.jobs] == [("ar0", True), ("ar1", True), ("pld1", False)]


def test_lost_attempts_count_until_they_are_forgiven(tmp_path: Path) -> None:
    with make_run(tmp_path, 2) as ledger:
        ledger.fail_attempt(failure("s0", None, 1, "worker"))
        ledger.fail_attempt(failure("s0", None, 2, "node"))
        row = ledger.pending(1)[0]
        assert (row.attempt, row.strikes) == (3, 2)
        ledger.fail_attempt(failure("s0", None, 3, "worker"), final=True)
        assert ledger.counts().failed == 2
        assert [f.kind for f, _ in ledger.failures("s0")] == ["worker", "node", "worker"]
        assert ledger.retry(kind="node") == 0
        assert ledger.retry(kind="worker") == 2
        row = ledger.pending(1)[0]
        assert (row.attempt, row.strikes) == (4, 0)


def test_a_job_that_failed_leaves_the_rest_of_its_shard(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        ledger.fail_jobs([failure("s0", "j0-pld", kind="deadline")])
        (row,) = ledger.pending(1)
        assert [job.job_id for job in row.jobs] == ["j0-ar"]
        assert row.attempt == 2


def test_cancel_and_resume(tmp_path: Path) -> None:
    with make_run(tmp_path, 2) as ledger:
        ledger.commit([], [Outcome("s0", 1, "w", ("j0-ar", "j0-pld"))], {})
        assert ledger.cancel() == 2
        assert ledger.state == "cancelled"
        assert ledger.pending(9) == []
        assert ledger.end() == "cancelled"
        assert ledger.resume() == 2
        assert [row.shard_id for row in ledger.pending(9)] == ["s1"]


def test_another_process_is_noticed(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as mine, Ledger.open(tmp_path) as other:
        before = mine.data_version()
        assert mine.data_version() == before
        other.cancel()
        assert mine.data_version() != before


def test_running_is_what_the_last_driver_noted(tmp_path: Path) -> None:
    with make_run(tmp_path, 2) as ledger:
        ledger.begin()
        ledger.set_running({"s0": "worker"})
        assert ledger.running() == {"s0": "worker"}
        ledger.begin()
        assert ledger.running() == {}
        assert len(ledger.pending(9)) == 2


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        with pytest.raises(RunError, match="no shard 'x'"):
            ledger.retry(["x"])
        with pytest.raises(RunError, match="did you mean 'node'"):
            ledger.retry(kind="nod")
    with pytest.raises(RunError, match="holds no run"):
        Ledger.open(tmp_path / "nothing")


def test_other_software_is_refused_unless_told(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        ledger.check_versions()
        changed = {**ledger_schema.versions(), "torch": "9.9"}
        with pytest.raises(RunError, match=r"torch .* → 9\.9"):
            ledger.check_versions(changed)
        ledger.check_versions(changed, allow_change=True)
        ledger.check_versions(changed)
        assert "9.9" in ledger.meta("version_changes")


def test_a_newer_ledger_is_refused(tmp_path: Path) -> None:
    with make_run(tmp_path, 1) as ledger:
        ledger.set_meta("ledger_version", "99")
    with pytest.raises(RunError, match="newer dfbench"):
        Ledger.open(tmp_path)


def test_a_reader_does_not_need_to_write(tmp_path: Path) -> None:
    make_run(tmp_path, 1).close()
    with Ledger.open(tmp_path, readonly=True) as ledger:
        assert ledger.counts().pending == 2
        with pytest.raises(sqlite3.OperationalError):
            ledger.cancel()


def test_one_driver_a_run(tmp_path: Path) -> None:
    assert not driver_alive(tmp_path)
    with driver_lock(tmp_path):
        assert driver_alive(tmp_path)
        with pytest.raises(RunError, match=f"process {os.getpid()}"), driver_lock(tmp_path):
            pass
    assert not driver_alive(tmp_path)


def test_a_worker_whose_facts_are_no_json_is_one_sentence(tmp_path: Path) -> None:
    with make_run(tmp_path / "r", 1) as ledger:
        ledger.add_worker("box-0", "box", "a CPU", {})
        with ledger.transaction() as db:
            db.execute("update workers set facts = '{'")
        with pytest.raises(RunError, match="is damaged: what it says of a worker is no JSON"):
            ledger.workers()


def test_who_only_looks_keeps_no_driver_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver_lock(tmp_path):
        pass
    with (tmp_path / "driver.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        monkeypatch.setattr(run_place.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with driver_lock(tmp_path):
            assert driver_alive(tmp_path)


def test_a_seat_that_was_removed_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that fails takes its lock file away: who had opened it already would share the run with the next."""
    with (tmp_path / "driver.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)

        def fail(_: float) -> None:
            (tmp_path / "driver.lock").unlink()
            fcntl.flock(first, fcntl.LOCK_UN)

        monkeypatch.setattr(run_place.time, "sleep", fail)
        with pytest.raises(RunError, match="another driver"), driver_lock(tmp_path):
            pass
    with driver_lock(tmp_path):
        assert driver_alive(tmp_path)


def test_a_seat_is_looked_at_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver_lock(tmp_path):
        pass
    opened = Path.open

    def readonly(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", readonly)
    assert not driver_alive(tmp_path)
    (tmp_path / "driver.lock").unlink()
    assert not driver_alive(tmp_path)


def test_death_gives_the_lock_back(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from dfbench.cluster.run_place import driver_lock\n"
        "with driver_lock(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        assert driver_alive(tmp_path)
        os.kill(held.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, held.pid, os.WSTOPPED)
        with pytest.raises(RunError, match=f"suspended: let it go on with `kill -CONT {held.pid}`"):
            driver_lock(tmp_path).__enter__()
        os.kill(held.pid, signal.SIGCONT)
    finally:
        held.kill()
        held.communicate()
    with driver_lock(tmp_path):
        assert driver_alive(tmp_path)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_network_file_systems_are_refused(tmp_path: Path, kind: str) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n"
    with pytest.raises(RunError, match=rf"network file system \({kind}\)"):
        require_usable(tmp_path / "runs" / "a", mounts)
    require_usable(tmp_path / "a", "/dev/sda / ext4 rw 0 0\n")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="not a directory"):
        require_usable(tmp_path / "file" / "run")


def test_prompts_are_written_whole(tmp_path: Path) -> None:
    def failing() -> object:
        yield prompt("a")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_prompts(tmp_path, failing())  # type: ignore[arg-type]
    assert not (tmp_path / "prompts.parquet").exists()
