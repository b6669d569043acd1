-- view (made once): draft_coverage: one cell; how often the drafter had anything to say, and how good it was.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, steps BIGINT (S), drafted_steps BIGINT (D), draft_coverage DOUBLE (ΣD / ΣS), proposed
--   BIGINT (ΣP, tokens), mean_draft DOUBLE (tokens a draft), accepted BIGINT (ΣA, tokens), acceptance_rate DOUBLE (ΣA
--   / ΣP), accepted_per_draft DOUBLE (tokens)
create or replace view draft_coverage as
select
    workload, arm, device, model, revision, dtype, engine, stack,
    sum(steps)::bigint as steps,
    sum(drafted_steps)::bigint as drafted_steps,
    sum(drafted_steps) / nullif(sum(steps), 0) as draft_coverage,
    sum(proposed)::bigint as proposed,
    sum(proposed) / nullif(sum(drafted_steps), 0) as mean_draft,
    sum(accepted)::bigint as accepted,
    sum(accepted) / nullif(sum(proposed), 0) as acceptance_rate,
    sum(accepted) / nullif(sum(drafted_steps), 0) as accepted_per_draft
from prompt_sums
group by all
order by all;
