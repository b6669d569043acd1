-- view (made once): prompt_sums: one prompt in one cell, repeats added up; what the figures of a cell are made of.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, cache VARCHAR, prompt_id VARCHAR, conversation VARCHAR, jobs BIGINT, tokens BIGINT (N),
--   steps BIGINT (S), drafted_steps BIGINT (D), proposed BIGINT (P), accepted BIGINT (A), decode_s DOUBLE (s), pairs
--   BIGINT, pairs_left_out BIGINT, ar_s DOUBLE (AR's time in comparable pairs, s), scaled_s DOUBLE (the arm's time at
--   AR's number of tokens, s), identical_pairs BIGINT, identical_ar_s DOUBLE (s), identical_s DOUBLE (s), e2e_ar_s
--   DOUBLE (s), e2e_s DOUBLE (s)
create or replace view prompt_sums as
select
    workload, arm, device, model, revision, dtype, engine, stack, cache, prompt_id, conversation,
    count(*) as jobs,
    sum(tokens)::bigint as tokens,
    sum(steps)::bigint as steps,
    sum(drafted_steps)::bigint as drafted_steps,
    sum(proposed)::bigint as proposed,
    sum(accepted)::bigint as accepted,
    sum(decode_s) as decode_s,
    count(*) filter (comparable) as pairs,
    count(*) filter (not comparable) as pairs_left_out,
    sum(ar_decode_s) filter (comparable) as ar_s,
    sum(scaled_s) as scaled_s,
    count(*) filter (comparable and identical) as identical_pairs,
    sum(ar_decode_s) filter (comparable and identical) as identical_ar_s,
    sum(scaled_s) filter (identical) as identical_s,
    sum(ar_e2e_s) as e2e_ar_s,
    sum(e2e_s) as e2e_s
from pairs
group by all;
