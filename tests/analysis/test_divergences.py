"""Where outputs part from AR's, what their logits say, and whether every pair is accounted for."""

from __future__ import annotations

import duckdb
import pytest
from handmade import Make, ids, one
from runmaker import Facts, RunMaker

from dfbench.analysis import checks, open_run
from dfbench.analysis.guard import judge
from dfbench.analysis.store import planned_pairs
from dfbench.workers.target import Evidence


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


def test_planned_pairs_are_counted_once_whichever_devices_ran_them(make: Make) -> None:
    run = make()
    for prompt, device in (("p1", "one"), ("p2", "two")):
        for arm in ("ar", "pld"):
            run.job("code", prompt, arm, ids(0, 5), facts={"device": device})
        run.plan("code", prompt, "cacheback", state="failed")
    con = open_run(run.write())
    assert planned_pairs(con) == 4, "an arm without a record is planned all the same"
    assert judge(con, join_only=True).line().startswith("2 of 4 planned pairs compared")
    (told,) = [check.text for check in checks.checks(con) if check.name == "losslessness"]
    assert told.startswith("2 of 4 planned pairs compared, 2 with identical outputs")
