"""Are the sums that commits leave what their step rows come to? Asked in SQL, of the rows alone."""

from __future__ import annotations

from collections.abc import Iterable

import duckdb

ASTRAY = """
with counted as (
    select
        job_id, attempt,
        count(*) as steps, count(*) filter (drafted > 0) as drafted_steps,
        sum(drafted) as proposed, sum(accepted) as accepted, sum(emitted) as emitted,
        sum(step_ns) as step_ns, sum(draft_ns) as draft_ns, sum(forward_ns) as forward_ns
    from raw_steps
    group by job_id, attempt
),
paired as (
    select sums.job_id, sums.attempt, sums.ar_job_id
    from raw_sums as sums
    join raw_jobs using (job_id, attempt)
    where drafter <> 'ar' and sums.ar_job_id is not null
),
beside as (
    select
        paired.job_id, paired.attempt,
        count(mine.position) - count(ar.position) as passes_past_ar,
        sum(ar.step_ns) as ar_pass_ns
    from paired
    left join raw_steps as mine using (job_id, attempt)
    left join raw_steps as ar
        on ar.job_id = paired.ar_job_id and ar.attempt = paired.attempt and ar.position = mine.position
    group by paired.job_id, paired.attempt
)
select sums.workload, sums.arm, count(*)
from raw_sums as sums
left join counted using (job_id, attempt)
left join beside using (job_id, attempt)
where sums.steps is distinct from coalesce(counted.steps, 0)
    or sums.drafted_steps is distinct from coalesce(counted.drafted_steps, 0)
    or sums.proposed is distinct from coalesce(counted.proposed, 0)
    or sums.accepted is distinct from coalesce(counted.accepted, 0)
    or sums.emitted is distinct from coalesce(counted.emitted, 0)
    or sums.step_ns is distinct from counted.step_ns
    or sums.draft_ns is distinct from counted.draft_ns
    or sums.forward_ns is distinct from counted.forward_ns
    or sums.passes_past_ar is distinct from beside.passes_past_ar
    or sums.ar_pass_ns is distinct from beside.ar_pass_ns
group by all
order by all
"""


def sums_astray(con: duckdb.DuckDBPyConnection) -> Iterable[str]:
    """Cells with jobs whose sums, which the views read in place of step rows, are not what the step rows come to."""
    for workload, arm, jobs in con.execute(ASTRAY).fetchall():
        yield f"{workload}/{arm}: the sums of {jobs} jobs are not what their step rows come to (see `dfbench verify`)."
