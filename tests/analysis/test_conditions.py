"""How outputs ended and under what conditions they were made."""

from __future__ import annotations

from handmade import Make, ids, one

from dfbench.analysis import open_run


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
