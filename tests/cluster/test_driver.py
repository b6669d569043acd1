"""The driver on a real Ray: whole runs of a scripted target, and what becomes of failures."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from raykit import Cluster
from runkit import ARMS, CARRIED, make_run, planned, whole

from dfbench.cluster import deadlines, driver, notice, pool, session, start, upkeep
from dfbench.cluster.driver import Options, Progress
from dfbench.cluster.events import shard_log
from dfbench.cluster.failures import classify
from dfbench.cluster.head import read_head
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.notice import Work
from dfbench.cluster.pool import Device, Member, Node
from dfbench.cluster.stack import DEVICE_LABEL
from dfbench.errors import ClusterError, DfbenchError, RunError, UsageError
from dfbench.workers.spec import ArmSpec, TargetSpec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = Cluster(nodes=1, cpus=4)
    yield cluster.address
    cluster.close()


def drive(run: Path, address: str, **options: Any) -> driver.Result:
    return driver.run(run, Options(address=address, **{"commit_s": 0.2, "grace_s": 1.0, **options}))


def rows(run: Path, table: str) -> list[dict[str, Any]]:
    with Ledger.open(run, readonly=True) as ledger:
        return pa.concat_tables([pq.read_table(run / f.name) for f in ledger.files(table)]).to_pylist()


def test_a_run_on_a_ray_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, 6).close()
    said: list[str] = []

    def live_nodes() -> list[Node]:
        nodes = whole_look()
        said.extend(node.labels.get(DEVICE_LABEL, "") for node in nodes)
        return nodes

    whole_look = pool.live_nodes
    monkeypatch.setattr(pool, "live_nodes", live_nodes)
    seen: list[Progress] = []
    files: list[Path] = []
    options = Options(workers_per_node=1, device=start.device_name())
    before = session.folders()
    result = driver.run(tmp_path, options, on_progress=seen.append, on_files=files.append)
    assert set(said) == set(start.device_label().values())  # known before a worker is there
    assert (result.state, result.counts.done, result.counts.failed) == ("done", 12, 0)
    assert upkeep.verify(tmp_path) == []
    assert seen[-1].counts.done == 12
    assert files
    with Ledger.open(tmp_path) as ledger:
        (worker,) = ledger.workers()
        assert worker.left_at is not None
        assert worker.facts["eos_ids"] == []
    assert "attempt 1 on" in shard_log(tmp_path, "s0").read_text()
    assert session.folders() == before  # Ray's own logs of a run that went well are nobody's business


def test_a_finished_run_needs_no_ray(tmp_path: Path, address: str) -> None:
    make_run(tmp_path, 2).close()
    drive(tmp_path, address)
    result = drive(tmp_path, "192.0.2.1:1")  # nobody answers there
    assert result.counts.done == 4


def test_only_what_is_missing_runs(tmp_path: Path, address: str) -> None:
    make_run(tmp_path, 4).close()
    drive(tmp_path, address)
    (victim, *_) = [name for name in _files(tmp_path) if "jobs" in name]
    (tmp_path / victim).unlink()
    result = drive(tmp_path, address)
    assert result.counts.done == 8
    assert any("will run again" in note for note in result.notes)
    assert upkeep.verify(tmp_path) == []


def _files(run: Path) -> list[str]:
    with Ledger.open(run, readonly=True) as ledger:
        return [file.name for file in ledger.files()]


@pytest.mark.parametrize("carried", [False, True], ids=["cold", "carried"])
def test_one_worker_and_four_give_the_same_rows(tmp_path: Path, address: str, carried: bool) -> None:
    found = []
    for workers in (1, 4):
        run = tmp_path / str(workers)
        if carried:
            make_run(run, 6, arms=CARRIED, plan=whole(6), period=5, eos_at=17).close()
        else:
            make_run(run, 12, period=5, eos_at=17).close()
        assert drive(run, address, workers_per_node=workers).state == "done"
        found.append(_comparable(run))
    assert found[0] == found[1]
    assert len(found[0][0]) == (12 if carried else 24)


def _comparable(run: Path) -> tuple[list[Any], list[Any]]:
    """Tokens and steps of every planned job, timing and worker aside."""
    jobs = {row["job_id"]: (row["output_ids"], row["finish_reason"]) for row in rows(run, "jobs") if not row["warmup"]}
    names = ("job_id", "step", "position", "queries", "drafted", "depth", "accepted", "emitted")
    steps = sorted(tuple(row[name] for name in names) for row in rows(run, "steps") if not row["warmup"])
    return sorted(jobs.items()), steps


def test_a_job_that_raises_fails_alone(tmp_path: Path, address: str) -> None:
    make_run(tmp_path, 3, arms=(*ARMS, ArmSpec("broken", "no-such-drafter")), warmups=0).close()
    result = drive(tmp_path, address)
    assert (result.state, result.counts.done, result.counts.failed) == ("done", 6, 3)
    with Ledger.open(tmp_path) as ledger:
        failures = [failure for failure, _ in ledger.failures()]
    assert {failure.kind for failure in failures} == {"error"}
    assert all("no-such-drafter" in failure.message and failure.node for failure in failures)
    assert upkeep.verify(tmp_path) == []
    assert "no-such-drafter" in shard_log(tmp_path, "s0").read_text()


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[Progress], None]]:
    """Holds workers at a job of theirs until `when` holds, asked as the driver reports: a moment nobody can miss."""

    def hold(at: int, when: Callable[[], Any]) -> Callable[[Progress], None]:
        notes = tmp_path / "notes"
        notes.mkdir()
        monkeypatch.setenv("DFBENCH_FAULT", f"worker.job:hold@{at}")
        monkeypatch.setenv("DFBENCH_FAULT_DIR", str(notes))

        def look(_: Progress) -> None:
            if any(notes.glob("worker.job.[0-9]*")) and not (notes / "worker.job.go").exists() and when():
                (notes / "worker.job.go").touch()

        return look

    return hold


def logged(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / "log" / "driver.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["event"] == event]


def test_a_job_past_its_deadline_is_stopped(tmp_path: Path, address: str, held: Any) -> None:
    run = tmp_path / "run"
    make_run(run, 1, arms=(ArmSpec("ar", "ar"),), warmups=0, deadline_s=0.5).close()
    look = held(1, lambda: logged(run, "job told to stop"))
    result = driver.run(run, Options(address=address, grace_s=60.0), on_progress=look)
    assert (result.counts.done, result.counts.failed) == (0, 1)
    with Ledger.open(run) as ledger:
        assert [failure.kind for failure, _ in ledger.failures()] == ["deadline"]


def test_a_job_that_does_not_move_is_cut_off_and_its_worker_replaced(tmp_path: Path, address: str) -> None:
    arms = (ArmSpec("ar", "ar"),)
    make_run(tmp_path, 1, arms=arms, warmups=0, step_ms=60_000).close()
    result = drive(tmp_path, address, progress_s=1.0, grace_s=0.5)
    assert (result.state, result.counts.failed) == ("done", 1)
    with Ledger.open(tmp_path) as ledger:
        ((failure, _),) = ledger.failures()
    assert failure.kind == "stalled"
    assert "its worker was replaced" in failure.message


def test_a_cancel_from_elsewhere_ends_the_run_soon(tmp_path: Path, address: str, held: Any) -> None:
    run = tmp_path / "run"
    make_run(run, 40).close()

    def cancelled() -> bool:
        """Cancels as another process would, once some jobs are done; whether the driver has noticed."""
        with Ledger.open(run) as ledger:
            if ledger.state != "cancelled" and ledger.counts().done:
                ledger.cancel()
        return any("the run was cancelled" in note["text"] for note in logged(run, "note"))

    look = held(7, cancelled)  # of each worker; the first two are its warm-up
    result = driver.run(run, Options(address=address, commit_s=0.2, workers_per_node=2), on_progress=look)
    assert result.state == "cancelled"
    assert 0 < result.counts.done < 80
    assert result.counts.cancelled == 80 - result.counts.done
    assert upkeep.verify(run) == []
    with Ledger.open(run) as ledger:
        assert ledger.resume() == result.counts.cancelled


def test_a_job_that_a_cancel_stops_is_cancelled_and_not_failed(tmp_path: Path, address: str) -> None:
    make_run(tmp_path, 4, plan=planned(4, cap=2000), warmups=0, step_ms=50).close()

    def look(now: Progress) -> None:
        with Ledger.open(tmp_path) as ledger:
            if now.in_flight == 2 and ledger.state != "cancelled":
                ledger.cancel()

    options = Options(address=address, workers_per_node=2, progress_s=4.0, grace_s=60.0)
    result = driver.run(tmp_path, options, on_progress=look)
    assert (result.state, result.counts.cancelled, result.counts.failed) == ("cancelled", 8, 0)
    with Ledger.open(tmp_path) as ledger:
        assert [failure.kind for failure, _ in ledger.failures()] == ["cancelled"] * 2
        assert ledger.resume() == 8
        assert len(ledger.pending(9)) == 4


def test_a_device_that_breaks_fails_its_job_and_its_worker_is_replaced(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("DFBENCH_FAULT", "worker.job:break@2")
    monkeypatch.setenv("DFBENCH_FAULT_DIR", str(notes))  # once, whoever gets there
    make_run(run, 3, warmups=0).close()
    result = drive(run, address, workers_per_node=1)
    assert (result.state, result.counts.done, result.counts.failed) == ("done", 5, 1)
    with Ledger.open(run) as ledger:
        ((failure, _),) = ledger.failures()
        first, second = ledger.workers()
    assert (failure.kind, failure.shard_id, failure.worker_id) == ("device", "s0", first.worker_id)
    assert first.left_at is not None and second.worker_id != first.worker_id
    assert upkeep.verify(run) == []


def test_a_shard_that_kills_its_workers_fails_after_a_few_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFBENCH_FAULT", "worker.job:kill")
    make_run(tmp_path, 1, warmups=0).close()
    before = session.folders()
    result = drive(tmp_path, "local", max_attempts=2, workers_per_node=1)
    assert (result.state, result.counts.failed) == ("done", 2)
    assert any("2 attempts were lost (worker)" in note for note in result.notes)
    (kept,) = session.folders() - before  # what killed them may be in Ray's own logs
    assert result.notes[-1] == f"Ray's own logs of what failed are kept in {kept}." and (kept / "logs").is_dir()
    session.remove(kept)
    assert not kept.exists()
    with Ledger.open(tmp_path) as ledger:
        assert [(f.kind, f.attempt, f.job_id) for f, _ in ledger.failures()] == [
            ("worker", 1, None),
            ("worker", 2, None),
        ]


def test_a_full_disk_is_named_by_the_folder_that_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "r", 1).close()
    for file, named in ((tmp_path / "r" / "records" / "f", tmp_path / "r"), (Path("/elsewhere/f"), Path("/elsewhere"))):

        def full(*_: object, file: Path = file, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

        monkeypatch.setattr(pool, "connect", full)
        with pytest.raises(DfbenchError, match=rf"written to {named} \(\[Errno 28\]"):
            driver.run(tmp_path / "r")


def test_a_node_on_which_everything_fails_is_set_aside(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFBENCH_FAULT", "worker.job:kill")
    make_run(tmp_path, 9, warmups=0).close()
    with pytest.raises(ClusterError, match=r"every node is set aside \(\d failures in a row"):
        drive(tmp_path, address, max_attempts=9, poison_after=2, workers_per_node=1)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.state == "planned"
        assert ledger.counts().pending == 18


def test_a_second_driver_is_refused(tmp_path: Path, address: str) -> None:
    make_run(tmp_path, 1).close()
    with driver.driver_lock(tmp_path), pytest.raises(RunError, match="another driver"):
        drive(tmp_path, address)


def test_a_device_that_no_node_has_is_refused_at_once_with_those_there_are(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, 1).close()
    with pytest.raises(UsageError, match=r"no node has a device 'nosuch', only .+: write --device with one of these"):
        drive(tmp_path, address, device="nosuch")  # known once a worker is there: these nodes have no labels
    bare, hired = pool.live_nodes, logged(tmp_path, "worker hired")
    monkeypatch.setattr(pool, "live_nodes", lambda: [node._replace(labels={DEVICE_LABEL: "cpu_x"}) for node in bare()])
    with pytest.raises(UsageError, match="no node has a device 'nosuch', only cpu x:"):
        drive(tmp_path, address, device="nosuch")  # known before one is
    assert logged(tmp_path, "worker hired") == hired
    with pytest.raises(ClusterError, match=r"no device.* could be had for \d+ s: `dfbench nodes` says what is wrong"):
        drive(tmp_path, address, device="nosuch", patience_s=2.0)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.counts().pending == 2


@pytest.fixture
def hog(address: str) -> Iterator[Callable[[], None]]:
    """Somebody else who uses all of the cluster, until the function given here is called or the test ends."""

    class Hog:
        pass

    def end() -> None:
        ray.kill(ray.get_actor("hog", namespace="others"))

    pool.connect(address)
    ray.remote(num_cpus=4)(Hog).options(name="hog", namespace="others", lifetime="detached").remote()
    ray.get_actor("hog", namespace="others")
    ray.shutdown()
    yield end
    pool.connect(address)
    with contextlib.suppress(ValueError):  # it has ended
        end()
    ray.shutdown()


def test_devices_that_others_use_are_waited_for(
    tmp_path: Path, address: str, hog: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, 1).close()
    monkeypatch.setattr(pool, "FREE_WITHIN_S", 0.5)
    with pytest.raises(ClusterError, match=r"no device.* could be had for \d+ s: all are in use"):
        drive(tmp_path, address, patience_s=0.5)
    waited: list[int] = []

    def look(now: Progress) -> None:
        if now.waiting and not waited:
            waited.append(now.waiting)
            hog()

    options = Options(address=address, workers_per_node=1)
    assert driver.run(tmp_path, options, on_progress=look).counts.done == 2
    assert waited == [1]


def test_the_time_for_loading_begins_once_a_worker_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(Device(Node("n", "n", 1, 0, {}), 0, 1, 0), "w", None, loading="target", arriving="first", since=0.0)
    monkeypatch.setattr(deadlines.ray, "wait", lambda refs, timeout: ([], refs))
    assert deadlines.check(member, Options(setup_s=0.0)) is None
    monkeypatch.setattr(deadlines.ray, "wait", lambda refs, timeout: (refs, []))
    assert deadlines.check(member, Options(setup_s=60.0)) is None
    found = deadlines.check(member, Options(setup_s=-1.0))
    assert found is not None and (found.what, found.kind) == ("lost", "setup")


def test_others_can_see_what_a_driver_works_on(tmp_path: Path, address: str, held: Any) -> None:
    run = tmp_path / "run"
    make_run(run, 4).close()
    seen: list[Work] = []

    def shown() -> list[Work]:
        """What the head says while the worker is in its second shard and its first is committed."""
        seen[:] = [work for work in notice.read(read_head(address)).values() if work.shards and work.rate]
        return seen

    options = Options(address=address, workers_per_node=1, commit_s=0.2)
    result = driver.run(run, options, on_progress=held(5, shown))
    assert result.state == "done"
    assert [work.shards for work in seen] == [["s1"]]
    assert notice.read(read_head(address)) == {}


def test_the_first_shard_is_seen_at_work_before_anything_is_committed(tmp_path: Path, address: str, held: Any) -> None:
    run = tmp_path / "run"
    make_run(run, 2).close()
    seen: dict[str, str] = {}

    def running() -> dict[str, str]:
        with Ledger.open(run, readonly=True) as ledger:
            seen.update(ledger.running())
        return seen

    result = driver.run(run, Options(address=address, workers_per_node=1), on_progress=held(1, running))
    assert result.state == "done"
    assert list(seen) == ["s0"]


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, 1).close()
    with pytest.raises(ClusterError, match=r"nobody answers at 127\.0\.0\.1:1"):
        drive(tmp_path, "127.0.0.1:1")
    with Ledger.open(tmp_path) as ledger:
        assert ledger.state == "planned"


def node(name: str, cpus: int = 4, gpus: int = 0, **labels: str) -> Node:
    return Node(name, name, cpus, gpus, {key.replace("_", "/"): value for key, value in labels.items()})


def test_where_workers_live() -> None:
    box, gpus = node("box"), node("gpus", 16, 2)
    torch, scripted = TargetSpec(), TargetSpec(kind="scripted")
    assert [device.key for device in pool.devices([box], torch)] == [("box", 0)]
    assert pool.devices([box], torch)[0].cpus == 4
    assert [device.key for device in pool.devices([box, gpus], torch)] == [("gpus", 0), ("gpus", 1)]
    assert {device.gpus for device in pool.devices([box, gpus], torch)} == {1.0}
    assert len(pool.devices([box, gpus], TargetSpec(device="cpu"))) == 2
    assert pool.devices([box], TargetSpec(device="cuda")) == []
    assert len(pool.devices([box, gpus], scripted)) == 20
    shared = pool.devices([box], scripted, workers_per_node=8)
    assert len(shared) == 8
    assert sum(device.cpus for device in shared) <= 4
    assert pool.devices([node("head", 0)], scripted) == []


def test_one_kind_of_device_only() -> None:
    old, new = (
        node("old", 8, 1, dfbench_device="GeForce-RTX-3090"),
        node("new", 8, 1, dfbench_device="GeForce-RTX-5090"),
    )
    assert [d.node.name for d in pool.devices([old, new], TargetSpec(), device="RTX 5090")] == ["new"]


def test_failures_are_told_apart() -> None:
    from ray import exceptions

    assert classify(exceptions.OutOfMemoryError("too much"))[0] == "memory"
    assert classify(exceptions.WorkerCrashedError())[0] == "worker"
    assert classify(exceptions.NodeDiedError("gone"))[0] == "node"
    assert classify(exceptions.ActorUnavailableError("gone", b"0" * 16))[0] == "node"
    assert classify(exceptions.RayTaskError("f", "trace", KeyError("x")))[0] == "error"
    assert classify(exceptions.ActorDiedError())[0] == "worker"
    assert classify(exceptions.ObjectLostError("0" * 56, None, "x"))[0] == "object"
