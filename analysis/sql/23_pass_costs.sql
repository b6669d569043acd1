-- view (made once): pass_costs: one paired, timed job; what AR paid at the positions where this arm ran a pass.
-- columns: job_id VARCHAR, attempt INTEGER, passes_past_ar BIGINT (passes beyond the end of AR's output, counted at
--   AR's mean step time), ar_pass_ns DOUBLE (AR's step times at this arm's passes, ns)
create or replace view pass_costs as
with costs as materialized (
    select job_id, attempt, list(step_ns order by step) as cost
    from steps
    where not warmup and arm in (select arm from jobs where drafter = 'ar') and step_ns is not null
    group by job_id, attempt
),
passes as materialized (
    select job_id, attempt, list(position) as positions
    from steps
    where not warmup and not pair_only and step_ns is not null
    group by job_id, attempt
)
select
    pairs.job_id,
    pairs.attempt,
    len(positions) - len(list_filter(positions, lambda p: p <= len(cost))) as passes_past_ar,
    coalesce(list_sum(list_select(cost, positions)), 0) + passes_past_ar * list_avg(cost) as ar_pass_ns
from pairs
join passes using (job_id, attempt)
join costs on costs.job_id = pairs.ar_job_id and costs.attempt = pairs.attempt
where comparable;
