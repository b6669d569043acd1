-- view (made once): speedup_le_mat: one cell; is the speedup explained by the passes saved? The bound is the
--   theorem, MAT its plain form: a breach of the bound that the interval does not cover is a finding. One or two prompts
--   have no interval: there only what timing noise does not do is a finding, tokens that no output has or a speedup of
--   three times its bound.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, pairs BIGINT, prompts BIGINT (that intervals resample: conversations), mat DOUBLE (of the comparable pairs), speedup DOUBLE, speedup_bound DOUBLE,
--   holds_bound BOOLEAN (speedup ≤ bound), holds_mat BOOLEAN (speedup ≤ mat), over_bound DOUBLE (speedup / bound),
--   over_bound_lo DOUBLE (95 %), over_bound_hi DOUBLE (95 %), over_mat DOUBLE (speedup / mat), over_mat_lo DOUBLE (95
--   %), over_mat_hi DOUBLE (95 %), finding BOOLEAN (above the bound and the interval does not cover it),
--   passes_past_ar BIGINT, likely_cause VARCHAR
create or replace view speedup_le_mat as
with units as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as prompts,
        bool_or(cache = 'carried') as carried,
        ratio_interval(list(ar_pass), list(scaled)) as bound_interval,
        ratio_of_ratios_interval(list(ar), list(scaled), list(n), list(s)) as mat_interval
    from (
        select
            workload, arm, device, model, revision, dtype, engine, stack, cache, conversation,
            sum(ar_s) as ar, sum(scaled_s) as scaled, sum(ar_pass_s) as ar_pass, sum(tokens) as n, sum(steps) as s
        from prompt_bounds
        group by all
    )
    group by all
),
cell as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(pairs)::bigint as pairs,
        sum(tokens) / sum(steps) as mat,
        sum(ar_s) / sum(scaled_s) as speedup,
        sum(ar_s) / sum(ar_pass_s) as speedup_bound,
        sum(emitted) - sum(tokens) as tokens_uncounted,
        sum(forward_per_pass * steps) / sum(steps) as forward_per_pass,
        sum(ar_forward_per_pass * steps) / sum(steps) as ar_forward_per_pass,
        sum(overhead_per_pass * steps) / sum(steps) as overhead_per_pass,
        sum(ar_overhead_per_pass * steps) / sum(steps) as ar_overhead_per_pass,
        sum(passes_past_ar)::bigint as passes_past_ar
    from prompt_bounds
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, pairs, prompts, mat, speedup, speedup_bound,
    speedup <= speedup_bound * (1 + 1e-12) as holds_bound,
    speedup <= mat * (1 + 1e-12) as holds_mat,
    speedup / speedup_bound as over_bound,
    case when not carried then bound_interval.lo end as over_bound_lo,
    case when not carried then bound_interval.hi end as over_bound_hi,
    speedup / mat as over_mat,
    case when not carried then mat_interval.lo end as over_mat_lo,
    case when not carried then mat_interval.hi end as over_mat_hi,
    not holds_bound
        and coalesce(over_bound_lo > 1, prompts > 2 or tokens_uncounted <> 0 or over_bound > 3) as finding,
    passes_past_ar,
    breach_cause(
        holds_bound, tokens_uncounted, forward_per_pass, ar_forward_per_pass, overhead_per_pass, ar_overhead_per_pass
    ) as likely_cause
from cell
join units using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
