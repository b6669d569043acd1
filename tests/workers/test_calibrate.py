"""Calibration rows, the curve that is read from them, and when it is called too noisy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from dfbench.drafters.base import Draft
from dfbench.workers import calibrate, reading, team
from dfbench.workers.engine import TorchTarget
from dfbench.workers.records import CALIBRATION, WorkerFacts
from dfbench.workers.spec import TargetSpec

TinyModel = Callable[..., PreTrainedModel]
FACTS = WorkerFacts("w0", "cpu", "tiny", None, "float64", "cached", "stack")
SETTINGS = calibrate.Settings(queries=(1, 4, 16), contexts=(8, 32, 4000), samples=3, read_samples=2, read_bytes=1 << 16)


@pytest.mark.parametrize("engine", ["cached", "recompute"])
def test_every_width_is_timed_as_often_at_every_context_that_fits(tiny_model: TinyModel, engine: str) -> None:
    target = TorchTarget(tiny_model("llama"), TargetSpec(engine=engine, max_queries=8))  # type: ignore[arg-type]
    table = calibrate.calibrate(target, FACTS, SETTINGS, "run")
    assert table.schema.equals(CALIBRATION)
    rows = table.to_pylist()
    forwards = [(row["context"], row["queries"], row["sample"]) for row in rows if row["kind"] == "forward"]
    assert sorted(forwards) == [(c, q, s) for c in (8, 32) for q in (1, 4) for s in range(3)]
    assert [row["bytes"] for row in rows if row["kind"] == "read"] == [1 << 16] * 2
    assert all(row["ns"] > 0 and row["run_id"] == "run" for row in rows)


@pytest.mark.parametrize("engine", ["cached", "recompute"])
def test_a_probe_leaves_no_trace(tiny_model: TinyModel, engine: str) -> None:
    def answers(probing: bool) -> list[int]:
        target = TorchTarget(tiny_model("qwen3"), TargetSpec(engine=engine))  # type: ignore[arg-type]
        found = [target.prefill((1, 2, 3))]
        for _ in range(4):
            if probing:
                target.probe(Draft((5, 6, 7)))
            found.append(target.verify(Draft(())).argmax[0])
            target.commit((), found[-1:])
        return found

    assert answers(probing=True) == answers(probing=False)


def rows(times: dict[tuple[int, int], Sequence[int]], reads: Sequence[int] = ()) -> pa.Table:
    about = dict.fromkeys(("run_id", "worker_id", "device", "model", "dtype", "engine", "stack"), "x")
    found = [
        {**about, "kind": "forward", "context": context, "queries": queries, "sample": sample, "ns": ns}
        for (context, queries), sampled in times.items()
        for sample, ns in enumerate(sampled)
    ]
    found += [{**about, "kind": "read", "bytes": 1000, "sample": at, "ns": ns} for at, ns in enumerate(reads)]
    return pa.Table.from_pylist(found, schema=CALIBRATION)


def test_the_curve_is_medians_over_those_of_one_query_at_the_same_context() -> None:
    table = rows({(8, 1): [100, 101, 900], (8, 4): [150, 149, 151], (64, 1): [200] * 3, (64, 4): [500] * 3})
    points = calibrate.curve(table)
    assert [(p.context, p.queries, p.median_ns) for p in points] == [
        (8, 1, 101), (8, 4, 150), (64, 1, 200), (64, 4, 500),
    ]  # fmt: skip
    assert [round(p.ratio, 3) for p in points] == [1, round(150 / 101, 3), 1, 2.5]
    assert all(p.ratio_lo <= p.ratio <= p.ratio_hi for p in points)
    steady = {(p.context, p.queries): not p.noisy for p in points}
    assert steady[64, 4] and not steady[8, 1]


def test_the_verdict_says_what_to_do() -> None:
    steady = calibrate.curve(rows({(8, 1): [100] * 5, (8, 4): [150] * 5}))
    assert calibrate.verdict(steady).startswith("Steady")
    noisy = calibrate.verdict(calibrate.curve(rows({(8, 1): [100] * 5, (8, 4): [150, 300, 90, 200, 700]})))
    assert noisy.startswith("Too noisy to quote: 1 of 2") and "4 queries" in noisy and "more samples" in noisy
    assert calibrate.verdict([]).startswith("Nothing")


def test_bandwidth_is_bytes_over_the_median_time() -> None:
    measured = calibrate.bandwidth(rows({}, reads=[90, 100, 110]))
    assert measured is not None
    assert measured.median == 1e10
    assert measured.lo <= measured.median <= measured.hi
    assert calibrate.bandwidth(rows({(8, 1): [1]})) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sweep_reads_all_there_is(threads: int) -> None:
    found = team.find()
    assert found is not None
    buffer = torch.arange(512 // 4 * 5, dtype=torch.float32)
    assert reading.read(found, buffer.data_ptr(), 512 * 5, threads) == buffer.sum()


def test_without_torchs_threads_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "find", lambda: None)
    assert calibrate._cpu_read(1024)() == 256
