-- view (made once): pass_costs: one paired, timed job; what AR paid at the positions where this arm ran a pass.
-- columns: job_id VARCHAR, attempt INTEGER, passes_past_ar BIGINT (passes beyond the end of AR's output, counted at
--   AR's mean step time), ar_pass_ns DOUBLE (AR's step times at this arm's passes, ns)
create or replace view pass_costs as
with plain as (
    select
        job_id, attempt,
        -- Passes are in order, but for those of a job that two threads shared.
        case
            when positions = range(1, len(positions) + 1) then times
            else list_select(times, list_grade_up(positions))
        end as cost
    from job_passes
    where (job_id, attempt) in (select ar_job_id, attempt from pairs)
),
passes as (
    select job_id, attempt, passes_past_ar, ar_pass_ns
    from raw_sums
    anti join unsummed using (job_id, attempt)
    union all
    select
        pairs.job_id,
        pairs.attempt,
        case when tokens > ar_tokens then len(list_filter(positions, lambda p: p > len(cost))) else 0 end,
        list_sum(list_select(cost, positions))::bigint
    from pairs
    join job_passes using (job_id, attempt)
    join plain on plain.job_id = pairs.ar_job_id and plain.attempt = pairs.attempt
    where drafter <> 'ar'
)
select
    pairs.job_id,
    pairs.attempt,
    passes_past_ar,
    coalesce(ar_pass_ns, 0)
        + case when passes_past_ar > 0 then passes_past_ar * (ar.step_ns / ar.steps) else 0 end as ar_pass_ns
from pairs
join passes using (job_id, attempt)
left join step_totals as ar on ar.job_id = pairs.ar_job_id and ar.attempt = pairs.attempt
where comparable and drafter <> 'ar'
union all
select job_id, attempt, 0 as passes_past_ar, ar_decode_s * 1e9 as ar_pass_ns
from pairs
where comparable and drafter = 'ar';
