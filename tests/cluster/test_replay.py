"""Replays: exact against live runs, ordinary runs in every other respect, and private where asked."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dfbench.analysis.store import open_run
from dfbench.cluster import cli_replay, replay, runs, tune, upkeep, verify_cost
from dfbench.cluster import plan as plans
from dfbench.cluster.cli import app
from dfbench.cluster.commit import Committer, FinishedShard
from dfbench.cluster.ledger import Ledger
from dfbench.cluster.replay import ReplayOptions
from dfbench.cluster.run_place import driver_lock
from dfbench.cluster.runspec import ShardReader
from dfbench.cluster.sources import SourceOptions
from dfbench.cluster.sources_run import DIVERGED
from dfbench.cluster.sweep import validate
from dfbench.drafters.base import DrafterContext
from dfbench.errors import OptionError, RunError, SweepError, UsageError, WorkloadError
from dfbench.workers.actor import Worker
from dfbench.workers.records import CALIBRATION

ARMS: list[Any] = [
    "ar",
    "pld",
    {"name": "hf", "drafter": "pld", "preset": "hf"},
    {"name": "original", "drafter": "pld", "preset": "original"},
    "cacheback",
    {"name": "tree", "drafter": "cacheback", "draft": "tree"},
    {"name": "merged", "drafter": "cacheback", "draft": "tree", "merge": True, "queries": 24},
    "suffix",
    {"name": "suffix-tree", "drafter": "suffix", "mode": "tree"},
    {"name": "past", "drafter": "suffix", "cached_requests": 10},
    "ngram-cache",
    "ngram-trie",
    "sam",
    "hybrid",
]
Alter = Callable[[dict[str, pa.Table]], dict[str, pa.Table]]


def run_here(run_dir: Path, alter: Alter = lambda tables: tables) -> Path:
    """What a driver does with one worker, in this process."""
    with Ledger.open(run_dir) as ledger:
        ledger.begin()
        reader, worker = ShardReader(run_dir, ledger.run), Worker(ledger.run.target, node="here")
        ready = worker.load()
        ledger.add_worker(worker.worker_id, "here", ready.facts.device, ready.info)
        committer = Committer(ledger, () if ledger.run.ignore_eos else ready.eos_ids)
        for row in ledger.pending(10_000):
            shard = FinishedShard(reader.shard(row), worker.worker_id)
            for part in worker.run(shard.spec):
                assert [outcome.message for outcome in part.outcomes if outcome.kind] == []
                shard.parts.append(part.__class__(**{**vars(part), "tables": alter(part.tables)}))
            committer.add(shard)
        assert all(not outcome.failures for outcome in committer.flush())
        assert ledger.end() == "done"
    return run_dir


def live(run_dir: Path, alter: Alter = lambda tables: tables, **changes: Any) -> Path:
    """A run of the scripted target, which has text that repeats and an end of text."""
    sweep = {
        "name": "live",
        "target": "scripted",
        "scripted": {"prompts": 5, "period": 9, "eos_at": 37, "prompt_tokens": 20},
        "workloads": ["one", "two"],
        "arms": ARMS,
        "max_new_tokens": 30,
        "warmup": 0,
        **changes,
    }
    runs.create(run_dir, plans.plan(validate(sweep)))
    return run_here(run_dir, alter)


def replayed(run_dir: Path, source: Path, arms: list[Any], **options: Any) -> Path:
    """A replay of a source, run here."""
    own = {key: options.pop(key) for key in ("max_new_tokens", "shard_tokens", "name") if key in options}
    made = ReplayOptions(SourceOptions(**options), **own)
    prepared = replay.prepare(replay.open_source(source, made.source), arms_of(arms), made)
    replay.create(run_dir, prepared)
    return run_here(run_dir)


def arms_of(arms: list[Any]) -> Any:
    sweep = validate({"name": "a", "target": "scripted", "workloads": ["w"], "arms": arms})
    return sweep.arms


def table(run_dir: Path, name: str) -> list[dict[str, Any]]:
    with Ledger.open(run_dir, readonly=True) as ledger:
        return [row for file in ledger.files(name) for row in pq.read_table(run_dir / file.name).to_pylist()]


STEP = ("step", "position", "queries", "drafted", "depth", "accepted", "emitted")


def steps(run_dir: Path) -> dict[tuple[str, str, str], list[tuple[int, ...]]]:
    found: dict[tuple[str, str, str], list[tuple[int, ...]]] = {}
    for row in table(run_dir, "steps"):
        key = (row["workload"], row["prompt_id"], row["arm"])
        found.setdefault(key, []).append(tuple(row[name] for name in STEP))
    return found


def traces(file: Path, count: int = 12, **extra: Any) -> Path:
    rng = np.random.default_rng(5)
    with file.open("w") as out:
        for number in range(count):
            phrase = rng.integers(10, 60, 8).tolist()
            output = [*phrase, *rng.integers(60, 90, 5).tolist(), *phrase, *phrase]
            row = {"workload": "ab"[number % 2], "prompt_id": f"p{number}", "prompt_ids": phrase, "output_ids": output}
            out.write(json.dumps({**row, **extra}) + "\n")
    return file


# --- exact -----------------------------------------------------------------------------------------------------------


def test_replay_of_a_live_run_is_exact(tmp_path: Path) -> None:
    run = live(tmp_path / "live")
    again = replayed(tmp_path / "again", run, ARMS)
    expected, found = steps(run), steps(again)
    assert found == expected
    assert len(found) == 2 * 5 * len(ARMS)
    assert {job["finish_reason"] for job in table(run, "jobs")} == {"eos"}
    assert sum(row[STEP.index("accepted")] for rows in found.values() for row in rows) > 300


def test_replay_of_a_carried_run_is_exact(tmp_path: Path) -> None:
    arms = ["ar", "pld", {"name": "carried", "drafter": "cacheback", "cache": "carried"}]
    run = live(tmp_path / "live", arms=arms)
    again = replayed(tmp_path / "again", run, arms, shard_tokens=20)
    assert steps(again) == steps(run)
    with Ledger.open(again, readonly=True) as ledger:
        assert ledger.counts().shards == {"done": 2}, "a workload with a carried arm is one shard"


def test_a_run_without_an_end_of_text(tmp_path: Path) -> None:
    run = live(tmp_path / "live", ignore_eos=True)
    assert {job["finish_reason"] for job in table(run, "jobs")} == {"length"}
    assert steps(replayed(tmp_path / "again", run, ARMS)) == steps(run)


@pytest.mark.model
def test_replay_of_smollm2_is_exact(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["Repeat: the cat sat on the mat.", "def add(a, b):\n    return a + b\n\ndef sub(a, b):"]
    # One arm a drafter, and trees: variants of options decide nothing that a model could disturb.
    arms = [arm for arm in ARMS if isinstance(arm, str) or arm["name"] in ("merged", "suffix-tree")]
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(texts)))
    made = live(
        tmp_path / "live",
        target="torch",
        model={"id": "smollm2-135m-instruct", "dtype": "float32"},
        scripted={},
        workloads=[{"name": "w", "file": str(prompts)}],
        max_new_tokens=12,
        calibrate=False,
        arms=arms,
    )
    outputs = {(job["prompt_id"], job["arm"]): job["output_ids"] for job in table(made, "jobs")}
    same = {key for key, output in outputs.items() if output == outputs[key[0], "ar"]}
    assert len(same) >= 2 * len(arms) - 2, "float32 hardly ever diverges"
    again = replayed(tmp_path / "again", made, arms)
    expected, found = steps(made), steps(again)
    assert {key: rows for key, rows in found.items() if key[1:] in same} == {
        key: rows for key, rows in expected.items() if key[1:] in same
    }
    assert sum(row[STEP.index("accepted")] for rows in found.values() for row in rows) > 10


def test_divergences_are_told(tmp_path: Path) -> None:
    def alter(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
        if "jobs" not in tables:
            return tables
        rows = tables["jobs"].to_pylist()
        for row in rows:
            if row["prompt_id"] == "p1" and row["arm"] == "pld":
                row["output_ids"][0] += 1
        return {**tables, "jobs": pa.Table.from_pylist(rows, schema=tables["jobs"].schema)}

    run = live(tmp_path / "live", alter, arms=["ar", "pld"])
    source = replay.open_source(run, SourceOptions())
    list(source)
    assert source.summary.notes[DIVERGED].count == 2
    assert source.summary.notes[DIVERGED].places == ["one p1 pld", "two p1 pld"]


def test_a_shard_is_as_much_work_however_many_arms_there_are(tmp_path: Path) -> None:
    """Six prompts of 29 tokens a workload: three make a shard of 120 tokens with two arms, two with four."""
    source = traces(tmp_path / "t.jsonl")
    for arms, shards in ((["ar", "pld"], 4), (["ar", "pld", "suffix", "cacheback"], 6)):
        run = replayed(tmp_path / f"{len(arms)}", source, arms, shard_tokens=120)
        with Ledger.open(run, readonly=True) as ledger:
            assert ledger.counts().shards["done"] == shards


# --- an ordinary run -------------------------------------------------------------------------------------------------


def test_a_replay_is_an_ordinary_run_without_times(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["ar", "pld"], shard_tokens=120)
    jobs = table(run, "jobs")
    assert len(jobs) == 24 and {job["target"] for job in jobs} == {"recorded"}
    assert {job["wall_ns"] for job in jobs} == {None} and table(run, "tokens") == []
    assert {job["engine"] for job in jobs} == {"recorded"}
    with Ledger.open(run, readonly=True) as ledger:
        assert ledger.counts().shards["done"] == 4, "three prompts of a workload make one shard"
    connection = open_run(run)
    mat = dict(connection.sql("select workload || arm, mat from mat").fetchall())
    assert mat["aar"] == mat["bar"] == 1.0 and mat["apld"] > 1.4
    assert connection.sql("select count(*) from cells where tokens_per_s is not null").fetchall() == [(0,)]
    connection.close()


def test_arms_stand_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    """In every workload, although two workloads are read in turn and orders rotate."""
    arms = ["ar", *({"name": f"pld-{n}", "drafter": "pld", "max_ngram": n} for n in (4, 2, 3))]
    connection = open_run(replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), arms))
    for workload in "ab":
        query = f"select arm from ledger_plan where workload = '{workload}' order by place"
        assert connection.sql(query).fetchall() == [("ar",), ("pld-4",), ("pld-2",), ("pld-3",)]
    couples = "select distinct base, arm, whole from parts order by all"
    assert connection.sql(couples).fetchall() == [
        ("pld-2", "pld-3", False),
        ("pld-4", "pld-2", False),
        ("pld-4", "pld-3", True),
    ]
    connection.close()


def test_text_is_labelled_an_estimate(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    ids = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3, 4, 3, 4], "message": {"content": "x"}}]}
    file.write_text(json.dumps({"request": {"messages": [], "temperature": 1}, "response": ids}) + "\n")
    run = replayed(tmp_path / "run", file, ["pld"])
    assert {job["engine"] for job in table(run, "jobs")} == {"recorded, estimate"}
    with Ledger.open(run, readonly=True) as ledger:
        assert json.loads(ledger.meta("estimate")) == {"the answer was sampled (temperature above 0)": 1}
        assert ledger.run.extra["replay"]["estimate"] is True


def test_the_same_replay_goes_on_and_another_does_not(tmp_path: Path) -> None:
    file = traces(tmp_path / "t.jsonl")

    def prepared(*arms: str, **options: Any) -> replay.Replay:
        made = ReplayOptions(SourceOptions(), **options)
        return replay.prepare(replay.open_source(file, made.source), replay.parse_arms(list(arms)), made)

    run = tmp_path / "run"
    first = prepared("pld")
    assert not runs.place(first, run).resumed
    replay.create(run, first)
    assert runs.place(prepared("pld"), run).resumed
    with pytest.raises(RunError, match="another sweep"):
        runs.place(prepared("pld", "cacheback"), run)
    with pytest.raises(RunError, match="another sweep"):
        runs.place(prepared("pld", max_new_tokens=5), run)
    traces(file, 13)
    with pytest.raises(RunError, match="another sweep"):
        runs.place(prepared("pld"), run)


def test_two_replays_into_one_folder_at_once(tmp_path: Path) -> None:
    file, run = traces(tmp_path / "t.jsonl"), tmp_path / "run"
    prepared = replay.prepare(replay.open_source(file, SourceOptions()), arms_of(["pld"]), ReplayOptions())
    run.mkdir()
    with driver_lock(run):
        (run / ".shards.part").write_text("of the other")
        with pytest.raises(RunError, match=f"another driver .process {os.getpid()}. is at work on {run}"):
            replay.create(run, prepared)
        assert (run / ".shards.part").read_text() == "of the other"
    assert not runs.place(prepared, run).resumed  # what one that was killed has left is no obstacle
    replay.create(run, prepared)
    with pytest.raises(RunError, match="was taken by another replay just now"):
        replay.create(run, prepared)
    with Ledger.open(run, readonly=True) as ledger:
        assert ledger.counts().total == 12


def test_a_replay_whose_disk_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(replay.Ledger, "create", full)
    with pytest.raises(RunError, match="No space left"):
        replayed(tmp_path / "a" / "run", traces(tmp_path / "t.jsonl"), ["pld"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


def test_an_answer_may_be_replayed_in_part(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["pld"], max_new_tokens=7)
    assert {len(job["output_ids"]) for job in table(run, "jobs")} == {7}


def test_turns_carry_their_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    rows = [
        {"prompt_id": "t", "turn": 0, "prompt_ids": [1, 2], "output_ids": [5, 6, 7, 8]},
        {"prompt_id": "t", "turn": 1, "prompt_ids": [1, 2, 5, 6, 7, 8, 3], "output_ids": [5, 6, 7, 8]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = replayed(tmp_path / "run", file, ["pld"])
    assert [(job["prompt_id"], job["turn"]) for job in table(run, "jobs")] == [("t", 0), ("t#2", 1)]
    assert [len(rows) for rows in steps(run).values()] == [3, 1], "the second turn is copied from the first"
    verify_cost.keep(run, verify_cost.relative("flat", {1: 1.0, 100: 1.0}))
    cli_replay._predictions(run, "flat", None)
    counted = [line.split("┃")[3].strip() for line in capsys.readouterr().out.splitlines() if "workload" in line]
    assert counted == ["turns"]


def modelled(run_dir: Path) -> dict[tuple[str, str, str], tuple[float, float]]:
    """MAT and predicted speedup by curve, workload and arm."""
    with open_run(run_dir) as connection:
        rows = connection.sql("select curve, workload, arm, mat, speedup_model from speedup_model").fetchall()
    return {(curve, workload, arm): (mat, speedup) for curve, workload, arm, mat, speedup in rows}


def test_predictions_follow_the_cost_curves_that_a_replay_was_given(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["ar", "pld"])
    assert {(row[0], row[2]) for row in modelled(run)} == {(None, "ar"), (None, "pld")}
    for curve in (
        verify_cost.relative("flat", {1: 1.0, 100: 1.0}),
        verify_cost.relative("steep", {1: 1.0, 2: 2.0, 100: 100.0}),
    ):
        verify_cost.keep(run, curve)
        verify_cost.keep(run, curve)
    found = modelled(run)
    assert len(found) == 2 * 4 and len(table(run, "calibration")) == 5, "a curve is kept once"
    assert found["flat", "a", "ar"] == (1.0, 1.0)
    mat, speedup = found["flat", "a", "pld"]
    assert speedup == pytest.approx(mat) and mat > 1.4, "free width: speedup is MAT"
    assert found["steep", "a", "pld"][1] < 1


def test_the_view_and_tune_predict_alike(tmp_path: Path) -> None:
    file = traces(tmp_path / "t.jsonl")
    run = replayed(tmp_path / "run", file, ["ar", "pld", {"name": "tree", "drafter": "cacheback", "draft": "tree"}])
    grid = np.outer([1.0, 1.7, 2.9], [1.0, 1.2, 3.1]) * 1e6
    verify_cost.keep(run, curve := verify_cost.VerifyCost("c", np.array([5, 20, 30]), np.array([1, 6, 40]), grid))
    evaluator = tune.Evaluator(curve, DrafterContext())
    rows = [row for row in replay.open_source(file, SourceOptions()) if row.workload == "a"]
    for arm, drafter, options in (("pld", "pld", {}), ("tree", "cacheback", {"draft": "tree"})):
        score = tune.Score()
        evaluator.extend(score, tune.Config(drafter, options, {}), rows)
        assert modelled(run)["c", "a", arm] == pytest.approx((score.mat, score.speedup))


def measured(path: Path, stack: str, wide: int) -> list[dict[str, Any]]:
    """Writes calibration rows to a file; widths of 1 and 20, a wide pass costs `wide` to a plain one's 10."""
    about = {"run_id": "x", "worker_id": "w", "device": "GPU", "model": "m", "dtype": "bf16", "engine": "cached"}
    rows = [
        {**about, "stack": stack, "kind": "forward", "context": 8, "queries": width, "sample": at, "ns": ns + at}
        for width, ns in ((1, 10), (20, wide))
        for at in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=CALIBRATION), path)
    return rows


