-- view (made once): couples: one finished job beside the AR job of the same shard, attempt, prompt, repeat and device; what
--   their outputs say.
-- columns: job_id VARCHAR, attempt INTEGER, ar_job_id VARCHAR (NULL without an AR job), tokens BIGINT (emitted by
--   steps), ar_tokens BIGINT, identical BOOLEAN (same output as AR)
create or replace view couples as
with outputs as materialized (
    select shard_id, attempt, prompt_id, repeat, device, job_id, arm, drafter, warmup, pair_only, output_ids
    from raw_jobs
),
baselines as (
    select shard_id, attempt, prompt_id, repeat, device, job_id, output_ids
    from outputs
    where drafter = 'ar' and not warmup
    qualify row_number() over (
        partition by shard_id, attempt, prompt_id, repeat, device order by arm <> 'ar', arm, pair_only
    ) = 1
)
select
    outputs.job_id, outputs.attempt,
    baselines.job_id as ar_job_id,
    len(outputs.output_ids) - 1 as tokens,
    len(baselines.output_ids) - 1 as ar_tokens,
    case
        when tokens <> ar_tokens then false
        -- Says the same as outputs.output_ids = baselines.output_ids in a third of the time.
        else list_distance(outputs.output_ids::double[], baselines.output_ids::double[]) = 0
    end as identical
from outputs
left join baselines using (shard_id, attempt, prompt_id, repeat, device);
