"""What drafts were worth, where the time of a step goes, and what a pass costs."""

from __future__ import annotations

from handmade import Make, drafts, ids, one

from dfbench.analysis import open_run


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
