-- view (made once): differences: one workload, two arms of it and one metric; do they differ, on the same prompts?
-- columns: workload VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack
--   VARCHAR, metric VARCHAR (mat; speedup), arm VARCHAR, other VARCHAR, prompts BIGINT (that both have), difference
--   DOUBLE (arm − other), difference_lo DOUBLE (95 %), difference_hi DOUBLE (95 %), shown BOOLEAN (the interval leaves
--   out zero), prompts_needed DOUBLE (about, to show a difference of this size four times in five)
create or replace view differences as
with couples as (
    select
        workload, device, model, revision, dtype, engine, stack, conversation,
        mine.arm, theirs.arm as other,
        mine.cache = 'carried' or theirs.cache = 'carried' as carried,
        mine.tokens, mine.steps, mine.ar_s, mine.scaled_s,
        theirs.tokens as other_tokens, theirs.steps as other_steps, theirs.ar_s as other_ar_s,
        theirs.scaled_s as other_scaled_s
    from unit_sums as mine
    join unit_sums as theirs using (workload, device, model, revision, dtype, engine, stack, conversation)
    where mine.arm > theirs.arm and mine.steps > 0 and theirs.steps > 0
),
metrics as (
    select
        workload, device, model, revision, dtype, engine, stack, 'mat' as metric, arm, other, carried,
        tokens::double as a, steps::double as b, other_tokens::double as c, other_steps::double as d
    from couples
    union all
    select
        workload, device, model, revision, dtype, engine, stack, 'speedup' as metric, arm, other, carried,
        ar_s, scaled_s, other_ar_s, other_scaled_s
    from couples
    where scaled_s > 0 and other_scaled_s > 0
),
compared as (
    select
        workload, device, model, revision, dtype, engine, stack, metric, arm, other,
        count(*) as prompts,
        sum(a) / sum(b) - sum(c) / sum(d) as difference,
        case when not bool_or(carried) then difference_interval(list(a), list(b), list(c), list(d)) end as interval
    from metrics
    group by all
)
select
    workload, device, model, revision, dtype, engine, stack, metric, arm, other, prompts, difference,
    interval.lo as difference_lo,
    interval.hi as difference_hi,
    interval.lo > 0 or interval.hi < 0 as shown,
    case
        when difference <> 0
            then ceil(prompts * power(2.8016 / 1.95996 * (interval.hi - interval.lo) / 2 / difference, 2))
    end as prompts_needed
from compared
order by all;
