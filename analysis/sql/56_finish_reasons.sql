-- view (made once): finish_reasons: one cell and one reason; how outputs ended (eos: by themselves; length: at the
--   cap).
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, finish_reason VARCHAR, outputs BIGINT, share DOUBLE (of the cell's), mean_tokens DOUBLE
--   (tokens an output)
create or replace view finish_reasons as
with counts as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, finish_reason,
        count(*) as outputs,
        avg(len(output_ids)) as mean_tokens
    from (select * replace (coalesce(revision, '') as revision) from raw_jobs)
    where not warmup and not pair_only
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, finish_reason, outputs,
    outputs / sum(outputs) over (partition by workload, arm, device, model, revision, dtype, engine, stack) as share,
    mean_tokens
from counts
order by all;
