-- view (made once): accepted_histogram: one cell and one number of accepted draft tokens; how many steps had it.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, accepted INTEGER (tokens), steps BIGINT, drafted_steps BIGINT (of these, those that
--   carried a draft), share DOUBLE (of the cell's steps), share_drafted DOUBLE (of its drafted steps)
create or replace view accepted_histogram as
with counts as (
    select job_id, attempt, accepted, count(*) as steps, count(*) filter (drafted > 0) as drafted_steps
    from steps
    where not warmup and not pair_only
    group by job_id, attempt, accepted
),
cell as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, counts.accepted,
        sum(counts.steps)::bigint as steps,
        sum(counts.drafted_steps)::bigint as drafted_steps
    from pairs
    join counts using (job_id, attempt)
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, accepted, steps, drafted_steps,
    steps / sum(steps) over same as share,
    drafted_steps / nullif(sum(drafted_steps) over same, 0) as share_drafted
from cell
window same as (partition by workload, arm, device, model, revision, dtype, engine, stack)
order by all;
