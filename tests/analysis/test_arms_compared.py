"""Arms beside each other on the same prompts, parts of a drafter, and groupings of your own."""

from __future__ import annotations

from handmade import Make, ids, two_prompts
from pages import with_parts

from dfbench.analysis import open_run
from dfbench.analysis.parts import changes, sentences, steps_of
from dfbench.analysis.store import rows as rows_of


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
    assert open_run(two_prompts(make()).write()).sql("select count(*) from parts").fetchall() == [(0,)]


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
    con = open_run(two_prompts(make()).write())
    assert con.sql("""select "group", mat from metrics_by(prompt_id) where arm = 'pld'""").fetchall() == [
        ("p1", 1.0),
        ("p2", 3.0),
    ]
    query = "select mat, round(speedup, 9) from metrics_by((workload, source)) where arm = 'pld'"
    assert con.sql(query).fetchall() == [(1.5, 1.8)]
