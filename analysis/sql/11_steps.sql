-- view: steps: one target forward after prefill.
-- columns: run_id VARCHAR, job_id VARCHAR, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, device VARCHAR, attempt
--   INTEGER, warmup BOOLEAN, pair_only BOOLEAN, step INTEGER (from 0), position INTEGER (of the first token it emits),
--   queries INTEGER (tokens in the pass), padding INTEGER (tokens), drafted INTEGER (tokens), depth INTEGER (of the
--   draft, tokens), accepted INTEGER (tokens), emitted INTEGER (tokens), step_ns BIGINT (ns), draft_ns BIGINT (ns),
--   forward_ns BIGINT (ns), accept_ns BIGINT (ns), commit_ns BIGINT (ns)
create or replace view steps as
select
    run_id, job_id, workload, prompt_id, arm, device, attempt, warmup, pair_only,
    step, position, queries, padding, drafted, depth, accepted, emitted,
    step_ns, draft_ns, forward_ns, accept_ns, commit_ns
from raw_steps;
