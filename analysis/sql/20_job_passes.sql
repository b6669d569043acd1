-- view (made once): job_passes: one job of `unsummed` that ran at least one step; its step rows added up, and its passes
--   in the order in which they were read. The headline views read step rows here alone, once; where every job has its
--   row of `sums`, not at all.
-- columns: job_id VARCHAR, attempt INTEGER, steps BIGINT, drafted_steps BIGINT, proposed BIGINT (tokens), accepted
--   BIGINT (tokens), emitted BIGINT (tokens), step_ns BIGINT (ns), draft_ns BIGINT (ns), forward_ns BIGINT (ns),
--   positions INTEGER[] (of the first token that each pass emits), times BIGINT[] (step_ns of each pass, ns)
create or replace view job_passes as
with added as (
    select
        job_id,
        attempt,
        count(*) as steps,
        count(*) filter (drafted > 0) as drafted_steps,
        sum(drafted)::bigint as proposed,
        sum(accepted)::bigint as accepted,
        sum(emitted)::bigint as emitted,
        sum(step_ns)::bigint as step_ns,
        sum(draft_ns)::bigint as draft_ns,
        sum(forward_ns)::bigint as forward_ns,
        list(position) as positions,
        list(step_ns) as times
    from steps
    -- Ends the reading of step rows before it begins where there is no such job.
    cross join (select 1 from unsummed limit 1)
    group by job_id, attempt
)
select
    job_id, attempt, steps, drafted_steps, proposed, accepted, emitted, step_ns, draft_ns, forward_ns, positions, times
from added
semi join unsummed using (job_id, attempt);
