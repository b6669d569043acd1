-- view (made once): step_totals: one job that ran at least one step; its step rows added up, by its commit or here.
-- columns: job_id VARCHAR, attempt INTEGER, steps BIGINT, drafted_steps BIGINT, proposed BIGINT (tokens), accepted
--   BIGINT (tokens), emitted BIGINT (tokens), step_ns BIGINT (ns), draft_ns BIGINT (ns), forward_ns BIGINT (ns)
create or replace view step_totals as
select job_id, attempt, steps, drafted_steps, proposed, accepted, emitted, step_ns, draft_ns, forward_ns
from raw_sums
anti join unsummed using (job_id, attempt)
where steps > 0
union all
select job_id, attempt, steps, drafted_steps, proposed, accepted, emitted, step_ns, draft_ns, forward_ns
from job_passes;
