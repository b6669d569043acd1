"""Are the sums that commits leave what their step rows come to? Asked in SQL, of the rows alone."""

from __future__ import annotations

from collections.abc import Iterable

import duckdb

COUNTS = ("steps", "drafted_steps", "proposed", "accepted", "emitted")
TIMES = ("step_ns", "draft_ns", "forward_ns")


def sums_astray(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """Jobs whose sums, which the views read in place of step rows, are not what the step rows come to."""
    differ = " or ".join(
        [f"sums.{name} <> coalesce(rows.{name}, 0)" for name in COUNTS]
        + [f"sums.{name} is distinct from rows.{name}" for name in TIMES]
    )
    for workload, arm, jobs in con.execute(
        f"""
        with rows as (
            select
                job_id, attempt,
                count(*) as steps, count(*) filter (drafted > 0) as drafted_steps, sum(drafted) as proposed,
                sum(accepted) as accepted, sum(emitted) as emitted,
                {", ".join(f"sum({name}) as {name}" for name in TIMES)}
            from raw_steps group by job_id, attempt
        )
        select sums.workload, sums.arm, count(*)
        from raw_sums as sums left join rows using (job_id, attempt)
        where {differ}
        group by all order by all
        """
    ).fetchall():
        yield f"{workload}/{arm}: the sums of {jobs} jobs are not what their step rows come to (see `dfbench verify`)."
