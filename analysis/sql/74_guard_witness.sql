-- view (made once): guard_witness: one divergence and what a re-run of the common prefix chose, in AR's passes and in the
--   arm's.
-- columns: job_id VARCHAR, attempt INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, position INTEGER,
--   class VARCHAR (from recorded logits), ar_id INTEGER, ar_choice INTEGER (of the re-run in AR's passes), spec_id
--   INTEGER, spec_choice INTEGER (of the re-run in the arm's passes), cleared BOOLEAN (each arm's token is its own
--   shape's argmax; NULL without a re-run)
create or replace view guard_witness as
with choices as (
    select
        job_id, attempt, position,
        max(top1_id) filter (shape = 'ar') as ar_choice,
        max(top1_id) filter (shape = 'spec') as spec_choice
    from witness
    where kind = 'witness'
    group by job_id, attempt, position
)
select
    divergences.job_id, divergences.attempt, workload, prompt_id, arm, divergences.position, class, ar_id, ar_choice,
    spec_id, spec_choice,
    ar_choice = ar_id and spec_choice = spec_id as cleared
from divergences
left join choices using (job_id, attempt, position);
