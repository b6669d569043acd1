"""Is a speedup explained by the passes saved? The bound, and what is shown of a breach."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pyarrow.parquet as pq
import pytest
from handmade import Make, ids, one, two_prompts
from runmaker import RunMaker

from dfbench.analysis import open_run
from dfbench.analysis.checks import checks
from dfbench.cluster.commit import encode


def test_speedup_may_exceed_mat_in_a_sound_run(make: Make) -> None:
    """Two prompts with AR step costs 1 and 2 and MATs 1 and 3: speedup 36/20 at pooled MAT 24/16; the bound holds."""
    con = open_run(two_prompts(make()).write())
    assert one(con, "select mat, speedup, speedup_bound, holds_bound, holds_mat, finding from speedup_le_mat "
               "where arm = 'pld'") == {
        "mat": 1.5, "speedup": 1.8, "speedup_bound": 1.8, "holds_bound": True, "holds_mat": False, "finding": False,
    }  # fmt: skip
    assert con.sql(
        "select prompt_id, mat, speedup, holds_bound and holds_mat from speedup_le_mat_prompts where arm = 'pld'"
    ).fetchall() == [("p1", 1.0, 1.0, True), ("p2", 3.0, 3.0, True)]


def test_an_output_longer_than_ars_uses_ars_mean_step_beyond_its_end(make: Make) -> None:
    """AR: steps of 1 and 3 ms. The arm's passes are at positions 1, 3 and 4; AR has none at 3 and 4."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 3), [1, 1], [1.0, 3.0], finish="eos")
    run.job("code", "p1", "pld", [0, 1, 9, 9, 9, 9], [2, 1, 2], [1.0, 1.0, 1.0])
    con = open_run(run.write())
    row = one(con, "select speedup, speedup_bound, passes_past_ar from speedup_le_mat where arm = 'pld'")
    assert row == {"speedup": round(4 / (3 * 2 / 5), 9), "speedup_bound": round(4 / (5 * 2 / 5), 9),
                   "passes_past_ar": 2}  # fmt: skip


