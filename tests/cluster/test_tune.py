"""Tune: the split, the search, and figures that come from held-out prompts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dfbench.analysis import stats
from dfbench.cluster import tune, verify_cost
from dfbench.cluster.sources import Recording
from dfbench.cluster.tune import Config, Score
from dfbench.drafters import registry
from dfbench.errors import UsageError
from dfbench.workers.records import CALIBRATION

EXAMPLE = verify_cost.load("example")


def recordings(count: int = 30) -> list[Recording]:
    """Answers that repeat a phrase of their own: the longer the draft, the more is accepted."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(count):
        phrase = rng.integers(10, 500, 12).tolist()
        noise = rng.integers(500, 5000, 40).tolist()
        output = [*noise[:10], *phrase, *noise[10:20], *phrase, *noise[20:30], *phrase * (1 + number % 4)]
        made.append(Recording("w", f"p{number}", 0, phrase, output, "here"))
    return made


def config(drafter: str, **given: Any) -> Config:
    return Config(drafter, registry.parse_options(drafter, given).model_dump(mode="json"), given)


def test_conversations_stay_on_one_side_of_the_split() -> None:
    talks = [Recording("w", "p" if t == 0 else f"p#{t + 1}", t, [1], [2], "") for t in range(5)]
    tuning, held_out = tune.split([*recordings(), *talks])
    sides = {
        side for side, rows in (("tuning", tuning), ("held", held_out)) for r in rows if r.prompt_id[:2] in ("p", "p#")
    }
    assert len(sides) == 1
    assert not {r.prompt_id for r in tuning} & {r.prompt_id for r in held_out}
    again_tuning, again_held = tune.split(recordings(60))
    assert {r.prompt_id for r in held_out} - {t.prompt_id for t in talks} <= {r.prompt_id for r in again_held}
    assert len(again_tuning) + len(again_held) == 60


def test_too_few_answers_are_an_error() -> None:
    with pytest.raises(UsageError, match="too few to tune on"):
        tune.split(recordings(2))


def test_a_sample_is_uniform_and_in_order() -> None:
    seen = np.zeros(50)
    rows = recordings(50)
    for seed in range(200):
        chosen = tune.sample(rows, 10, seed)
        places = [rows.index(r) for r in chosen]
        assert places == sorted(places) and len(places) == 10
        seen[places] += 1
    assert seen.min() > 15 and seen.max() < 70
    assert tune.sample(rows, 100) == rows


def test_the_search_space_is_valid_and_has_no_twins() -> None:
    configs = list(tune.grid())
    assert len(configs) >= 450
    assert len({(c.drafter, json.dumps(c.options, sort_keys=True)) for c in configs}) == len(configs)
    assert all(registry.parse_options(c.drafter, c.options) for c in configs)


def test_tuning_finds_the_better_arm_and_reports_unseen_prompts() -> None:
    configs = [config("pld", draft_len=n) for n in (1, 2, 4, 8)] + [config("ar"), config("cacheback", draft="tree")]
    rungs: list[tuple[int, int, int]] = []
    rows = recordings()
    result = tune.tune(rows, EXAMPLE, stats.ratio_interval, configs=configs, on_rung=lambda *at: rungs.append(at))
    tuning, held_out = tune.split(rows)
    assert result.best.config.given == {"draft_len": 8}
    assert [len(result.best.tuned.rows), len(result.best.held_out.rows)] == [len(tuning), len(held_out)]
    assert result.best.interval.lo < result.best.held_out.speedup < result.best.interval.hi
    assert result.best.held_out.speedup > 1.3
    assert [prompts for _, _, prompts in rungs][-1] == len(held_out)
    assert rungs[0][1] == 6
    queries = [f.held_out.queries for f in result.front]
    mats = [f.held_out.mat for f in result.front]
    assert queries == sorted(queries) and mats == sorted(mats)


def test_each_rung_keeps_the_fastest_the_front_and_every_engine_s_few() -> None:
    def score(tokens: int, queries: int, speedup: float) -> Score:
        return Score([(tokens, 10, 10 * queries, speedup, 1.0)])

    plain = [(config("cacheback", draft_len=n), score(20, 5, 2.0 - n / 100)) for n in range(1, 13)]
    wide = (config("cacheback", draft="tree"), score(30, 50, 0.5))
    engine_s = (config("pld", preset="hf"), score(11, 9, 0.1))
    kept = tune.survivors([engine_s, wide, *plain])
    assert kept[:5] == plain[:5], "the fastest third"
    assert kept[5:] == [wide, engine_s]


def test_an_evaluation_is_a_replay() -> None:
    evaluator = tune.Evaluator(EXAMPLE, tune.DrafterContext())
    rows, score = recordings(4), Score()
    evaluator.extend(score, config("ar"), rows[:2])
    evaluator.extend(score, config("ar"), rows)
    assert evaluator.evaluations == 4, "what was replayed once is not replayed again"
    assert score.mat == 1.0 and score.queries == 1.0 and score.speedup == pytest.approx(1.0)
    assert score.column(0) == [len(r.output_ids) - 1 for r in rows]


