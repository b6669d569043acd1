"""The views on runs small enough to work out by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from pages import with_parts
from runmaker import Facts, RunMaker

from dfbench.analysis import open_run
from dfbench.analysis.parts import changes, sentences, steps_of
from dfbench.analysis.store import rows as rows_of
from dfbench.cluster.commit import encode
from dfbench.workers.target import Evidence

Make = Callable[..., RunMaker]


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def one(con: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    """The only row of a query, floats rounded to what can be worked out by hand."""
    [row] = con.sql(query).to_arrow_table().to_pylist()
    return {name: round(value, 9) if isinstance(value, float) else value for name, value in row.items()}


def two_prompts(run: RunMaker) -> duckdb.DuckDBPyConnection:
    """AR step costs 1 and 2 ms, MATs 1 and 3, passes as dear as plain steps."""
    run.job("code", "p1", "ar", ids(100, 13), [1] * 12, [1.0] * 12)
    run.job("code", "p1", "pld", ids(100, 13), [1] * 12, [1.0] * 12, arm_order=1)
    run.job("code", "p2", "ar", ids(200, 13), [1] * 12, [2.0] * 12, arm_order=1)
    run.job("code", "p2", "pld", ids(200, 13), [3] * 4, [2.0] * 4)
    return open_run(run.write())


def test_speedup_may_exceed_mat_in_a_sound_run(make: Make) -> None:
    """Two prompts with AR step costs 1 and 2 and MATs 1 and 3: speedup 36/20 at pooled MAT 24/16; the bound holds."""
    con = two_prompts(make())
    assert one(con, "select mat, speedup, speedup_bound, holds_bound, holds_mat, finding from speedup_le_mat "
               "where arm = 'pld'") == {
        "mat": 1.5, "speedup": 1.8, "speedup_bound": 1.8, "holds_bound": True, "holds_mat": False, "finding": False,
    }  # fmt: skip
    assert con.sql(
        "select prompt_id, mat, speedup, holds_bound and holds_mat from speedup_le_mat_prompts where arm = 'pld'"
    ).fetchall() == [("p1", 1.0, 1.0, True), ("p2", 3.0, 3.0, True)]


def test_the_three_means_of_mat(make: Make) -> None:
    con = two_prompts(make())
    assert one(con, "select tokens, steps, mat, mat_drafted, mat_mean_prompt from mat where arm = 'pld'") == {
        "tokens": 24, "steps": 16, "mat": 1.5, "mat_drafted": 3.0, "mat_mean_prompt": 2.0,
    }  # fmt: skip
    assert one(con, "select mat, mat_drafted from mat where arm = 'ar'") == {"mat": 1.0, "mat_drafted": None}


def test_the_headline_of_two_prompts(make: Make) -> None:
    row = one(two_prompts(make()), "from cells where arm = 'pld'")
    assert (row["prompts"], row["prompts_planned"], row["pairs"], row["pairs_left_out"]) == (2, 2, 2, 0)
    assert row["tokens_per_s"] == round(24 / 0.020, 9)
    assert (row["draft_coverage"], row["acceptance_rate"]) == (0.25, 1.0)
    assert (row["mat_lo"], row["speedup_hi"]) == (None, None)


def test_two_prompts_have_no_interval_and_say_why(make: Make) -> None:
    con = two_prompts(make())
    assert con.sql("select distinct interval_note from mat").fetchall() == [("fewer than three prompts",)]
    assert con.sql("select distinct interval_note from speedup").fetchall() == [("fewer than three prompts",)]


def test_an_output_that_ends_early_is_scaled_to_ars_length(make: Make) -> None:
    """AR: 8 tokens in 8 ms. The arm diverges, ends after 4 tokens in 2 steps of 1.2 ms: 2.4 ms becomes 4.8 ms."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 9), [1] * 8, [1.0] * 8)
    run.job("code", "p1", "pld", [*ids(0, 4), 99], [2, 2], [1.2, 1.2], finish="eos")
    con = open_run(run.write())
    assert one(con, "select speedup_decode, speedup_identical, identical_pairs from speedup where arm = 'pld'") == {
        "speedup_decode": round(8 / 4.8, 9), "speedup_identical": None, "identical_pairs": 0,
    }  # fmt: skip
    bound = one(con, "select speedup_bound, passes_past_ar from speedup_le_mat where arm = 'pld'")
    assert bound == {"speedup_bound": round(8 / (2 * 2), 9), "passes_past_ar": 0}


