-- view (made once): verify_cost: one pass width at one context length; how much longer a pass takes than a pass over
--   one token. From `dfbench calibrate` where the run has its rows, and from the run's own steps.
-- columns: device VARCHAR, model VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, source VARCHAR (calibration;
--   steps), context INTEGER (tokens in the KV cache; steps: rounded down to a multiple of 64), queries INTEGER (tokens
--   in the pass), passes BIGINT, forward_us DOUBLE (median, µs), verify_cost DOUBLE (median / median at one query and
--   the same context)
create or replace view verify_cost as
with passes as (
    select
        pairs.device, model, dtype, engine, stack, 'steps' as source,
        (prompt_tokens + position) // 64 * 64 as context,
        queries,
        forward_ns as ns
    from steps
    join pairs using (job_id, attempt)
    where not warmup and forward_ns is not null
    union all
    select device, model, dtype, engine, stack, 'calibration', context, queries, ns
    from calibration
    where kind = 'forward'
),
medians as (
    select
        device, model, dtype, engine, stack, source, context, queries,
        count(*) as passes,
        median(ns) / 1e3 as forward_us
    from passes
    group by all
),
singles as (
    select device, model, dtype, engine, stack, source, context, forward_us as single_us
    from medians
    where queries = 1
)
select
    device, model, dtype, engine, stack, source, context, queries, passes, forward_us,
    forward_us / single_us as verify_cost
from medians
left join singles using (device, model, dtype, engine, stack, source, context)
order by all;
