-- view (made once): cells: one cell: workload × arm × device × model × dtype × engine × software stack; the headline
--   table.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, prompts BIGINT, prompts_planned BIGINT, tokens BIGINT (N), tokens_per_s DOUBLE (tokens /
--   s), mat DOUBLE, mat_lo DOUBLE (95 %), mat_hi DOUBLE (95 %), speedup DOUBLE (decode), speedup_lo DOUBLE (95 %),
--   speedup_hi DOUBLE (95 %), speedup_bound DOUBLE, pairs BIGINT, pairs_left_out BIGINT, draft_coverage DOUBLE (ΣD /
--   ΣS), acceptance_rate DOUBLE (ΣA / ΣP)
create or replace view cells as
with sums as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        case when count(decode_s) = count(*) then sum(tokens) / nullif(sum(decode_s), 0) end as tokens_per_s,
        sum(drafted_steps) / nullif(sum(steps), 0) as draft_coverage,
        sum(accepted) / nullif(sum(proposed), 0) as acceptance_rate
    from prompt_sums
    group by all
)
select
    mat.workload, mat.arm, mat.device, mat.model, mat.revision, mat.dtype, mat.engine, mat.stack,
    mat.prompts,
    plan.prompts as prompts_planned,
    mat.tokens, tokens_per_s, mat.mat, mat_lo, mat_hi,
    speedup_decode as speedup,
    speedup_lo, speedup_hi, speedup_bound, speedup.pairs, pairs_left_out, draft_coverage, acceptance_rate
from mat
join sums using (workload, arm, device, model, revision, dtype, engine, stack)
join speedup using (workload, arm, device, model, revision, dtype, engine, stack)
left join speedup_le_mat as bound using (workload, arm, device, model, revision, dtype, engine, stack)
left join plan using (workload, arm)
order by all;
