-- view (made once): phases: one cell; where a step's time goes. Phases never overlap; other is what they miss.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, steps BIGINT, step_us DOUBLE (mean, µs), draft_us DOUBLE (µs), forward_us DOUBLE (µs),
--   accept_us DOUBLE (µs), commit_us DOUBLE (µs), other_us DOUBLE (µs), draft_share DOUBLE (of step time),
--   forward_share DOUBLE, accept_share DOUBLE, commit_share DOUBLE, other_share DOUBLE
create or replace view phases as
with jobs_phases as (
    select
        job_id, attempt,
        count(*) as steps,
        sum(step_ns) as step_ns, sum(draft_ns) as draft_ns, sum(forward_ns) as forward_ns,
        sum(accept_ns) as accept_ns, sum(commit_ns) as commit_ns
    from steps
    where not warmup and not pair_only and step_ns is not null
    group by job_id, attempt
),
sums as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(jobs_phases.steps)::bigint as steps,
        sum(step_ns) as step_ns, sum(draft_ns) as draft_ns, sum(forward_ns) as forward_ns,
        sum(accept_ns) as accept_ns, sum(commit_ns) as commit_ns
    from pairs
    join jobs_phases using (job_id, attempt)
    group by all
),
whole as (
    select *, step_ns - draft_ns - forward_ns - accept_ns - commit_ns as other_ns
    from sums
)
select
    workload, arm, device, model, revision, dtype, engine, stack, steps,
    step_ns / steps / 1e3 as step_us,
    draft_ns / steps / 1e3 as draft_us,
    forward_ns / steps / 1e3 as forward_us,
    accept_ns / steps / 1e3 as accept_us,
    commit_ns / steps / 1e3 as commit_us,
    other_ns / steps / 1e3 as other_us,
    draft_ns / step_ns as draft_share,
    forward_ns / step_ns as forward_share,
    accept_ns / step_ns as accept_share,
    commit_ns / step_ns as commit_share,
    other_ns / step_ns as other_share
from whole
order by all;
