-- view (made once): repetition: one cell; how much its outputs repeat themselves (share of 4-grams seen earlier in
--   the same output) and what MAT is without the outputs that ran into the cap: greedy loops inflate it.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, outputs BIGINT, repetition DOUBLE (mean share), repetition_max DOUBLE (share), loops
--   BIGINT (outputs above one half), capped BIGINT (outputs that hit the cap), mat DOUBLE, mat_uncapped DOUBLE (over
--   outputs that ended by themselves), repetition_uncapped DOUBLE (mean share over these)
create or replace view repetition as
select
    pairs.workload, pairs.arm, pairs.device, pairs.model, pairs.revision, pairs.dtype, pairs.engine, pairs.stack,
    count(*) as outputs,
    avg(repetition) as repetition,
    max(repetition) as repetition_max,
    count(*) filter (repetition > 0.5) as loops,
    count(*) filter (finish_reason = 'length') as capped,
    sum(tokens) / nullif(sum(pairs.steps), 0) as mat,
    sum(tokens) filter (finish_reason = 'eos') / nullif(sum(pairs.steps) filter (finish_reason = 'eos'), 0)
        as mat_uncapped,
    avg(repetition) filter (finish_reason = 'eos') as repetition_uncapped
from pairs
join raw_jobs using (job_id, attempt)
where not warmup
group by all
order by all;