def test_the_bound_does_not_depend_on_the_order_of_rows(make: Make) -> None:
    """AR's steps cost 1, 2, 4 and 8 ms; the arm runs passes at positions 1 and 3: they cost AR 5 of 15."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 5), [1] * 4, [1.0, 2.0, 4.0, 8.0])
    run.job("code", "p1", "pld", ids(0, 5), [2, 2], [1.0, 4.0])
    path = run.write()
    [file] = path.glob("records/0/steps-*.parquet")
    rows = pq.read_table(file)
    for order in (range(rows.num_rows), reversed(range(rows.num_rows)), (2, 0, 3, 1, 5, 4)):
        data = encode(rows.take(list(order))).to_pybytes()
        file.write_bytes(data)
        with closing(sqlite3.connect(path / "ledger.db")) as ledger, ledger:
            ledger.execute("update files set bytes = ? where tbl = 'steps'", (len(data),))
        assert one(open_run(path), "select speedup_bound from cells where arm = 'pld'") == {"speedup_bound": 3.0}


@pytest.mark.parametrize(
    ("costs", "draft_ms", "forward_share", "cause"),
    [
        ([0.4, 0.4], 0.0, 0.5, "timed shorter than plain AR steps"),
        ([0.6, 0.6], 0.0, 0.9, "AR pays 438.8 µs a step outside the forward"),
    ],
)
def test_a_clock_that_breaks_the_bound_is_a_finding(
    make: Make, costs: list[float], draft_ms: float, forward_share: float, cause: str
) -> None:
    """Passes that are cheaper than plain steps at the same positions: five prompts, all alike but for a jitter."""
    run = make()
    for number in range(5):
        jitter = 1 + 0.01 * number
        run.job("code", f"p{number}", "ar", ids(0, 5), [1] * 4, [1.0] * 4)
        arm = [cost * jitter for cost in costs]
        run.job("code", f"p{number}", "pld", ids(0, 5), [2, 2], arm, draft_ms=draft_ms, forward_share=forward_share)
    row = one(open_run(run.write()), "from speedup_le_mat where arm = 'pld'")
    assert row["speedup"] > row["speedup_bound"] == 2.0
    assert not row["holds_bound"]
    assert row["finding"]
    assert row["over_bound_lo"] > 1
    assert cause in row["likely_cause"]


def test_noise_above_the_bound_is_no_finding(make: Make) -> None:
    run = make()
    for number, cost in enumerate((0.90, 1.08, 0.92, 1.07, 0.99)):
        run.job("code", f"p{number}", "ar", ids(0, 5), [1] * 4, [1.0] * 4)
        run.job("code", f"p{number}", "pld", ids(0, 5), [2, 2], [cost, cost])
    row = one(open_run(run.write()), "from speedup_le_mat where arm = 'pld'")
    assert not row["holds_bound"]
    assert row["over_bound_lo"] < 1 < row["over_bound_hi"]
    assert not row["finding"]


def few_prompts(run: RunMaker, prompts: int, factor: float, **more: Any) -> list[str]:
    """What the report says of an arm that is `factor` above its bound, on this many prompts."""
    for number in range(prompts):
        run.job("code", f"p{number}", "ar", ids(0, 5), [1] * 4, [1.0] * 4)
        run.job("code", f"p{number}", "pld", ids(0, 5), [2, 2], [1 / factor] * 2, **more)
    con = open_run(run.write())
    return [f"{check.state} {check.text}" for check in checks(con) if check.name == "speedup ≤ bound"]


@pytest.mark.parametrize("prompts", [1, 2])
def test_load_on_one_or_two_prompts_is_no_finding(make: Make, prompts: int) -> None:
    told, line = few_prompts(make(), prompts, 1.1)
    assert told == "note holds in 0 of 1 cells; a breach is shown in none."
    assert line.startswith("note pld on code: 2.200 is above its bound 2.000 by a factor of 1.100: no breach shown")
    assert line.endswith(f" with {prompts} prompt{'s' * (prompts > 1)}; 3 or more have an interval.")


def test_what_no_load_does_is_a_finding_on_a_single_prompt(make: Make) -> None:
    told, line = few_prompts(make(), 1, 4.0)
    assert told == "note holds in 0 of 1 cells; a breach is shown in 1."
    assert line.startswith("finding pld on code: 8.000 is above its bound 2.000 by a factor of 4.000, which is no")
    assert "a breach, shown with 1 prompt; its passes are timed shorter than plain AR steps" in line


def test_tokens_that_no_output_has_are_a_finding_however_small(make: Make) -> None:
    """A step that says it emitted more than the output holds: counted past the cap."""
    run = make()
    run.job("code", "p0", "ar", ids(0, 5), [1] * 4, [1.0] * 4)
    run.job("code", "p0", "pld", ids(0, 5), [2, 3], [0.99, 0.99])
    row = one(open_run(run.write()), "select finding, likely_cause, prompts from speedup_le_mat where arm = 'pld'")
    assert row == {
        "finding": True, "prompts": 1,
        "likely_cause": "its steps emit tokens that its outputs do not have: counted past EOS or the cap?",
    }  # fmt: skip


def test_a_breach_that_the_interval_covers_says_so(make: Make) -> None:
    run = make()
    for number, cost in enumerate((0.90, 1.08, 0.92, 1.07, 0.99)):
        run.job("code", f"p{number}", "ar", ids(0, 5), [1] * 4, [1.0] * 4)
        run.job("code", f"p{number}", "pld", ids(0, 5), [2, 2], [cost, cost])
    [line] = [check.text for check in checks(open_run(run.write())) if "above its bound" in check.text]
    assert "by a factor of 1.008, interval 0.8" in line
    assert line.endswith(": no breach shown with 5 prompts; measure more prompts or repeats.")
