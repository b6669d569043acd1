-- view (made once): guard_scores: one emitted token whose logit the guard computed again in one plain pass.
-- columns: kind VARCHAR (teacher: of a recorded output; noise: of the shape control's own output), job_id VARCHAR,
--   attempt INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision
--   VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, position INTEGER, token_id INTEGER, recorded_logit FLOAT,
--   token_logit FLOAT (as recomputed), delta FLOAT (recorded − recomputed), ulp DOUBLE, delta_ulp DOUBLE (of the
--   coarsest dtype in the compute path), delta_relative FLOAT (|delta| / max(1, |logit|)), short_ulp DOUBLE (how far
--   the token is below the recomputed maximum, ulp), short_relative FLOAT
create or replace view guard_scores as
select
    witness.kind, witness.job_id, witness.attempt, witness.workload, witness.prompt_id, witness.arm, jobs.device,
    jobs.model, coalesce(jobs.revision, '') as revision, jobs.dtype, jobs.engine, jobs.stack,
    witness.position, witness.token_id, witness.recorded_logit, witness.token_logit,
    witness.recorded_logit - witness.token_logit as delta,
    ulp_of(
        jobs.dtype,
        logits_dtype,
        greatest(abs(witness.recorded_logit), abs(witness.token_logit), abs(witness.top1_logit))
    ) as ulp,
    delta / ulp as delta_ulp,
    abs(delta) / greatest(1, abs(witness.recorded_logit)) as delta_relative,
    (witness.top1_logit - witness.token_logit) / ulp as short_ulp,
    (witness.top1_logit - witness.token_logit) / greatest(1, abs(witness.top1_logit)) as short_relative
from witness
join raw_jobs as jobs on jobs.job_id = witness.job_id and jobs.attempt = witness.attempt
left join workers on workers.worker_id = jobs.worker_id
where witness.kind in ('teacher', 'noise');