def test_a_measured_curve_is_kept_as_it_was_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path / "c.parquet", "s", 10)
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["pld"])
    curve = verify_cost.load(str(tmp_path / "c.parquet"))
    verify_cost.keep(run, curve)
    assert [{**row, "run_id": "x"} for row in table(run, "calibration")] == [{**row, "bytes": None} for row in rows]
    assert curve.label == "m, bf16, cached, GPU, s"
    assert set(modelled(run)) == {(curve.label, "a", "pld"), (curve.label, "b", "pld")}
    assert verify_cost.load(str(run)).label == curve.label


def test_curves_of_one_device_under_two_stacks_are_two(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["pld"])
    for stack, wide in (("torch 1", 10), ("torch 2", 100)):
        measured(tmp_path / "c.parquet", stack, wide)
        verify_cost.keep(run, verify_cost.load(str(tmp_path / "c.parquet")))
    found = modelled(run)
    older, newer = (found[f"m, bf16, cached, GPU, {stack}", "a", "pld"][1] for stack in ("torch 1", "torch 2"))
    assert len(found) == 2 * 2 and older > newer
    with pytest.raises(UsageError, match="software versions"):
        verify_cost.load(str(run))


def test_a_kept_curve_has_one_name_wherever_it_is_read(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["pld"])
    verify_cost.keep(run, verify_cost.relative("mine", {1: 1.0, 2: 2.0}))
    assert verify_cost.load(str(run)).label == "mine" == next(iter(modelled(run)))[0]


