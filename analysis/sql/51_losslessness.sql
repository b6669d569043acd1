-- view (made once): losslessness: one cell of a spec arm; is every planned pair accounted for, and how many outputs
--   are AR's?
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, pairs_planned BIGINT (of this workload and arm, all devices), pairs_compared BIGINT,
--   pairs_identical BIGINT, tokens_compared BIGINT, tokens_identical BIGINT, tokens_differing BIGINT, divergences
--   BIGINT (first ones, one a pair), ties BIGINT (tie_both; tie_ar; tie_spec), ulps BIGINT (ulp1; ulp_k), unresolved
--   BIGINT, violations BIGINT
create or replace view losslessness as
with compared as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) filter (ar_job_id is not null) as pairs_compared,
        count(*) filter (identical) as pairs_identical,
        sum(case when identical then tokens + 1 end)::bigint as tokens_in_identical
    from pairs
    where drafter <> 'ar'
    group by all
),
diverging as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as divergences,
        sum(differing_tokens)::bigint as differing,
        sum(compared_tokens)::bigint as tokens_in_diverging,
        count(*) filter (class like 'tie%') as ties,
        count(*) filter (class like 'ulp%') as ulps,
        count(*) filter (class = 'unresolved') as unresolved,
        count(*) filter (class = 'violation') as violations
    from divergences
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack,
    jobs as pairs_planned,
    pairs_compared, pairs_identical,
    coalesce(tokens_in_identical, 0) + coalesce(tokens_in_diverging, 0) as tokens_compared,
    tokens_compared - coalesce(differing, 0) as tokens_identical,
    coalesce(differing, 0) as tokens_differing,
    coalesce(divergences, 0) as divergences,
    coalesce(ties, 0) as ties,
    coalesce(ulps, 0) as ulps,
    coalesce(unresolved, 0) as unresolved,
    coalesce(violations, 0) as violations
from compared
left join diverging using (workload, arm, device, model, revision, dtype, engine, stack)
left join plan using (workload, arm)
order by all;
