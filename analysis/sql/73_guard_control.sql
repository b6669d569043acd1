-- view (made once): guard_control: one measured spec job beside its shape control, AR decoded at the job's own query widths .
--   What the control does, shape noise alone does.
-- columns: job_id VARCHAR, attempt INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, device VARCHAR,
--   model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, tokens BIGINT, control_position
--   INTEGER (first difference of the control from AR; NULL = none), spec_position INTEGER (of the spec output)
create or replace view guard_control as
with control as (
    select
        witness.job_id, witness.attempt,
        count(*) as tokens,
        min(witness.position) filter (
            witness.token_id is distinct from ar.output_ids[witness.position + 1]
        ) as control_position
    from witness
    join pairs on pairs.job_id = witness.job_id and pairs.attempt = witness.attempt
    join raw_jobs as ar on ar.job_id = pairs.ar_job_id and ar.attempt = pairs.attempt
    where witness.kind = 'control'
    group by witness.job_id, witness.attempt
)
select
    pairs.job_id, pairs.attempt, pairs.workload, pairs.prompt_id, pairs.arm, pairs.device, pairs.model,
    pairs.revision, pairs.dtype, pairs.engine, pairs.stack, control.tokens, control.control_position,
    divergences.position as spec_position
from pairs
join control using (job_id, attempt)
left join divergences using (job_id, attempt)
where pairs.drafter <> 'ar';