def test_each_engine_gets_the_best_arm_it_can_run() -> None:
    configs = [
        config("pld", draft_len=8),
        *(config("pld", preset="hf", draft_len=n) for n in (1, 8)),
        config("pld", preset="vllm"),
        config("suffix"),
    ]
    result = tune.tune(recordings(), EXAMPLE, stats.ratio_interval, configs=configs)
    assert result.engines["transformers"].config.given["draft_len"] == 8
    assert result.engines["vLLM suffix"].config.drafter == "suffix"
    assert "SGLang NGRAM" not in result.engines


# --- costs -----------------------------------------------------------------------------------------------------------


def rows_of(points: dict[tuple[int, int], int], device: str = "d", stack: str = "s") -> pa.Table:
    rows = [
        {"run_id": "r", "worker_id": "w", "device": device, "model": "m", "dtype": "bf16", "engine": "cached",
         "stack": stack, "kind": "forward", "context": context, "queries": queries, "sample": s, "ns": ns + (s - 1)}
        for (context, queries), ns in points.items()
        for s in range(3)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=CALIBRATION)


GRID = {(0, 1): 100, (0, 5): 140, (100, 1): 200, (100, 5): 280}


def test_costs_are_medians_and_linear_between_points(tmp_path: Path) -> None:
    pq.write_table(rows_of(GRID), tmp_path / "c.parquet")
    curve = verify_cost.load(str(tmp_path / "c.parquet"))
    assert curve.label == "m, bf16, cached, d, s"
    contexts, queries = np.array([0, 50, 100, 500, 0, 50]), np.array([1, 1, 1, 1, 3, 9])
    assert curve.cost(contexts, queries).tolist() == [100, 150, 200, 200, 120, 270]


def test_the_model_s_times_are_sums_over_passes() -> None:
    curve = verify_cost.relative("c", {1: 1.0, 3: 2.0})
    ar, own = verify_cost.times(curve, 10, np.array([1, 4]), np.array([3, 1]), 4)
    assert (ar, own) == (4e6, 3e6)


def test_json_curves(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"label": "mine", "queries": [1, 4], "relative": [1, 1.3]}))
    curve = verify_cost.load(str(file))
    assert curve.label == "mine" and curve.cost(np.array([7]), np.array([4])).tolist() == [1.3e6]
    file.write_text(json.dumps({"contexts": [0, 10], "queries": [1, 4], "ns": [[1, 2], [3, 4]]}))
    assert verify_cost.load(str(file)).cost(np.array([5]), np.array([1])).tolist() == [2]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"queries": [1, 4]}', '{"queries": [4, 1], "relative": [1, 2]}', '{"queries": [1, 2], "relative": [1]}',
     '{"queries": [1, 2], "relative": [1, NaN]}', '{"queries": [1, 2], "relative": [1, -2]}',
     '{"queries": [1, 2], "relative": ["1", "2"]}', '{"queries": [1, 2], "relative": [1e-9, 2]}',
     '{"queries": [1, 1.5], "relative": [1, 2]}', '{"queries": [1, Infinity], "relative": [1, 2]}',
     '{"queries": [4, 8], "relative": [1, 2]}', '{"queries": [1, 1%s], "relative": [1, 2]}' % ("0" * 400),
     '{"contexts": [-1], "queries": [1, 2], "ns": [[1, 2]]}',
     '{"contexts": [0], "queries": [1, 2], "ns": [[1, 1e300]]}',
     '{"label": "\\ud800", "queries": [1, 2], "relative": [1, 2]}', "[" * 100_000,
     '{"contexts": [0], "queries": [1, 2], "ns": [[1]]}', '{"contexts": [0], "queries": [1, 2], "ns": [[1, -2]]}'],
)  # fmt: skip
def test_what_is_no_curve_is_said_so(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match="is not a cost curve"):
        verify_cost.load(str(tmp_path / "c.json"))


def test_other_bad_sources_of_costs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run nor a file"):
        verify_cost.load(str(tmp_path / "none"))
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(UsageError, match="not a Parquet file"):
        verify_cost.load(str(tmp_path / "x.parquet"))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "y.parquet")
    with pytest.raises(UsageError, match="holds no calibration rows"):
        verify_cost.load(str(tmp_path / "y.parquet"))
    rows = rows_of(GRID)
    for name, ns in (("text", ["x"] * rows.num_rows), ("nan", [float("nan")] * rows.num_rows)):
        at = rows.schema.get_field_index("ns")
        pq.write_table(rows.set_column(at, "ns", pa.array(ns)), tmp_path / f"{name}.parquet")
        with pytest.raises(UsageError, match="not a Parquet file of calibration rows"):
            verify_cost.load(str(tmp_path / f"{name}.parquet"))
    for other in (rows_of(GRID, "other"), rows_of(GRID, stack="newer")):
        pq.write_table(pa.concat_tables([rows_of(GRID), other]), tmp_path / "z.parquet")
        with pytest.raises(UsageError, match="2 devices, models, engines or software versions"):
            verify_cost.load(str(tmp_path / "z.parquet"))
