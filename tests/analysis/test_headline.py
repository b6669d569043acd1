"""MAT and speedup of runs small enough to work out by hand: who pairs with whom, and who is left out."""

from __future__ import annotations

from handmade import Make, drafts, ids, one, two_prompts

from dfbench.analysis import open_run


def test_the_three_means_of_mat(make: Make) -> None:
    con = open_run(two_prompts(make()).write())
    assert one(con, "select tokens, steps, mat, mat_drafted, mat_mean_prompt from mat where arm = 'pld'") == {
        "tokens": 24, "steps": 16, "mat": 1.5, "mat_drafted": 3.0, "mat_mean_prompt": 2.0,
    }  # fmt: skip
    assert one(con, "select mat, mat_drafted from mat where arm = 'ar'") == {"mat": 1.0, "mat_drafted": None}


def test_the_headline_of_two_prompts(make: Make) -> None:
    row = one(open_run(two_prompts(make()).write()), "from cells where arm = 'pld'")
    assert (row["prompts"], row["prompts_planned"], row["pairs"], row["pairs_left_out"]) == (2, 2, 2, 0)
    assert row["tokens_per_s"] == round(24 / 0.020, 9)
    assert (row["draft_coverage"], row["acceptance_rate"]) == (0.25, 1.0)
    assert (row["mat_lo"], row["speedup_hi"]) == (None, None)


def test_two_prompts_have_no_interval_and_say_why(make: Make) -> None:
    con = open_run(two_prompts(make()).write())
    assert con.sql("select distinct interval_note from mat").fetchall() == [("fewer than three prompts",)]
    assert con.sql("select distinct interval_note from speedup").fetchall() == [("fewer than three prompts",)]


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


def test_totals_of_a_job_are_those_of_its_steps(make: Make) -> None:
    con = drafts(make)
    columns = "count(*), sum(drafted), sum(accepted), sum(emitted), sum(draft_ns) / 1e9, sum(forward_ns) / 1e9"
    summed = con.sql(f"select job_id, {columns} from steps group by job_id order by 1").fetchall()
    assert con.sql(
        "select job_id, steps, proposed, accepted, emitted, draft_s, forward_s from jobs order by 1"
    ).fetchall() == summed  # fmt: skip


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
    for view, note in (
        ("mat", "fewer than five conversations: Student's t, not a bootstrap"),
        ("order_effects", "not enough: fewer than three conversations where it ran elsewhere"),
    ):
        assert con.sql(f"select interval_note from {view}").fetchall() == [(note,)]
    assert con.sql("select conversation, tokens from unit_sums order by all").fetchall() == [
        ("a", 8), ("b", 8), ("c", 8),
    ]  # fmt: skip
