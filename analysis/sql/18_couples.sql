-- view (made once): couples: one finished job beside the AR job of the same shard, attempt, prompt, repeat and device; what
--   their outputs say.
-- columns: job_id VARCHAR, attempt INTEGER, ar_job_id VARCHAR (NULL without an AR job), tokens BIGINT (emitted by
--   steps), ar_tokens BIGINT, identical BOOLEAN (same output as AR), parts_at INTEGER (position of the first difference;
--   NULL where there is none), ar_id INTEGER (token there; NULL past AR's end), spec_id INTEGER (NULL past the other
--   output's end), differing_tokens INTEGER (in the whole output)
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
),
sides as (
    select
        outputs.job_id, outputs.attempt,
        baselines.job_id as ar_job_id,
        outputs.output_ids as ids,
        baselines.output_ids as ar_ids,
        case
            when len(ids) <> len(ar_ids) then false
            -- Says the same as ids = ar_ids in a third of the time.
            else list_distance(ids::double[], ar_ids::double[]) = 0
        end as identical
    from outputs
    left join baselines using (shard_id, attempt, prompt_id, repeat, device)
),
differences as (
    select
        *,
        len(ids) - 1 as tokens,
        len(ar_ids) - 1 as ar_tokens,
        case
            when not identical
                then list_filter(
                    range(1, greatest(len(ids), len(ar_ids)) + 1), lambda i: ids[i] is distinct from ar_ids[i]
                )
        end as differing
    from sides
)
select
    job_id, attempt, ar_job_id, tokens, ar_tokens, identical,
    (differing[1] - 1)::integer as parts_at,
    ar_ids[differing[1]] as ar_id,
    ids[differing[1]] as spec_id,
    len(differing)::integer as differing_tokens
from differences;
