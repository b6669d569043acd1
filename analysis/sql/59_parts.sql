-- view (made once): parts: two arms of one drafter that differ in its options, and one metric; what does the later arm
--   of the plan add to the one before it? Where a drafter has three arms or more, also the last against the first.
-- columns: workload VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack
--   VARCHAR, drafter VARCHAR, arm VARCHAR, base VARCHAR (the arm it is compared with), whole BOOLEAN (the last arm
--   against the first: all parts together), metric VARCHAR (mat; queries: tokens a pass; speedup), prompts BIGINT (that
--   both have), value DOUBLE (of arm), base_value DOUBLE (of base), difference DOUBLE (value − base_value),
--   difference_lo DOUBLE (95 %), difference_hi DOUBLE (95 %), shown BOOLEAN (the interval leaves out zero), params
--   VARCHAR (JSON, of arm), base_params VARCHAR (JSON, of base)
create or replace view parts as
with widths as (
    select job_id, attempt, sum(queries) as queries
    from steps
    group by job_id, attempt
),
arms as (
    select
        workload, arm, drafter,
        row_number() over (partition by workload, drafter order by min(place), arm) as place,
        count(*) over (partition by workload, drafter) as arms
    from (select distinct workload, arm, drafter from pairs where drafter <> 'ar')
    left join ledger_plan using (workload, arm)
    group by workload, arm, drafter
),
units as (
    select
        workload, device, model, revision, dtype, engine, stack, drafter, arm, cache, place, arms, conversation,
        any_value(params) as params,
        sum(tokens) as tokens,
        sum(pairs.steps) as steps,
        sum(queries) as queries,
        sum(ar_decode_s) filter (comparable) as ar_s,
        sum(scaled_s) as scaled_s
    from pairs
    join widths using (job_id, attempt)
    join (select job_id, attempt, params from raw_jobs) as options using (job_id, attempt)
    join arms using (workload, arm, drafter)
    group by all
),
couples as (
    select
        workload, device, model, revision, dtype, engine, stack, drafter, mine.arm,
        theirs.arm as base,
        mine.place > theirs.place + 1 as whole,
        mine.place,
        mine.cache = 'carried' or theirs.cache = 'carried' as carried,
        mine.params,
        theirs.params as base_params,
        unnest([
            {'metric': 'mat', 'a': mine.tokens, 'b': mine.steps, 'c': theirs.tokens, 'd': theirs.steps},
            {'metric': 'queries', 'a': mine.queries, 'b': mine.steps, 'c': theirs.queries, 'd': theirs.steps},
            {'metric': 'speedup', 'a': mine.ar_s, 'b': mine.scaled_s, 'c': theirs.ar_s, 'd': theirs.scaled_s}
        ], recursive := true)
    from units as mine
    join units as theirs using (workload, device, model, revision, dtype, engine, stack, drafter, conversation)
    where mine.place = theirs.place + 1 or (mine.arms > 2 and mine.place = mine.arms and theirs.place = 1)
),
compared as (
    select
        workload, device, model, revision, dtype, engine, stack, drafter, arm, base, whole, place, metric,
        count(*) as prompts,
        sum(a) / sum(b) as value,
        sum(c) / sum(d) as base_value,
        case when not bool_or(carried) then difference_interval(list(a), list(b), list(c), list(d)) end as interval,
        any_value(params) as params,
        any_value(base_params) as base_params
    from couples
    where b > 0 and d > 0
    group by all
)
select
    workload, device, model, revision, dtype, engine, stack, drafter, arm, base, whole, metric, prompts, value,
    base_value,
    value - base_value as difference,
    interval.lo as difference_lo,
    interval.hi as difference_hi,
    interval.lo > 0 or interval.hi < 0 as shown,
    params, base_params
from compared
order by device, model, revision, dtype, engine, stack, workload, drafter, whole, place, metric;