def test_a_curve_that_was_corrected_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """Under one name, the costs of both would be mixed."""
    run = replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["pld"])
    verify_cost.keep(run, verify_cost.relative("other", {1: 1.0, 2: 2.0}))
    for second in (2.0, 7.0):
        verify_cost.keep(run, verify_cost.relative("mine", {1: 1.0, 2: second}))
    kept = {(row["device"], row["queries"]): row["ns"] for row in table(run, "calibration")}
    assert kept == {("other", 1): 1e6, ("other", 2): 2e6, ("mine", 1): 1e6, ("mine", 2): 7e6}
    assert len(table(run, "calibration")) == 4 and upkeep.verify(run) == []


def test_predictions_are_held_against_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = live(tmp_path / "live", arms=["ar", "pld"])  # a pass of the scripted target takes 1 ms, whatever its width
    again = replayed(tmp_path / "again", run, ["ar", "pld"])
    verify_cost.keep(again, verify_cost.relative("flat", {1: 1.0, 100: 1.0}))
    verify_cost.keep(again, verify_cost.relative("dearer", {1: 1.0, 2: 2.0, 100: 2.0}))
    cli_replay._predictions(again, "flat", run)
    printed = capsys.readouterr().out
    assert "prediction against measurement: median absolute error 0.0% over 2 cells" in printed
    cli_replay._predictions(again, "dearer", run)
    assert "median absolute error 0.0%" not in capsys.readouterr().out


