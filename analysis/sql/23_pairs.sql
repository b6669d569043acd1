-- view (made once): pairs: one measured job beside the AR job of the same shard, attempt, prompt and repeat.
-- columns: run_id VARCHAR, job_id VARCHAR, attempt INTEGER, shard_id VARCHAR, workload VARCHAR, arm VARCHAR, device
--   VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, drafter VARCHAR, cache
--   VARCHAR, worker_id VARCHAR, prompt_id VARCHAR, conversation VARCHAR (the prompt whose turns belong together),
--   repeat INTEGER, turn INTEGER, arm_order INTEGER, throttled BOOLEAN, prompt_tokens INTEGER, tokens INTEGER (emitted
--   by steps), steps BIGINT, drafted_steps BIGINT, proposed BIGINT (tokens), accepted BIGINT (tokens), emitted BIGINT
--   (tokens, by the step rows), decode_s DOUBLE (s), draft_s DOUBLE (s), forward_s DOUBLE (s), before_s DOUBLE
--   (prefill and drafter start-up, s), ar_job_id VARCHAR (NULL without an AR job), ar_tokens INTEGER, ar_steps BIGINT,
--   ar_decode_s DOUBLE (s), ar_draft_s DOUBLE (s), ar_forward_s DOUBLE (s), ar_before_s DOUBLE (s), identical BOOLEAN
--   (same output as AR), comparable BOOLEAN (both timed, both with N > 0), scaled_s DOUBLE (decode_s at AR's number of
--   tokens, s), e2e_s DOUBLE (that with before_s; of a job that has wall time alone, its wall time, where it gave as many
--   tokens as AR), ar_e2e_s DOUBLE (s, where e2e_s is known)
create or replace view pairs as
select
    mine.run_id, mine.job_id, mine.attempt, mine.shard_id, mine.workload, mine.arm, mine.device, mine.model,
    mine.revision, mine.dtype, mine.engine, mine.stack, mine.drafter, mine.cache, mine.worker_id, mine.prompt_id,
    case when mine.turn > 0 then regexp_replace(mine.prompt_id, '#\d+$', '') else mine.prompt_id end as conversation,
    mine.repeat, mine.turn, mine.arm_order, mine.throttled, mine.prompt_tokens,
    tokens::integer as tokens,
    mine.steps, mine.drafted_steps, mine.proposed, mine.accepted, mine.emitted, mine.decode_s,
    mine.draft_s, mine.forward_s,
    mine.start_s + mine.prefill_s as before_s,
    couples.ar_job_id,
    ar_tokens::integer as ar_tokens,
    ar.steps as ar_steps,
    ar.decode_s as ar_decode_s,
    ar.draft_s as ar_draft_s,
    ar.forward_s as ar_forward_s,
    ar.start_s + ar.prefill_s as ar_before_s,
    identical,
    coalesce(couples.tokens > 0 and couples.ar_tokens > 0 and mine.decode_s > 0 and ar.decode_s > 0, false)
        as comparable,
    case when comparable then mine.decode_s * (couples.ar_tokens / couples.tokens) end as scaled_s,
    case
        when comparable then scaled_s + before_s
        when mine.decode_s is null and couples.tokens = couples.ar_tokens and ar.decode_s > 0 then mine.wall_s
    end as e2e_s,
    case when e2e_s is not null then ar.decode_s + ar_before_s end as ar_e2e_s
from couples
join jobs as mine using (job_id, attempt)
left join jobs as ar on ar.job_id = ar_job_id and ar.attempt = mine.attempt
where not mine.warmup and not mine.pair_only;
