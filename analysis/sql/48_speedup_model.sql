-- view (made once): speedup_model: one cell and one cost curve; the speedup that its own pass widths predict, beside the
--   measured one: Σ over output tokens of a plain pass ÷ Σ over its passes of their cost, each at its context length.
--   Costs are medians of `calibration`, linear between its points; beyond its widths they go on as between the last two.
--   A replay is priced with every curve that it was given, a timed run with its own device's.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, curve VARCHAR (whose costs: model, dtype, engine, device, stack), prompts BIGINT, mat DOUBLE,
--   speedup DOUBLE (measured), speedup_model DOUBLE (NULL without calibration), speedup_model_lo DOUBLE (95 %),
--   speedup_model_hi DOUBLE (95 %), mean_queries DOUBLE (tokens a pass), mean_cost DOUBLE (a pass, in plain passes),
--   widths_outside DOUBLE (share of passes wider than any calibrated one)
create or replace view speedup_model as
with points as materialized (
    select
        dense_rank() over (order by device, model, dtype, engine, stack) as curve_id,
        device, model, dtype, engine, stack, context, queries,
        median(ns) as ns
    from calibration
    where kind = 'forward'
    group by device, model, dtype, engine, stack, context, queries
),
widths as materialized (
    select
        curve_id,
        context,
        queries as lower,
        lead(queries) over following as upper,
        lag(queries) over following is null as lowest,
        ns,
        coalesce(
            (lead(ns) over following - ns) / (upper - queries),
            (ns - lag(ns) over following) / (queries - lag(queries) over following),
            0
        ) as slope
    from points
    window following as (partition by curve_id, context order by queries)
),
depths as materialized (
    select
        curve_id,
        context as lower,
        lead(context) over following as upper,
        lag(context) over following is null as lowest
    from (select distinct curve_id, context from points)
    window following as (partition by curve_id order by context)
),
names as (
    select distinct
        curve_id, device, model, dtype, engine, stack,
        concat_ws(', ', nullif(model, ''), nullif(dtype, ''), nullif(engine, ''), device, nullif(stack, '')) as curve
    from points
),
matches as materialized (
    select place.device, place.model, place.dtype, place.engine, place.stack, curve_id, curve
    from (select distinct device, model, dtype, engine, stack from pairs) as place
    join names
        on place.engine in (select engine from jobs where target = 'recorded')
        or (place.device, place.model, place.dtype, place.engine, place.stack)
            = (names.device, names.model, names.dtype, names.engine, names.stack)
),
passes as materialized (
    select
        pairs.workload, pairs.arm, pairs.device, model, revision, dtype, engine, stack, conversation,
        prompt_tokens + position - 1 as context,
        queries + padding as queries,
        count(*) as passes
    from steps
    join pairs using (job_id, attempt)
    group by all
),
needed as materialized (
    select context, queries
    from passes
    union
    select unnest(range((select max(prompt_tokens + tokens) + 1 from pairs))) as context, 1 as queries
),
priced as materialized (
    select
        depths.curve_id,
        needed.context,
        needed.queries,
        low.ns + low.slope * (needed.queries - low.lower) as low_ns,
        high.ns + high.slope * (needed.queries - high.lower) as high_ns,
        greatest((needed.context - depths.lower) / (depths.upper - depths.lower), 0) as share,
        low_ns + coalesce(share * (high_ns - low_ns), 0) as ns,
        low.upper is null and needed.queries > low.lower as outside
    from needed
    join depths
        on (needed.context >= depths.lower or depths.lowest)
        and (needed.context < depths.upper or depths.upper is null)
    join widths as low
        on low.curve_id = depths.curve_id
        and low.context = depths.lower
        and (needed.queries >= low.lower or low.lowest)
        and (needed.queries < low.upper or low.upper is null)
    left join widths as high
        on high.curve_id = depths.curve_id
        and high.context = depths.upper
        and (needed.queries >= high.lower or high.lowest)
        and (needed.queries < high.upper or high.upper is null)
),
plain as materialized (
    select curve_id, context, sum(ns) over (partition by curve_id order by context) - ns as before_ns
    from priced
    where queries = 1
),
ar as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, conversation, matches.curve_id,
        sum(till.before_ns - since.before_ns) as ar_ns,
        sum(tokens) as tokens,
        bool_or(cache = 'carried') as carried
    from pairs
    join matches using (device, model, dtype, engine, stack)
    join plain as since on since.curve_id = matches.curve_id and since.context = prompt_tokens
    join plain as till on till.curve_id = matches.curve_id and till.context = prompt_tokens + tokens
    group by all
),
own as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, conversation, curve_id,
        sum(passes * ns) as own_ns,
        sum(passes) as passes,
        sum(passes) filter (outside) as outside
    from passes
    join matches using (device, model, dtype, engine, stack)
    join priced using (curve_id, context, queries)
    group by all
),
totals as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, curve_id,
        sum(ar_ns) / sum(own_ns) as speedup_model,
        case when not bool_or(carried) then ratio_interval(list(ar_ns), list(own_ns)) end as interval,
        (sum(own_ns) / sum(passes)) / (sum(ar_ns) / sum(tokens)) as mean_cost,
        coalesce(sum(outside), 0) / sum(passes) as widths_outside
    from ar
    join own using (workload, arm, device, model, revision, dtype, engine, stack, conversation, curve_id)
    group by all
),
used as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(passes * queries) / sum(passes) as mean_queries
    from passes
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, curve, prompts, mat,
    speedup_decode as speedup,
    speedup_model,
    interval.lo as speedup_model_lo,
    interval.hi as speedup_model_hi,
    mean_queries, mean_cost, widths_outside
from mat
join speedup using (workload, arm, device, model, revision, dtype, engine, stack)
join used using (workload, arm, device, model, revision, dtype, engine, stack)
left join matches using (device, model, dtype, engine, stack)
left join totals using (workload, arm, device, model, revision, dtype, engine, stack, curve_id)
order by all;
