-- view (made once): guard_summary: one cell of a spec arm; everything that the guard counts, its shape control's counts beside
--   it.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, pairs_planned BIGINT, pairs_compared BIGINT, tokens_compared BIGINT, tokens_identical
--   BIGINT, divergences BIGINT (first ones, one a pair), ties BIGINT, ulps BIGINT, unresolved BIGINT, violations
--   BIGINT, controls BIGINT (pairs with a shape control), control_divergences BIGINT, scored BIGINT (jobs with a
--   teacher-forced pass), outside BIGINT (jobs with a token beyond the bound), witnessed BIGINT (divergences re-run), cleared BIGINT, replayed BIGINT (jobs), replay_differs BIGINT
create or replace view guard_summary as
with control as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as controls,
        count(control_position) as control_divergences
    from guard_control
    group by all
),
teacher as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as scored,
        count(*) filter (outside > 0) as outside
    from guard_teacher
    group by all
),
witnessed as (
    select
        divergences.workload, divergences.arm, device, model, revision, dtype, engine, stack,
        count(cleared) as witnessed,
        count(*) filter (cleared) as cleared
    from divergences
    join guard_witness using (job_id, attempt)
    group by all
),
replayed as (
    select
        pairs.workload, pairs.arm, device, model, revision, dtype, engine, stack,
        count(*) as replayed,
        count(differs_at) as replay_differs
    from pairs
    join guard_replay using (job_id, attempt)
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, pairs_planned, pairs_compared, tokens_compared,
    tokens_identical, divergences, ties, ulps, unresolved, violations,
    coalesce(controls, 0) as controls,
    coalesce(control_divergences, 0) as control_divergences,
    coalesce(scored, 0) as scored,
    coalesce(outside, 0) as outside,
    coalesce(witnessed, 0) as witnessed,
    coalesce(cleared, 0) as cleared,
    coalesce(replayed, 0) as replayed,
    coalesce(replay_differs, 0) as replay_differs
from losslessness
left join control using (workload, arm, device, model, revision, dtype, engine, stack)
left join teacher using (workload, arm, device, model, revision, dtype, engine, stack)
left join witnessed using (workload, arm, device, model, revision, dtype, engine, stack)
left join replayed using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