def test_an_output_longer_than_ars_uses_ars_mean_step_beyond_its_end(make: Make) -> None:
    """AR: steps of 1 and 3 ms. The arm's passes are at positions 1, 3 and 4; AR has none at 3 and 4."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 3), [1, 1], [1.0, 3.0], finish="eos")
    run.job("code", "p1", "pld", [0, 1, 9, 9, 9, 9], [2, 1, 2], [1.0, 1.0, 1.0])
    con = open_run(run.write())
    row = one(con, "select speedup, speedup_bound, passes_past_ar from speedup_le_mat where arm = 'pld'")
    assert row == {"speedup": round(4 / (3 * 2 / 5), 9), "speedup_bound": round(4 / (5 * 2 / 5), 9),
                   "passes_past_ar": 2}  # fmt: skip


def test_end_to_end_counts_prefill_and_drafter_start(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", ids(0, 5), [1] * 4, [1.0] * 4, prefill_ms=6.0)
    run.job("code", "p1", "pld", ids(0, 5), [2, 2], [1.0, 1.0], prefill_ms=6.0, start_ms=0.5)
    con = open_run(run.write())
    assert one(con, "select speedup_decode, speedup_e2e from speedup where arm = 'pld'") == {
        "speedup_decode": 2.0, "speedup_e2e": round(10 / 8.5, 9),
    }  # fmt: skip


def test_an_arm_with_wall_time_alone_is_compared_end_to_end_where_it_gave_as_many_tokens(make: Make) -> None:
    run = make()
    for prompt, tokens in (("p1", 5), ("p2", 4)):
        run.job("code", prompt, "ar", ids(0, 5), [1] * 4, [2.0] * 4, prefill_ms=1.5, start_ms=0.5)
        run.job("code", prompt, "hf", ids(0, tokens), wall_ms=8.0, drafter="hf-pld")
    con = open_run(run.write())
    assert one(con, "select pairs, speedup_decode, speedup_e2e from speedup where arm = 'hf'") == {
        "pairs": 0, "speedup_decode": None, "speedup_e2e": round(10 / 8, 9),
    }  # fmt: skip


def test_a_pair_without_steps_is_left_out_and_counted(make: Make) -> None:
    run = make()
    for arm in ("ar", "pld"):
        run.job("code", "p1", arm, [7], finish="eos")
        run.job("code", "p2", arm, ids(0, 5), [1] * 4, [1.0 if arm == "ar" else 0.5] * 4)
    con = open_run(run.write())
    assert one(con, "select pairs, pairs_left_out, speedup_decode from speedup where arm = 'pld'") == {
        "pairs": 1, "pairs_left_out": 1, "speedup_decode": 2.0,
    }  # fmt: skip
    assert con.sql("select steps, output_tokens, decode_tokens from jobs where prompt_id = 'p1'").fetchall() == (
        [(0, 1, 0)] * 2
    )


def test_a_retried_arm_pairs_with_the_ar_run_beside_it(make: Make) -> None:
    """The second attempt ran on a machine half as fast: paired with its own AR run the speedup is 2, not 1."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 5), [1] * 4, [1.0] * 4)
    run.job("code", "p1", "ar", ids(0, 5), [1] * 4, [2.0] * 4, attempt=2, pair_only=True)
    run.job("code", "p1", "pld", ids(0, 5), [2, 2], [2.0, 2.0], attempt=2)
    con = open_run(run.write())
    assert one(con, "select speedup_decode, pairs from speedup where arm = 'pld'") == {
        "speedup_decode": 2.0, "pairs": 1,
    }  # fmt: skip
    assert one(con, "select pairs, speedup_decode from speedup where arm = 'ar'") == {
        "pairs": 1, "speedup_decode": 1.0,
    }  # fmt: skip
    assert one(con, "select speedup_bound from speedup_le_mat where arm = 'pld'") == {"speedup_bound": 2.0}


