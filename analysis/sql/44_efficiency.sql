-- view (made once): efficiency: one cell; how much of what its MAT promises its speedup keeps. 1 = a wide pass costs
--   a plain step and drafting is free.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, mat DOUBLE, speedup DOUBLE, efficiency DOUBLE (speedup / mat), efficiency_lo DOUBLE (95
--   %), efficiency_hi DOUBLE (95 %), draft_share DOUBLE (Σ draft time / Σ step time)
create or replace view efficiency as
with shares as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(draft_s) / nullif(sum(decode_s), 0) as draft_share
    from pairs
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, mat, speedup,
    over_mat as efficiency,
    over_mat_lo as efficiency_lo,
    over_mat_hi as efficiency_hi,
    draft_share
from speedup_le_mat
join shares using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
