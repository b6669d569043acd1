-- view (made once): unit_sums: one conversation in one cell, its turns added up; what intervals resample.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, cache VARCHAR, conversation VARCHAR, tokens BIGINT (N), steps BIGINT (S), pairs BIGINT,
--   ar_s DOUBLE (s), scaled_s DOUBLE (s)
create or replace view unit_sums as
select
    workload, arm, device, model, revision, dtype, engine, stack, cache, conversation,
    sum(tokens)::bigint as tokens,
    sum(steps)::bigint as steps,
    sum(pairs)::bigint as pairs,
    sum(ar_s) as ar_s,
    sum(scaled_s) as scaled_s
from prompt_sums
group by all;