def test_warm_ups_are_shown_and_in_no_figure(make: Make) -> None:
    run = make()
    for warm in (True, False):
        prompt = "warm" if warm else "p1"
        run.job("code", prompt, "ar", ids(0, 5), [1] * 4, [9.0 if warm else 1.0] * 4, warmup=warm)
        run.job("code", prompt, "pld", ids(0, 5), [4] if warm else [2, 2], [1.0] * (1 if warm else 2), warmup=warm)
    con = open_run(run.write())
    assert con.sql("select count(*) from jobs where warmup").fetchall() == [(2,)]
    assert one(con, "select mat, speedup, prompts from cells where arm = 'pld'") == {
        "mat": 2.0, "speedup": 2.0, "prompts": 1,
    }  # fmt: skip
    for view in ("accepted_histogram", "phases", "draft_coverage"):
        assert con.sql(f"select sum(steps) from {view} where arm = 'pld'").fetchall() == [(2,)]


def test_devices_are_never_pooled(make: Make) -> None:
    run = make()
    for device, cost in (("A", 1.0), ("B", 3.0)):
        facts = {"device": device, "worker_id": device}
        run.job("code", f"p{device}", "ar", ids(0, 5), [1] * 4, [cost] * 4, facts=facts)
        run.job("code", f"p{device}", "pld", ids(0, 5), [2, 2], [cost, cost], facts=facts)
    con = open_run(run.write())
    assert con.sql("select device, speedup from cells where arm = 'pld'").fetchall() == [("A", 2.0), ("B", 2.0)]


