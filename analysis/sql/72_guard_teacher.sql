-- view (made once): guard_teacher: one job; do its recorded logits agree with those of a plain pass over its whole output?
-- columns: job_id VARCHAR, attempt INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, device VARCHAR,
--   model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, tokens BIGINT, max_delta_ulp
--   DOUBLE, max_delta_relative FLOAT, mean_delta_ulp DOUBLE (signed: a small systematic error shows here),
--   max_short_ulp DOUBLE, bound_ulp DOUBLE, bound_relative DOUBLE, outside BIGINT (tokens beyond the bound),
--   first_outside INTEGER (position of the first of them)
create or replace view guard_teacher as
with judged as (
    select
        guard_scores.*, bound_ulp, bound_relative,
        case
            when bound_ulp is not null then abs(delta_ulp) > bound_ulp or short_ulp > bound_ulp
            else delta_relative > bound_relative or short_relative > bound_relative
        end as beyond
    from guard_scores
    join guard_bounds using (device, model, revision, dtype, engine, stack)
    where kind = 'teacher'
)
select
    job_id, attempt, workload, prompt_id, arm, device, model, revision, dtype, engine, stack,
    count(*) as tokens,
    max(abs(delta_ulp)) as max_delta_ulp,
    max(delta_relative) as max_delta_relative,
    avg(delta_ulp) as mean_delta_ulp,
    max(short_ulp) as max_short_ulp,
    any_value(bound_ulp) as bound_ulp,
    any_value(bound_relative) as bound_relative,
    count(*) filter (beyond) as outside,
    min(position) filter (beyond) as first_outside
from judged
group by job_id, attempt, workload, prompt_id, arm, device, model, revision, dtype, engine, stack;
