-- view (made once): speedup_model: one cell; the speedup that its own pass widths predict from calibration, beside
--   the measured one: Σ AR passes ÷ Σ of the cost of each pass (linear between calibrated widths, mean over contexts).
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, mat DOUBLE, speedup DOUBLE (measured), speedup_model DOUBLE (NULL without calibration),
--   mean_queries DOUBLE (tokens a pass), mean_cost DOUBLE (a pass, in plain passes), widths_outside DOUBLE (share of
--   passes wider than any calibrated one, taken at the widest one's cost)
create or replace view speedup_model as
with costs as (
    select device, model, dtype, engine, stack, queries, avg(verify_cost) as cost
    from verify_cost
    where source = 'calibration' and verify_cost is not null
    group by all
),
spans as (
    select
        device, model, dtype, engine, stack,
        queries as lower,
        cost as lower_cost,
        lead(queries) over width as upper,
        lead(cost) over width as upper_cost
    from costs
    window width as (partition by device, model, dtype, engine, stack order by queries)
),
widths as (
    select job_id, attempt, queries + padding as queries, count(*) as passes
    from steps
    where not warmup and not pair_only
    group by all
),
used as (
    select workload, arm, device, model, revision, dtype, engine, stack, queries, sum(passes) as passes
    from pairs
    join widths using (job_id, attempt)
    group by all
),
priced as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, queries, passes,
        lower_cost + coalesce((upper_cost - lower_cost) * (queries - lower) / (upper - lower), 0) as cost,
        upper is null and queries > lower as outside
    from used
    left join spans using (device, model, dtype, engine, stack)
    where lower is null or (queries >= lower and (upper is null or queries < upper))
),
totals as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(passes * queries) / sum(passes) as mean_queries,
        case when count(cost) = count(*) then sum(passes * cost) / sum(passes) end as mean_cost,
        sum(passes) filter (outside) / sum(passes) as widths_outside
    from priced
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, mat,
    speedup_decode as speedup,
    mat / mean_cost as speedup_model,
    mean_queries, mean_cost,
    case when mean_cost is not null then coalesce(widths_outside, 0) end as widths_outside
from mat
join speedup using (workload, arm, device, model, revision, dtype, engine, stack)
join totals using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
