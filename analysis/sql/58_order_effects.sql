-- view (made once): order_effects: one cell and one place in the rotation of a prompt's arms; does it matter whether
--   an arm ran first or last? A place whose interval leaves out 1 hints at drift (heat, clocks, neighbours).
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, arm_order INTEGER (from 0), jobs BIGINT, ms_per_token DOUBLE (mean, ms), speedup DOUBLE
--   (pairs where the arm ran here), relative DOUBLE (this place's speedup / that of all other places), interval_note
--   VARCHAR (why there is no interval), relative_lo DOUBLE (95 %), relative_hi DOUBLE (95 %)
create or replace view order_effects as
with places as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, arm_order,
        count(*) as jobs,
        count(distinct conversation) as prompts,
        bool_or(cache = 'carried') as carried,
        sum(decode_s) / sum(tokens) * 1e3 as ms_per_token,
        sum(ar_decode_s) as ar_s,
        sum(scaled_s) as scaled_s
    from pairs
    where comparable
    group by all
),
cell as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(ar_s) as all_ar_s, sum(scaled_s) as all_scaled_s, sum(prompts) as all_prompts
    from places
    group by all
),
contrasts as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, places.arm_order,
        ratio_of_ratios_interval(
            list(case when pairs.arm_order = places.arm_order then ar_decode_s else 0 end),
            list(case when pairs.arm_order = places.arm_order then pairs.scaled_s else 0 end),
            list(case when pairs.arm_order = places.arm_order then 0 else ar_decode_s end),
            list(case when pairs.arm_order = places.arm_order then 0 else pairs.scaled_s end)
        ) as interval
    from pairs
    join places using (workload, arm, device, model, revision, dtype, engine, stack)
    where comparable and cache <> 'carried'
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, arm_order, jobs, ms_per_token,
    ar_s / scaled_s as speedup,
    speedup / nullif((all_ar_s - ar_s) / nullif(all_scaled_s - scaled_s, 0), 0) as relative,
    case
        when carried then 'a carried cache: ' || counted_in() || ' depend on each other'
        when prompts < 3 then 'not enough: fewer than three ' || counted_in() || ' where the arm ran here'
        when all_prompts - prompts < 3 then 'not enough: fewer than three ' || counted_in() || ' where it ran elsewhere'
    end as interval_note,
    -- Not by interval_note, whose words are a subquery: DuckDB 2.0 fails on one that another column names.
    case when not carried and least(prompts, all_prompts - prompts) >= 3 then interval.lo end as relative_lo,
    case when not carried and least(prompts, all_prompts - prompts) >= 3 then interval.hi end as relative_hi
from places
join cell using (workload, arm, device, model, revision, dtype, engine, stack)
left join contrasts using (workload, arm, device, model, revision, dtype, engine, stack, arm_order)
order by all;
