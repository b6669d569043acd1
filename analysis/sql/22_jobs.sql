-- view: jobs: one finished job, warm-ups included; its counts are those of its step rows.
-- columns: run_id VARCHAR, job_id VARCHAR, shard_id VARCHAR, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR,
--   drafter VARCHAR, params VARCHAR (JSON), cache VARCHAR (cold; carried; preloaded), target VARCHAR (torch; recorded;
--   scripted), engine VARCHAR, model VARCHAR, revision VARCHAR (empty where the model has none), dtype VARCHAR, device
--   VARCHAR, stack VARCHAR, worker_id VARCHAR, attempt INTEGER, repeat INTEGER, turn INTEGER, warmup BOOLEAN,
--   pair_only BOOLEAN, arm_order INTEGER, prompt_tokens INTEGER, max_new_tokens INTEGER, output_tokens INTEGER,
--   decode_tokens INTEGER (output − 1), steps BIGINT, drafted_steps BIGINT, proposed BIGINT (tokens), accepted BIGINT
--   (tokens), emitted BIGINT (tokens), finish_reason VARCHAR (eos; length), began_at TIMESTAMP WITH TIME ZONE (UTC),
--   start_s DOUBLE (s), prefill_s DOUBLE (s), decode_s DOUBLE (s), wall_s DOUBLE (s), draft_s DOUBLE (s), forward_s
--   DOUBLE (s), output_ids INTEGER[], repetition DOUBLE (share of 4-grams seen earlier in the output), throttled
--   BOOLEAN, telemetry VARCHAR (JSON)
create or replace view jobs as
select
    run_id, job_id, shard_id, workload, prompt_id, arm, drafter, params, cache, target, engine, model,
    coalesce(revision, '') as revision,
    dtype, device, stack, worker_id, attempt, repeat, turn, warmup, pair_only, arm_order, prompt_tokens,
    max_new_tokens,
    len(output_ids)::integer as output_tokens,
    len(output_ids)::integer - 1 as decode_tokens,
    coalesce(steps, 0) as steps,
    coalesce(drafted_steps, 0) as drafted_steps,
    coalesce(proposed, 0) as proposed,
    coalesce(accepted, 0) as accepted,
    coalesce(emitted, 0) as emitted,
    finish_reason,
    began_at,
    start_ns / 1e9 as start_s,
    prefill_ns / 1e9 as prefill_s,
    decode_ns / 1e9 as decode_s,
    wall_ns / 1e9 as wall_s,
    draft_ns / 1e9 as draft_s,
    forward_ns / 1e9 as forward_s,
    output_ids, repetition, throttled, telemetry
from raw_jobs
left join step_totals using (job_id, attempt);