# --- refused ---------------------------------------------------------------------------------------------------------


def test_arms_from_names_and_files(tmp_path: Path) -> None:
    listed, mapped = tmp_path / "list.yaml", tmp_path / "map.yaml"
    listed.write_text("- pld\n- {name: cb, drafter: cacheback, leader: 2}\n")
    mapped.write_text("arms:\n  - suffix\n")
    parsed = replay.parse_arms(["ar,pld:hf", str(listed), str(mapped)])
    assert [arm.name for arm in parsed] == ["ar", "pld-hf", "pld", "cb", "suffix"]
    assert parsed[1].options["stop_at_eos"] is True and parsed[3].options["leader"] == 2


@pytest.mark.parametrize(
    ("arms", "error", "message"),
    [
        ([], SweepError, "name drafters with --arms"),
        (["pdl"], OptionError, "did you mean 'pld'"),
        (["pld:fast"], UsageError, "fast"),
        (["none.yaml"], SweepError, "does not exist"),
        (["pld", "pld"], SweepError, "two arms are called 'pld'"),
    ],
)
def test_bad_arms(arms: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replay.parse_arms(arms)


def test_an_arms_file_without_arms(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: x\n")
    with pytest.raises(SweepError, match="holds no list of arms"):
        replay.parse_arms([str(tmp_path / "a.yaml")])


def test_what_learns_from_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="learns from the logits of rejected drafts"):
        replayed(tmp_path / "run", traces(tmp_path / "t.jsonl"), ["recycling"])
    assert not (tmp_path / "run").exists()


def test_a_source_without_answers_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(WorkloadError, match="--tokenizer"):
        replayed(tmp_path / "run", file, ["pld"])
    assert not (tmp_path / "run").exists()


def test_runs_that_cannot_be_replayed(tmp_path: Path) -> None:
    without = live(tmp_path / "a", arms=["pld"])
    with pytest.raises(RunError, match="has no AR arm"):
        replay.open_source(without, SourceOptions())
    runs.create(
        tmp_path / "b", plans.plan(validate({"name": "x", "target": "scripted", "workloads": ["w"], "arms": ["ar"]}))
    )
    with pytest.raises(RunError, match="no finished AR job"):
        replayed(tmp_path / "c", tmp_path / "b", ["pld"])


# --- private ---------------------------------------------------------------------------------------------------------


def ids_on_disk(run_dir: Path) -> set[int]:
    found = {i for row in table(run_dir, "jobs") for i in row["output_ids"]}
    for row in pq.read_table(run_dir / "prompts.parquet").to_pylist():
        found |= {*row["prompt_ids"], *(row["recorded_ids"] or ())}
        assert row["text"] == "" and row["messages"] == "[]"
    return found - {-1}


def test_no_text_keeps_counts_and_steps_alone(tmp_path: Path) -> None:
    file = traces(tmp_path / "t.jsonl")
    plain = replayed(tmp_path / "plain", file, ["pld", "suffix"])
    private = replayed(tmp_path / "private", file, ["pld", "suffix"], keep_text=False)
    with driver_lock(private), pytest.raises(RunError, match="is at work"):  # another one, which needs them
        replay.forget_ids(private)
    assert ids_on_disk(private)
    replay.forget_ids(private)
    assert steps(private) == steps(plain)
    assert ids_on_disk(plain) and ids_on_disk(private) == set()
    with_ar = replayed(tmp_path / "ar", file, ["ar"], keep_text=False)
    with pytest.raises(RunError, match="holds no token ids"):
        replayed(tmp_path / "again", with_ar, ["pld"])
    lengths = {job["prompt_id"]: len(job["output_ids"]) for job in table(private, "jobs")}
    assert lengths == {job["prompt_id"]: len(job["output_ids"]) for job in table(plain, "jobs")}
    assert {row["prompt_sha"] for row in pq.read_table(private / "prompts.parquet").to_pylist()} == {""}
    shared = {job["job_id"] for job in table(plain, "jobs")} & {job["job_id"] for job in table(private, "jobs")}
    assert not shared, "a job id must not confirm a guessed text"


def test_hashed_ids_give_the_same_steps(tmp_path: Path) -> None:
    file = traces(tmp_path / "t.jsonl")
    plain = replayed(tmp_path / "plain", file, ["pld", "cacheback", "suffix"])
    hidden = replayed(tmp_path / "hidden", file, ["pld", "cacheback", "suffix"], hash_ids=True)
    assert steps(hidden) == steps(plain)
    assert len(ids_on_disk(hidden)) == len(ids_on_disk(plain)) and not ids_on_disk(hidden) & ids_on_disk(plain)


# --- through Ray -----------------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = traces(tmp_path / "t.jsonl")
    with file.open("a") as out:
        out.write('{"hello": 1}\n{"prompt_ids": [')
    arguments = ["replay", "t.jsonl", "--arms", "pld", "--arms", "suffix", "--run", "run", "--no-text"]
    result = CliRunner().invoke(app, [*arguments, "--verify-cost", "example"])
    assert result.exit_code == 0, result.output
    assert "not used: 1 × the last line is truncated (t.jsonl, line 14)" in result.output
    assert "not used: 1 × no known kind of log (t.jsonl, line 13)" in result.output
    assert "speedup_model" in result.output
    assert steps(tmp_path / "run") == steps(replayed(tmp_path / "here", file, ["pld", "suffix"]))
    assert ids_on_disk(tmp_path / "run") == set()
