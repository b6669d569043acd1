"""submit, status, retry, cancel, demo: what they write, print and exit with; on a local Ray where work is done."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dfbench.cluster import cli_run, driver, plan, progress, runs, status, sweep_file
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.ledger_schema import Counts, Failure, Outcome
from dfbench.cluster.run_place import driver_lock
from dfbench.cluster.runs import find_unfinished, place

Run = Callable[..., Any]

SWEEP = (
    "{name: s, target: scripted, workloads: [{name: w, prompts: 3}], arms: [ar, pld], max_new_tokens: 12, workers: 1}"
)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the sweep s.yaml: three shards of two jobs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SWEEP)
    return tmp_path


def planned(*overrides: str) -> plan.Plan:
    return plan.plan(sweep_file.load("s.yaml", list(overrides)))


def shards(run_dir: Path) -> list[Any]:
    with Ledger.open(run_dir) as ledger:
        return ledger.pending(99)


def settle(run_dir: Path, *, fail: str | None = None) -> None:
    """End every shard without a driver; jobs of the arm `fail` end in an error."""
    with Ledger.open(run_dir) as ledger:
        for row in ledger.pending(99):
            failed = [job for job in row.jobs if job.arm == fail]
            done = tuple(job.job_id for job in row.jobs if job.arm != fail)
            failures = tuple(Failure(row.shard_id, job.job_id, 1, "error", "ValueError: no", "box") for job in failed)
            ledger.commit([], [Outcome(row.shard_id, 1, "box-0", done, failures)], {})
        ledger.end()


# --- where a sweep runs --------------------------------------------------------------------------------------------


def test_a_new_run_has_its_sweep_prompts_and_ledger_and_is_the_latest(desk: Path) -> None:
    made = planned()
    where = place(made)
    assert not where.resumed and not where.run_dir.exists() and where.run_dir.name.startswith("s-2")
    runs.create(where.run_dir, made)
    runs.point_latest(where.run_dir)
    assert (desk / "runs" / "latest").resolve() == where.run_dir.resolve()
    assert sweep_file.load_run(where.run_dir) == made.sweep
    assert {entry.name for entry in where.run_dir.iterdir()} >= {"sweep.yaml", "prompts.parquet", "ledger.db"}
    assert place(made, new=True).run_dir != where.run_dir


def test_an_unfinished_run_of_the_same_sweep_goes_on(desk: Path) -> None:
    made = planned()
    first = place(made).run_dir
    runs.create(first, made)
    assert place(planned("workers=7")) == runs.Place(first, resumed=True)
    assert not place(planned("max_new_tokens=13")).resumed
    assert not place(made, new=True).resumed
    assert place(made, first) == runs.Place(first, resumed=True)
    with Ledger.open(first) as ledger:
        ledger.cancel()
    assert find_unfinished(made.sha) == first
    with Ledger.open(first) as ledger:
        ledger.resume()
    settle(first)
    assert find_unfinished(made.sha) is None and not place(made).resumed


def test_what_an_interrupted_submit_left_is_no_obstacle(desk: Path) -> None:
    target = desk / "mine"
    target.mkdir()
    for name in ("sweep.yaml", "prompts.parquet", ".ledger.db.part"):
        (target / name).write_text("half")
    assert place(planned(), target) == runs.Place(target, resumed=False)
    runs.create(target, planned())
    assert len(shards(target)) == 3


def test_folders_under_runs_that_are_no_runs_are_passed_over(desk: Path) -> None:
    (desk / "runs" / "broken").mkdir(parents=True)
    (desk / "runs" / "broken" / "ledger.db").write_text("not a database, but long enough to be opened as one" * 9)
    assert find_unfinished(planned().sha) is None


def test_latest_is_left_alone_where_it_is_not_ours(desk: Path) -> None:
    (desk / "runs" / "latest").mkdir(parents=True)
    runs.point_latest(desk / "runs" / "a")
    assert (desk / "runs" / "latest").is_dir() and not (desk / "runs" / "latest").is_symlink()


# --- what is on top of a sweep -------------------------------------------------------------------------------------


def test_model_and_workload_options_replace_what_the_sweep_says(desk: Path) -> None:
    sweep = cli_run.effective_sweep(
        "qwen3-8b", ["max_new_tokens=9"], "./m", ["code=a.jsonl", "chat=b.jsonl"], "RTX 5090", 2
    )
    assert (sweep.model.id, sweep.model.revision, sweep.model.dtype) == ("./m", None, "bfloat16")
    code, copyctx, chat = sweep.workloads
    assert (code.file, code.dataset, code.template) == (str(desk / "a.jsonl"), None, None)
    assert copyctx.dataset is not None and chat.file == str(desk / "b.jsonl") and chat.prompts == 30
    assert (sweep.device_filter, sweep.workers_per_node, sweep.max_new_tokens) == ("RTX 5090", 2, 9)


def test_a_dry_run_lists_every_job_and_writes_nothing(desk: Path, dfbench: Run) -> None:
    before = sorted(desk.rglob("*"))
    result = dfbench("submit", "s.yaml", "--dry-run")
    assert result.code == 0 and sorted(desk.rglob("*")) == before
    made = planned()
    assert "6 jobs in 3 shards; arms ar, pld" in result.out
    for shard in made.shards():
        assert f"shard {shard.shard_id}" in result.out
        assert all(job.job_id in result.out for job in shard.jobs)


# --- without Ray ---------------------------------------------------------------------------------------------------


def test_status_of_a_run_with_failures_names_them_and_the_command(desk: Path, dfbench: Run) -> None:
    run_dir = desk / "r"
    runs.create(run_dir, planned())
    with Ledger.open(run_dir) as ledger:
        ledger.add_worker("box-0", "box", "a CPU", {})
    settle(run_dir, fail="pld")
    result = dfbench("status", "r")
    assert result.code == 0 and "3 of 6 jobs done" in result.out and "dfbench retry r" in result.out
    data = json.loads(dfbench("status", "r", "--json").out)
    assert data["state"] == "done" and data["arms"]["pld"] == {
        "done": 0, "failed": 3, "pending": 0, "cancelled": 0, "total": 3,
    }  # fmt: skip
    assert [node["shards_done"] for node in data["nodes"]] == [0]
    assert {failed["kind"] for failed in data["failed"]} == {"error"}
    assert all(failed["log"].endswith(f"{failed['shard_id']}.log") for failed in data["failed"])


def test_status_with_brackets_and_a_torn_log(desk: Path, dfbench: Run) -> None:
    """A prompt's id may look like markup, and a full disk tears the log's lines."""
    run = desk / "r"
    runs.create(run, planned())
    with Ledger.open(run) as ledger, ledger.transaction() as db:
        db.execute("update jobs set state = 'failed', prompt_id = '[/b]' where rowid = 1")
    with driver_lock(run):
        assert "[/b]" in dfbench("status", run).out
        (run / "log").mkdir()
        (run / "log" / "driver.jsonl").write_text('{"event": "begin", "left"')
        assert "[/b]" in dfbench("status", run).out


def test_status_tells_a_driver_at_work_from_one_that_died(desk: Path, dfbench: Run) -> None:
    run_dir = desk / "r"
    runs.create(run_dir, planned())
    assert status.read(run_dir).state == "planned"
    with Ledger.open(run_dir) as ledger:
        ledger.begin()
        assert status.read(run_dir).state == "stopped"
        ledger.add_worker("box-0", "box", "a CPU", {})
        assert ledger.end() == "planned"
        assert status.read(run_dir).state == "stopped"
        ledger.begin()
    log = run_dir / "log" / "driver.jsonl"
    log.parent.mkdir()
    events = [{"event": "stopped", "error": "OSError: of an earlier driver"}, {"event": "begin", "left": 12}]
    events.append({"event": "worker ready"})
    log.write_text("".join(json.dumps({"at": "2020-01-01T00:00:00+00:00", **event}) + "\n" for event in events))
    with driver_lock(run_dir):
        now = status.read(run_dir)
    assert now.state == "running" and now.driver
    assert now.rate is not None and now.eta_s == pytest.approx(6 / now.rate)
    assert now.stopped == ""
    for error, why in (
        ("UsageError: no node has it: write one.", "no node has it: write one."),
        ("KeyboardInterrupt: ", "it was interrupted"),
    ):
        with log.open("a") as file:
            file.write(json.dumps({"event": "begin", "left": 6}) + "\n")
            file.write(json.dumps({"event": "stopped", "error": error}) + "\n")
        assert status.read(run_dir).stopped == why
    assert "the last driver stopped: it was interrupted" in dfbench("status", "r").out


def test_watching_into_a_pipe_says_something_now_and_then(desk: Path, dfbench: Run, monkeypatch: Any) -> None:
    """What another machine sees of `status --watch --address`: lines as it goes, the tables when the driver is gone."""
    runs.create(desk / "r", planned())
    begun = status.read(desk / "r")
    steps = iter([replace(begun, driver=True), begun])
    monkeypatch.setattr(status, "read", lambda _: next(steps))
    monkeypatch.setattr(cli_run.time, "sleep", lambda _: None)
    lines = dfbench("status", "r", "--watch").out.splitlines()
    assert lines[0] == "s, planned, 0 of 6 jobs done"
    text = "\n".join(lines[1:])
    assert "s, planned" in text and "arm" in text


def test_retry_marks_and_cancel_takes_back(desk: Path, dfbench: Run) -> None:
    run_dir = desk / "r"
    runs.create(run_dir, planned())
    settle(run_dir, fail="pld")
    assert "no such failed job" in dfbench("retry", "r", "--kind", "oom").out
    result = dfbench("retry", "r", "--no-run", "--kind", "error")
    assert result.code == 0 and result.out.startswith("3 failed jobs are pending again")
    first = shards(run_dir)[0]
    assert [(job.arm, job.pair_only) for job in first.jobs] == [("ar", True), ("pld", False)]
    assert "3 jobs of" in dfbench("cancel", "r").out
    assert status.read(run_dir).state == "cancelled"


def test_retry_leaves_a_driver_at_work_to_it(desk: Path, dfbench: Run) -> None:
    runs.create(desk / "r", planned())
    settle(desk / "r", fail="ar")
    with driver_lock(desk / "r"):
        result = dfbench("retry", "r")
    assert result.code == 0 and "the driver at work there takes them up" in result.out


def test_a_run_with_failures_ends_with_status_1_and_the_command(desk: Path, dfbench: Run, monkeypatch: Any) -> None:
    """The driver is replaced: it settles the run at once, with failures."""

    def fake(run_dir: Path, *_: object, **__: object) -> driver.Result:
        settle(run_dir, fail="pld")
        with Ledger.open(run_dir) as ledger:
            return driver.Result(ledger.state, ledger.counts(), [])

    monkeypatch.setattr(driver, "run", fake)
    monkeypatch.setattr(cli_run, "headline", lambda _: None)
    result = dfbench("submit", "s.yaml", "--run", "r")
    assert result.code == 1 and result.out.rstrip().endswith("3 of 6 jobs failed; to run them again: dfbench retry r")
    again = dfbench("submit", "s.yaml", "--run", "r")
    assert again.code == 1 and "going on with r: 3 of 6 jobs are done" in again.out


def test_a_run_directory_in_place_of_a_sweep_goes_on_alone(desk: Path, dfbench: Run, monkeypatch: Any) -> None:
    seen: list[driver.Options] = []

    def fake(run_dir: Path, options: driver.Options, **_: object) -> driver.Result:
        seen.append(options)
        settle(run_dir)
        with Ledger.open(run_dir) as ledger:
            return driver.Result(ledger.state, ledger.counts(), [])

    monkeypatch.setattr(driver, "run", fake)
    monkeypatch.setattr(cli_run, "headline", lambda _: None)
    runs.create(desk / "r", planned("max_attempts=7", "progress_deadline_s=5.0"))
    dfbench("cancel", "r")
    (desk / "s.yaml").unlink()
    (desk / "r" / "sweep.yaml").rename(desk / "kept")
    assert dfbench("submit", "r").code == 2
    assert status.read(desk / "r").state == "cancelled"  # what cannot go on is left as it is
    (desk / "kept").rename(desk / "r" / "sweep.yaml")
    assert "leave the other options out" in dfbench("submit", "r", "--set", "repeats=2").err
    with driver_lock(desk / "r"):  # the driver that was told to stop, which may be suspended
        assert "another driver" in dfbench("submit", "r", "--allow-version-change").err
    assert status.read(desk / "r").state == "cancelled"
    result = dfbench("submit", "r", "--allow-version-change")
    assert result.code == 0 and "it was cancelled: 6 jobs are pending again" in result.out
    assert [(o.max_attempts, o.progress_s, o.workers, o.allow_version_change) for o in seen] == [(7, 5.0, 1, True)]


# --- progress ------------------------------------------------------------------------------------------------------


def standing(
    done: int, failed: int = 0, rate: float = 0.5, workers: int = 2, loading: int = 1, **more: Any
) -> driver.Progress:
    counts = Counts(pending=10 - done - failed, done=done, failed=failed)
    return driver.Progress(counts, rate, 75.0 if done else None, 9.0, workers, loading, 1, **more)


def test_progress_lines() -> None:
    assert progress.line(standing(0, workers=0)) == "0/10 jobs done; 1 worker loading the target"
    nobody = {"workers": 0, "loading": 0}
    assert progress.line(standing(0, **nobody)) == "0/10 jobs done; waiting for a device"
    assert progress.line(standing(0, **nobody, waiting=1)) == "0/10 jobs done; waiting for a device that others use"
    assert progress.line(standing(0, measures=False)) == "0/10 jobs done; 2 workers warming up"
    assert progress.line(standing(0)) == "0/10 jobs done; 2 workers warming up and measuring what a pass costs"
    assert progress.line(standing(3, 1)) == "3/10 jobs done, 1 failed, 30.0 jobs/min, 1:15 left, 2 workers"
    assert progress.line(standing(9, 1)) == "9/10 jobs done, 1 failed"
    assert progress.rate(12.34) == "12.3 jobs/s"
    assert [progress.duration(s) for s in (None, 0, 61, 3725)] == ["–", "0:00", "1:01", "1:02:05"]


def test_progress_is_plain_lines_unless_on_a_terminal(monkeypatch: Any) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock["now"])
    console = Console(file=io.StringIO(), record=True, width=40)
    with progress.shown(console) as show:
        for done in (0, 1, 2, 2, 10):
            show(standing(done))
            clock["now"] += 6.0
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0/10", "2/10", "10/10"], "one in ten seconds, where it changed"


def test_progress_is_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), record=True, width=120, force_terminal=True)
    with progress.shown(console) as show:
        show(standing(4))
    text = console.export_text()
    assert "4/10 jobs done" in text and "━" in text


# --- with Ray ------------------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_submit_runs_a_sweep_to_its_headline_and_again_finds_nothing_left(desk: Path, dfbench: Run) -> None:
    result = dfbench("submit", "s.yaml")
    assert result.code == 0, result
    run_dir = (desk / "runs" / "latest").resolve()
    assert "s: 6 jobs in 3 shards" in result.out and "6/6 jobs done" in result.out
    assert "pld" in result.out and "next: dfbench report" in result.out
    assert (run_dir / "run.sql").is_file()
    data = json.loads(dfbench("status", "--json").out)
    assert data["jobs"]["done"] == 6 and data["state"] == "done"
    assert [node["shards_done"] for node in data["nodes"]] == [3]
    again = dfbench("submit", "s.yaml", "--run", "runs/latest")
    assert again.code == 0 and "6 of 6 jobs are done" in again.out


@pytest.mark.ray
def test_a_failed_job_is_reported_and_retry_runs_it(desk: Path, dfbench: Run, monkeypatch: Any) -> None:
    faults = desk / "faults"
    faults.mkdir()
    monkeypatch.setenv("DFBENCH_FAULT", "worker.job:raise@4")  # The first two are warm-up.
    monkeypatch.setenv("DFBENCH_FAULT_DIR", str(faults))
    result = dfbench("submit", "s.yaml", "--run", "r")
    assert result.code == 1 and "1 of 6 jobs failed; to run them again: dfbench retry r" in result.out, result
    assert (faults / "worker.job").exists()
    failed = json.loads(dfbench("status", "r", "--json").out)["failed"]
    assert len(failed) == 1 and "fault at worker.job" in failed[0]["message"]
    retried = dfbench("retry", "r")
    assert retried.code == 0 and "6 jobs done" in retried.out, retried
