-- view (made once): mat: one cell; how many tokens a target forward gave, by each of the definitions in use.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, prompts BIGINT, tokens BIGINT (N), steps BIGINT (S), mat DOUBLE (ΣN / ΣS), mat_lo DOUBLE
--   (95 %), mat_hi DOUBLE (95 %), mat_drafted DOUBLE (1 + ΣA / ΣD; drafted steps only), mat_mean_prompt DOUBLE (mean
--   over prompts of N / S), interval_note VARCHAR (why there is no interval, or another kind)
create or replace view mat as
with units as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as units,
        bool_or(cache = 'carried') as carried,
        ratio_interval(list(tokens), list(steps)) as interval
    from unit_sums
    where steps > 0
    group by all
),
sums as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as prompts,
        sum(tokens)::bigint as tokens,
        sum(steps)::bigint as steps,
        sum(tokens) / nullif(sum(steps), 0) as mat,
        1 + sum(accepted) / nullif(sum(drafted_steps), 0) as mat_drafted,
        avg(tokens / nullif(steps, 0)) as mat_mean_prompt
    from prompt_sums
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, prompts, tokens, steps, mat,
    case when not carried then mat_from(interval.lo) end as mat_lo,
    case when not carried then interval.hi end as mat_hi,
    mat_drafted, mat_mean_prompt,
    interval_note(carried, units) as interval_note
from sums
left join units using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
