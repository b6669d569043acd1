-- view (made once): prompt_bounds: one prompt in one cell, comparable pairs only; what the bound on its speedup is
--   made of.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, cache VARCHAR, prompt_id VARCHAR, conversation VARCHAR, pairs BIGINT, tokens BIGINT (N),
--   emitted BIGINT (N by the step rows), steps BIGINT (S), ar_s DOUBLE (AR's time, s), scaled_s DOUBLE (the arm's time
--   at AR's number of tokens, s), ar_pass_s DOUBLE (AR's step times at the positions where the arm ran a pass, scaled
--   alike, s), passes_past_ar BIGINT (passes beyond AR's output, taken at AR's mean step time), forward_per_pass
--   DOUBLE (s), ar_forward_per_pass DOUBLE (s), overhead_per_pass DOUBLE (outside forward and draft, s),
--   ar_overhead_per_pass DOUBLE (s)
create or replace view prompt_bounds as
select
    workload, arm, device, model, revision, dtype, engine, stack, cache, prompt_id, conversation,
    count(*) as pairs,
    sum(tokens)::bigint as tokens,
    sum(emitted)::bigint as emitted,
    sum(steps)::bigint as steps,
    sum(ar_decode_s) as ar_s,
    sum(scaled_s) as scaled_s,
    sum(ar_pass_ns / 1e9 * (ar_tokens / tokens)) as ar_pass_s,
    sum(passes_past_ar)::bigint as passes_past_ar,
    sum(forward_s) / sum(steps) as forward_per_pass,
    sum(ar_forward_s) / sum(ar_steps) as ar_forward_per_pass,
    sum(decode_s - forward_s - draft_s) / sum(steps) as overhead_per_pass,
    sum(ar_decode_s - ar_forward_s - ar_draft_s) / sum(ar_steps) as ar_overhead_per_pass
from pairs
join pass_costs using (job_id, attempt)
where comparable
group by all;
