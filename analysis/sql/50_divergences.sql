-- view (made once): divergences: one measured spec job whose output is not AR's; where they part and how near the
--   logits were. The class is from recorded logits alone (k = 4 ulp of the coarsest dtype in the compute path).
-- columns: job_id VARCHAR, attempt INTEGER, ar_job_id VARCHAR, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR,
--   device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR, repeat INTEGER,
--   position INTEGER (of the first difference), ar_id INTEGER (NULL past AR's end), spec_id INTEGER (NULL past the
--   spec output's end), ar_top1_logit FLOAT, ar_top2_id INTEGER, ar_top2_logit FLOAT, ar_ties INTEGER, spec_top1_logit
--   FLOAT, spec_top2_id INTEGER, spec_top2_logit FLOAT, spec_ties INTEGER, ar_gap FLOAT (AR's logit gap between the
--   two tokens; NULL when the other is not in its top two), spec_gap FLOAT, ulp DOUBLE (the larger of both passes'),
--   ar_gap_ulp DOUBLE (gap / its ulp), spec_gap_ulp DOUBLE, class VARCHAR (tie_both; tie_ar; tie_spec; ulp1; ulp_k;
--   unresolved; violation), differing_tokens INTEGER (in the whole output), compared_tokens INTEGER
create or replace view divergences as
with firsts as materialized (
    select
        pairs.job_id, pairs.attempt, pairs.ar_job_id, workload, prompt_id, arm, device, model, revision, dtype, engine,
        stack, repeat, worker_id,
        parts_at as position, ar_id, spec_id, differing_tokens,
        greatest(pairs.tokens, pairs.ar_tokens) + 1 as compared_tokens
    from pairs
    join couples using (job_id, attempt)
    where not pairs.identical
),
places as materialized (
    select job_id, attempt, position from firsts
    union
    select ar_job_id, attempt, position from firsts
),
evidence as materialized (
    select job_id, attempt, position, top1_logit, top2_id, top2_logit, top_ties
    from tokens
    join places using (job_id, attempt, position)
),
passes as (
    select
        firsts.*,
        ar.top1_logit as ar_top1_logit, ar.top2_id as ar_top2_id, ar.top2_logit as ar_top2_logit,
        ar.top_ties as ar_ties,
        spec.top1_logit as spec_top1_logit, spec.top2_id as spec_top2_id, spec.top2_logit as spec_top2_logit,
        spec.top_ties as spec_ties,
        case when ar.top2_id = spec_id then ar.top1_logit - ar.top2_logit end as ar_gap,
        case when spec.top2_id = ar_id then spec.top1_logit - spec.top2_logit end as spec_gap,
        ulp_of(firsts.dtype, logits_dtype, ar.top1_logit) as ar_ulp,
        ulp_of(firsts.dtype, logits_dtype, spec.top1_logit) as spec_ulp
    from firsts
    left join evidence as ar
        on ar.job_id = firsts.ar_job_id and ar.attempt = firsts.attempt and ar.position = firsts.position
    left join evidence as spec
        on spec.job_id = firsts.job_id and spec.attempt = firsts.attempt and spec.position = firsts.position
    left join workers using (worker_id)
)
select
    job_id, attempt, ar_job_id, workload, prompt_id, arm, device, model, revision, dtype, engine, stack, repeat,
    position, ar_id, spec_id, ar_top1_logit, ar_top2_id, ar_top2_logit, ar_ties, spec_top1_logit, spec_top2_id,
    spec_top2_logit, spec_ties, ar_gap, spec_gap,
    greatest(ar_ulp, spec_ulp) as ulp,
    ar_gap / ar_ulp as ar_gap_ulp,
    spec_gap / spec_ulp as spec_gap_ulp,
    case
        when ar_id is null or spec_id is null then 'violation'
        when ar_gap is null or spec_gap is null then 'unresolved'
        when ar_gap = 0 and spec_gap = 0 then 'tie_both'
        when ar_gap = 0 and spec_gap_ulp <= 4 then 'tie_ar'
        when spec_gap = 0 and ar_gap_ulp <= 4 then 'tie_spec'
        when ar_gap = 0 or spec_gap = 0 then 'violation'
        when ar_gap_ulp <= 1 and spec_gap_ulp <= 1 then 'ulp1'
        when ar_gap_ulp <= 4 and spec_gap_ulp <= 4 then 'ulp_k'
        else 'violation'
    end as class,
    differing_tokens, compared_tokens
from passes
order by workload, arm, prompt_id, repeat;
