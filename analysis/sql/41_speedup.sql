-- view (made once): speedup: one cell; how much faster than AR, paired by prompt and repeat.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, pairs BIGINT, pairs_left_out BIGINT (no AR job; untimed; or N = 0), speedup_decode DOUBLE
--   (ΣAR's time / Σarm's time at AR's number of tokens), speedup_lo DOUBLE (95 %), speedup_hi DOUBLE (95 %),
--   speedup_identical DOUBLE (over pairs with identical outputs), identical_pairs BIGINT, speedup_e2e DOUBLE (prefill
--   and drafter start-up included; all that an arm with wall time alone has), interval_note VARCHAR (why there is no
--   interval, or another kind)
create or replace view speedup as
with units as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        count(*) as units,
        bool_or(cache = 'carried') as carried,
        ratio_interval(list(ar_s), list(scaled_s)) as interval
    from unit_sums
    where pairs > 0
    group by all
),
sums as (
    select
        workload, arm, device, model, revision, dtype, engine, stack,
        sum(pairs)::bigint as pairs,
        sum(pairs_left_out)::bigint as pairs_left_out,
        sum(ar_s) / sum(scaled_s) as speedup_decode,
        sum(identical_ar_s) / sum(identical_s) as speedup_identical,
        sum(identical_pairs)::bigint as identical_pairs,
        sum(e2e_ar_s) / sum(e2e_s) as speedup_e2e
    from prompt_sums
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, pairs, pairs_left_out, speedup_decode,
    case when not carried then interval.lo end as speedup_lo,
    case when not carried then interval.hi end as speedup_hi,
    speedup_identical, identical_pairs, speedup_e2e,
    case when pairs = 0 then 'no comparable pair' else interval_note(carried, units) end as interval_note
from sums
left join units using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