def test_untimed_runs_have_no_times_and_their_mat(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", ids(0, 5), [1] * 4, timed=False)
    run.job("code", "p1", "pld", ids(0, 5), [2, 2], timed=False)
    con = open_run(run.write())
    row = one(con, "from cells where arm = 'pld'")
    assert row["mat"] == 2.0
    assert {row[name] for name in ("tokens_per_s", "speedup", "speedup_lo", "speedup_bound")} == {None}
    assert con.sql("select decode_s, wall_s from jobs").fetchall() == [(None, None)] * 2
    assert con.sql("select count(*) from speedup_le_mat").fetchall() == [(0,)]
    assert con.sql("select count(*) from phases").fetchall() == [(0,)]


def test_a_carried_cache_has_no_interval(make: Make) -> None:
    run = make()
    for number in range(6):
        run.job("code", f"p{number}", "ar", ids(0, 9), [1] * 8, [1.0] * 8)
        emits = [2, 2, 2, 2] if number % 2 else [4, 4]
        run.job("code", f"p{number}", "pld", ids(0, 9), emits, [1.0] * len(emits), cache="carried")
        run.job("code", f"p{number}", "cacheback", ids(0, 9), emits, [1.0] * len(emits))
    con = open_run(run.write())
    found = con.sql("select arm, mat_lo is null, interval_note from mat order by arm").fetchall()
    assert found == [
        ("ar", False, None),
        ("cacheback", False, None),
        ("pld", True, "a carried cache: prompts depend on each other"),
    ]
    assert con.sql("select speedup_lo from cells where arm = 'pld'").fetchall() == [(None,)]
    assert con.sql("select count(*) from differences where arm = 'pld' and difference_lo is not null").fetchall() == (
        [(0,)]
    )


def test_turns_of_a_conversation_are_one_prompt_for_intervals(make: Make) -> None:
    run = make()
    for prompt in ("a", "b", "c"):
        for turn in range(2):
            name = prompt if turn == 0 else f"{prompt}#{turn + 1}"
            run.job("chat", name, "ar", ids(0, 5), [1] * 4, turn=turn)
    con = open_run(run.write())
    assert con.sql("select conversation, tokens from unit_sums order by all").fetchall() == [
        ("a", 8), ("b", 8), ("c", 8),
    ]  # fmt: skip


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


def evidence(
    top1: list[int], top2: list[int], gaps: list[float], top: float, ties: list[int] | None = None
) -> Evidence:
    """Logits of a pass over every token: the top one at `top`, the second `gap` below."""
    return Evidence(
        top1, [top] * len(top1), top2, [top - gap for gap in gaps], ties or [1 + (gap == 0) for gap in gaps]
    )


A, S, OTHER = 11, 22, 33

CASES = [
    # AR's second, AR's gap, spec's second, spec's gap, class; logits near 20: one bfloat16 ulp is 0.125
    (S, 0.0, A, 0.0, "tie_both"),
    (S, 0.0, A, 0.125, "tie_ar"),
    (S, 0.5, A, 0.0, "tie_spec"),
    (S, 0.0, A, 0.625, "violation"),
    (S, 0.125, A, 0.125, "ulp1"),
    (S, 0.5, A, 0.125, "ulp_k"),
    (S, 0.625, A, 0.125, "violation"),
    (OTHER, 0.0, A, 0.0, "unresolved"),
    (S, 0.0, OTHER, 0.0, "unresolved"),
]


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    """One prompt for each of CASES."""
    run = RunMaker(tmp_path_factory.mktemp("parted") / "run")
    ar, spec = [1, 2, A, 4], [1, 2, S, 5]
    for number, (ar_second, ar_gap, spec_second, spec_gap, _) in enumerate(CASES):
        seen = evidence(ar, [0, 0, ar_second, 0], [3.0, 3.0, ar_gap, 3.0], 20.0)
        run.job("code", f"p{number}", "ar", ar, evidence=seen)
        seen = evidence(spec, [0, 0, spec_second, 0], [3.0, 3.0, spec_gap, 3.0], 20.0)
        run.job("code", f"p{number}", "pld", spec, evidence=seen)
    return open_run(run.write())


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{number}-{case[-1]}" for number, case in enumerate(CASES)])
def test_divergences_are_classified_by_their_logits(parted: duckdb.DuckDBPyConnection, case: int) -> None:
    row = one(parted, f"from divergences where prompt_id = 'p{case}'")
    assert (row["position"], row["ar_id"], row["spec_id"], row["ulp"]) == (2, A, S, 0.125)
    assert (row["differing_tokens"], row["compared_tokens"]) == (2, 4)
    assert row["class"] == CASES[case][-1]


@pytest.mark.parametrize(
    ("dtype", "top", "ulp"),
    [("bfloat16", 8.0, 0.0625), ("bfloat16", 33.0, 0.25), ("float16", 20.0, 2**-6), ("float32", 20.0, 2**-19)],
)
def test_the_ulp_is_that_of_the_dtype_at_the_magnitude(make: Make, dtype: str, top: float, ulp: float) -> None:
    run = make(facts=Facts(dtype=dtype))
    run.job("code", "p1", "ar", [1, A], evidence=evidence([1, A], [0, S], [3.0, ulp], top))
    run.job("code", "p1", "pld", [1, S], evidence=evidence([1, S], [0, A], [3.0, 0.0], top))
    row = one(open_run(run.write()), "from divergences")
    assert (row["ulp"], row["ar_gap_ulp"], row["class"]) == (round(ulp, 9), 1.0, "tie_spec")


def test_float32_logits_of_a_bfloat16_model_have_bfloat16_ulps(make: Make) -> None:
    run = make()
    run.workers["w0"] = {"device": "toy device", "logits_dtype": "float32"}
    run.job("code", "p1", "ar", [1, A], evidence=evidence([1, A], [0, S], [3.0, 0.1], 20.0))
    run.job("code", "p1", "pld", [1, S], evidence=evidence([1, S], [0, A], [3.0, 0.1], 20.0))
    row = one(open_run(run.write()), "select ulp, class from divergences")
    assert row == {"ulp": 0.125, "class": "ulp1"}


def test_a_short_output_is_never_equal(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", ids(0, 5), evidence=evidence(ids(0, 5), [99] * 5, [3.0] * 5, 20.0))
    run.job("code", "p1", "pld", ids(0, 3), finish="eos", evidence=evidence(ids(0, 3), [99] * 3, [3.0] * 3, 20.0))
    con = open_run(run.write())
    row = one(con, "select position, spec_id, class, differing_tokens from divergences")
    assert row == {"position": 3, "spec_id": None, "class": "violation", "differing_tokens": 2}


def test_losslessness_accounts_for_every_planned_pair(make: Make) -> None:
    run = make()
    for prompt in ("p1", "p2"):
        run.job("code", prompt, "ar", ids(0, 5))
    run.job("code", "p1", "pld", ids(0, 5))
    run.plan("code", "p2", "pld", state="failed")
    row = one(open_run(run.write()), "from losslessness")
    assert (row["pairs_planned"], row["pairs_compared"], row["pairs_identical"]) == (2, 1, 1)
    assert (row["tokens_compared"], row["tokens_identical"], row["tokens_differing"]) == (5, 5, 0)


def drafts(make: Make) -> duckdb.DuckDBPyConnection:
    """Drafts of 2, 2, 1 and 0 tokens, of which 2, 0, 1 and 0 are accepted."""
    run = make()
    run.job("code", "p1", "ar", ids(0, 8))
    run.job("code", "p1", "pld", ids(0, 8), [3, 1, 2, 1], [4.0, 4.0, 4.0, 2.0], drafted=[2, 2, 1, 0], draft_ms=1.0)
    return open_run(run.write())


def test_acceptance_by_length_and_by_place(make: Make) -> None:
    con = drafts(make)
    assert con.sql(
        "select accepted, steps, drafted_steps, share from accepted_histogram where arm = 'pld'"
    ).fetchall() == [(0, 2, 1, 0.5), (1, 1, 1, 0.25), (2, 1, 1, 0.25)]
    assert con.sql(
        "select draft_position, drafted, reached, accepted, conditional_rate, unconditional_rate, per_draft_rate "
        "from accepted_by_position"
    ).fetchall() == [(1, 3, 3, 2, 2 / 3, 2 / 3, 2 / 3), (2, 2, 1, 1, 1.0, 0.5, 1 / 3)]
    row = one(con, "from draft_coverage where arm = 'pld'")
    assert (row["steps"], row["drafted_steps"], row["draft_coverage"]) == (4, 3, 0.75)
    assert (row["proposed"], row["accepted"], row["acceptance_rate"]) == (5, 3, 0.6)


def test_phases_add_up_to_the_step(make: Make) -> None:
    row = one(drafts(make), "from phases where arm = 'pld'")
    assert (row["steps"], row["step_us"], row["draft_us"], row["forward_us"], row["other_us"]) == (
        4, 3500.0, 1000.0, 1750.0, 750.0,
    )  # fmt: skip
    assert round(sum(row[f"{name}_share"] for name in ("draft", "forward", "accept", "commit", "other")), 9) == 1


def test_efficiency_and_draft_share(make: Make) -> None:
    row = one(drafts(make), "from efficiency where arm = 'pld'")
    assert row["mat"] == 1.75
    assert row["efficiency"] == round((7 / 14) / 1.75, 9)
    assert row["draft_share"] == round(4 / 14, 9)


def test_costs_come_from_calibration_and_from_steps(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", ids(0, 5), [1] * 4, [1.0] * 4, forward_share=0.9)
    run.job("code", "p1", "pld", ids(0, 5), [2, 2], [1.2, 1.2], forward_share=0.9)
    for sample, extra in enumerate((0, 10, 200)):
        run.forward(1, 1000 + extra, sample=sample)
        run.forward(3, 1400 + extra, sample=sample)
        run.read(10**9, 1000 + extra, sample=sample)
    run.workers["w0"] = {"weight_bytes": 900_000, "untied_input_embedding_bytes": 100_000, "kv_bytes_per_token": 1000}
    con = open_run(run.write())
    assert con.sql("select source, context, queries, forward_us, verify_cost from verify_cost").fetchall() == [
        ("calibration", 64, 1, 1010.0, 1.0),
        ("calibration", 64, 3, 1410.0, 1410 / 1010),
        ("steps", 0, 1, 900.0, 1.0),
        ("steps", 0, 2, 1080.0, 1.2),
    ]
    model = one(con, "select mat, speedup, speedup_model, mean_queries, widths_outside from speedup_model "
                "where arm = 'pld'")  # fmt: skip
    cost = 1 + (1410 / 1010 - 1) / 2
    assert model == {"mat": 2.0, "speedup": round(4 / 2.4, 9), "speedup_model": round(2 / cost, 9),
                     "mean_queries": 2.0, "widths_outside": 0.0}  # fmt: skip
    roof = one(con, "from roofline")
    assert roof["bytes_per_token"] == 800_000 + 1000 * (3 + 2)
    assert roof["read_gb_per_s"] == round(10**9 / 1_010_000, 9)
    assert roof["ar_us"] == 1000.0
    assert roof["roofline_fraction"] == round(805_000 / (10**9 / 1_010_000) / 1e3 / 1000, 9)


def test_endings_and_repetition(make: Make) -> None:
    run = make()
    run.job("code", "p1", "ar", [1, 2, 3, 4] * 4)
    run.job("code", "p2", "ar", ids(0, 6), finish="eos")
    con = open_run(run.write())
    assert con.sql("select finish_reason, outputs, share, mean_tokens from finish_reasons").fetchall() == [
        ("eos", 1, 0.5, 6.0),
        ("length", 1, 0.5, 16.0),
    ]
    row = one(con, "from repetition")
    assert (row["outputs"], row["loops"], row["capped"]) == (2, 1, 1)
    assert row["repetition_max"] == round(1 - 4 / 13, 9)
    assert (row["mat_uncapped"], row["repetition_uncapped"]) == (1.0, 0.0)


def test_throttled_jobs_are_marked_not_dropped(make: Make) -> None:
    run = make()
    for prompt, slow in (("p1", False), ("p2", True)):
        run.job("code", prompt, "ar", ids(0, 5), [1] * 4, [2.0 if slow else 1.0] * 4, throttled=slow)
        run.job("code", prompt, "pld", ids(0, 5), [2, 2], [1.0, 1.0], throttled=False)
    row = one(open_run(run.write()), "from throttled where arm = 'pld'")
    assert (row["jobs"], row["known"], row["throttled"], row["pairs_clean"]) == (2, 2, 0, 1)
    assert (row["speedup"], row["speedup_clean"]) == (3.0, 2.0)


def test_order_effects_compare_places_in_the_rotation(make: Make) -> None:
    run = make()
    for number in range(8):
        first = number % 2
        run.job("code", f"p{number}", "ar", ids(0, 5), [1] * 4, [1.0] * 4, arm_order=1 - first)
        run.job("code", f"p{number}", "pld", ids(0, 5), [2, 2], [1.0 if first else 2.0] * 2, arm_order=first)
    found = open_run(run.write()).sql(
        "select arm_order, jobs, speedup, relative from order_effects where arm = 'pld'"
    ).fetchall()  # fmt: skip
    assert found == [(0, 4, 1.0, 0.5), (1, 4, 2.0, 2.0)]


def test_too_few_prompts_at_a_place_are_said_to_be_too_few(make: Make) -> None:
    run = make()
    for number in range(4):
        first = int(number == 0)
        run.job("code", f"p{number}", "ar", ids(0, 5), [1] * 4, [1.0] * 4, arm_order=first)
        cost = 1 + 0.1 * number
        run.job("code", f"p{number}", "pld", ids(0, 5), [2, 2], [cost] * 2, arm_order=1 - first)
    found = open_run(run.write()).sql(
        "select arm_order, jobs, relative_lo, interval_note from order_effects where arm = 'pld'"
    ).fetchall()  # fmt: skip
    assert found == [
        (0, 1, None, "not enough: fewer than three prompts where the arm ran here"),
        (1, 3, None, "not enough: fewer than three prompts where it ran elsewhere"),
    ]


def test_no_interval_of_mat_goes_below_one(make: Make) -> None:
    """Three prompts, of which one drafts well: Student's t alone would begin at 0.3."""
    run = make()
    for number, emits in enumerate(([1] * 8, [1] * 8, [4, 4])):
        run.job("code", f"p{number}", "pld", ids(0, 9), emits)
    con = open_run(run.write())
    row = one(con, "select mat, mat_lo, mat_hi from mat")
    assert row["mat_lo"] == 1.0 < row["mat"] < row["mat_hi"]
    [(lo,)] = con.sql("select ratio_interval(list(tokens), list(steps)).lo from unit_sums").fetchall()
    assert lo < 1
    assert con.sql("select mat_lo from metrics_by(arm)").fetchall() == [(1.0,)]


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


def test_totals_of_a_job_are_those_of_its_steps(make: Make) -> None:
    con = drafts(make)
    columns = "count(*), sum(drafted), sum(accepted), sum(emitted), sum(draft_ns) / 1e9, sum(forward_ns) / 1e9"
    summed = con.sql(f"select job_id, {columns} from steps group by job_id order by 1").fetchall()
    assert con.sql(
        "select job_id, steps, proposed, accepted, emitted, draft_s, forward_s from jobs order by 1"
    ).fetchall() == summed  # fmt: skip


def test_what_each_part_of_a_drafter_adds(make: Make) -> None:
    con = open_run(with_parts(make()).write())
    found = con.sql("select arm, base, whole, metric, prompts, base_value, value from parts order by all").fetchall()
    assert [row for row in found if row[3] != "speedup"] == [
        ("full", "chain", True, "mat", 3, 2.0, 8.0),
        ("full", "chain", True, "queries", 3, 2.0, 6.0),
        ("full", "tree", False, "mat", 3, 4.0, 8.0),
        ("full", "tree", False, "queries", 3, 6.0, 6.0),
        ("tree", "chain", False, "mat", 3, 2.0, 4.0),
        ("tree", "chain", False, "queries", 3, 2.0, 6.0),
    ]
    speedups = [row for row in found if row[3] == "speedup"]
    assert [round(row[6] / row[5], 9) for row in speedups] == [4.0, 2.0, 2.0]
    within = "difference between difference_lo - 1e-9 and difference_hi + 1e-9"
    assert con.sql(f"select bool_and({within}) from parts").fetchall() == [(True,)]
    assert sentences(con)[0].startswith(
        "tree − chain on code, 3 prompts (draft: chain → tree): MAT 2.00 → 4.00, +2.00 (+2.00…+2.00); tokens a pass "
        "2.00 → 6.00, +4.00 (+4.00…+4.00); speedup "
    )
    [step, *_] = steps_of(rows_of(con, "from parts where arm = 'full' and not whole"))
    assert changes(step["mat"]) == "frozen: none → f"


def test_arms_of_different_drafters_are_no_parts(make: Make) -> None:
    assert two_prompts(make()).sql("select count(*) from parts").fetchall() == [(0,)]


def test_differences_of_two_arms_on_the_same_prompts(make: Make) -> None:
    run = make()
    for number in range(6):
        run.job("code", f"p{number}", "ar", ids(0, 9), [1] * 8, [1.0] * 8)
        run.job("code", f"p{number}", "pld", ids(0, 9), [2] * 4, [1.0] * 4)
        emits = [4, 4] if number % 2 else [2, 2, 4]
        run.job("code", f"p{number}", "cacheback", ids(0, 9), emits, [1.0] * len(emits))
    rows = open_run(run.write()).sql(
        "select metric, arm, other, prompts, round(difference, 9), shown from differences where other = 'cacheback'"
    ).fetchall()  # fmt: skip
    assert rows == [
        ("mat", "pld", "cacheback", 6, -1.2, True),
        ("speedup", "pld", "cacheback", 6, -1.2, True),
    ]


def test_your_own_grouping(make: Make) -> None:
    con = two_prompts(make())
    assert con.sql("""select "group", mat from metrics_by(prompt_id) where arm = 'pld'""").fetchall() == [
        ("p1", 1.0),
        ("p2", 3.0),
    ]
    query = "select mat, round(speedup, 9) from metrics_by((workload, source)) where arm = 'pld'"
    assert con.sql(query).fetchall() == [(1.5, 1.8)]
