-- view: tokens: one emitted token (torch targets only).
-- columns: run_id VARCHAR, job_id VARCHAR, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, device VARCHAR, attempt
--   INTEGER, warmup BOOLEAN, pair_only BOOLEAN, position INTEGER (from 0), token_id INTEGER, step INTEGER (NULL for
--   position 0, which prefill gives), top1_id INTEGER, top1_logit FLOAT, top2_id INTEGER, top2_logit FLOAT, top_ties
--   INTEGER (entries equal to the maximum; 1 = no tie)
create or replace view tokens as
select
    run_id, job_id, workload, prompt_id, arm, device, attempt, warmup, pair_only,
    position, token_id, step, top1_id, top1_logit, top2_id, top2_logit, top_ties
from raw_tokens;
