-- view (made once): guard_scores: one emitted token whose logit the guard computed again in one plain pass.
-- columns: kind VARCHAR (teacher: of a recorded output; noise: of the shape control's own output), job_id VARCHAR,
--   attempt INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision
--   VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, position INTEGER, token_id INTEGER, recorded_logit FLOAT,
--   token_logit FLOAT (as recomputed), delta FLOAT (recorded − recomputed), ulp DOUBLE (at the larger of the
--   logit and the median top logit of the output), delta_ulp DOUBLE (of the
--   coarsest dtype in the compute path), delta_relative FLOAT (|delta| / max(1, |logit|)), short_ulp DOUBLE (how far
--   the token is below the recomputed maximum, ulp), short_relative FLOAT
create or replace view guard_scores as
with scores as (
    select
        *,
        -- Where the top logit happens to be near zero its own ulp says nothing: noise comes from the hidden state, whose
        -- scale the other positions show.
        greatest(
            abs(recorded_logit),
            abs(token_logit),
            median(abs(top1_logit)) over (partition by job_id, attempt, kind)
        ) as magnitude
    from witness
    where kind in ('teacher', 'noise')
)
select
    scores.kind, scores.job_id, scores.attempt, scores.workload, scores.prompt_id, scores.arm, jobs.device,
    jobs.model, coalesce(jobs.revision, '') as revision, jobs.dtype, jobs.engine, jobs.stack,
    scores.position, scores.token_id, scores.recorded_logit, scores.token_logit,
    scores.recorded_logit - scores.token_logit as delta,
    ulp_of(jobs.dtype, logits_dtype, magnitude) as ulp,
    delta / ulp as delta_ulp,
    abs(delta) / greatest(1, abs(scores.recorded_logit)) as delta_relative,
    (scores.top1_logit - scores.token_logit) / ulp as short_ulp,
    (scores.top1_logit - scores.token_logit) / greatest(1, abs(scores.top1_logit)) as short_relative
from scores
join raw_jobs as jobs on jobs.job_id = scores.job_id and jobs.attempt = scores.attempt
left join workers on workers.worker_id = jobs.worker_id;
