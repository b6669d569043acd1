-- view (made once): speedup_le_mat_prompts: one prompt in one cell; the same question as speedup_le_mat. A prompt
--   alone has no interval (steps of one output depend on each other), so a small breach here may be timing noise.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, prompt_id VARCHAR, pairs BIGINT, mat DOUBLE, speedup DOUBLE, speedup_bound DOUBLE,
--   holds_bound BOOLEAN (speedup ≤ bound), holds_mat BOOLEAN (speedup ≤ mat), over_bound DOUBLE (speedup / bound),
--   over_mat DOUBLE (speedup / mat), passes_past_ar BIGINT, likely_cause VARCHAR
create or replace view speedup_le_mat_prompts as
select
    workload, arm, device, model, revision, dtype, engine, stack, prompt_id, pairs,
    tokens / steps as mat,
    ar_s / scaled_s as speedup,
    ar_s / ar_pass_s as speedup_bound,
    speedup <= speedup_bound * (1 + 1e-12) as holds_bound,
    speedup <= mat * (1 + 1e-12) as holds_mat,
    speedup / speedup_bound as over_bound,
    speedup / mat as over_mat,
    passes_past_ar,
    breach_cause(
        holds_bound, emitted - tokens, forward_per_pass, ar_forward_per_pass, overhead_per_pass, ar_overhead_per_pass
    ) as likely_cause
from prompt_bounds
order by all;
