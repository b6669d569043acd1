-- view (made once): accepted_by_position: one cell and one place in a draft (1 = its first token; in a tree: depth);
--   how often the target agrees there.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, draft_position BIGINT (from 1), drafted BIGINT (drafts that reach this deep), reached
--   BIGINT (of these, those accepted up to the place before), accepted BIGINT (of these, accepted here),
--   conditional_rate DOUBLE (accepted / reached), unconditional_rate DOUBLE (accepted / drafted), per_draft_rate
--   DOUBLE (accepted / all drafts of the cell)
create or replace view accepted_by_position as
with counts as (
    select job_id, attempt, depth, accepted, count(*) as drafts
    from steps
    where not warmup and not pair_only and drafted > 0
    group by job_id, attempt, depth, accepted
),
cell as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, depth, counts.accepted, sum(drafts) as drafts
    from pairs
    join counts using (job_id, attempt)
    group by all
),
places as (
    select *, unnest(range(1, depth + 1)) as draft_position
    from cell
),
totals as (
    select workload, arm, device, model, revision, dtype, engine, stack, sum(drafts) as all_drafts
    from cell
    group by all
),
sums as (
    select
        workload, arm, device, model, revision, dtype, engine, stack, draft_position,
        sum(drafts)::bigint as drafted,
        coalesce(sum(drafts) filter (accepted >= draft_position - 1), 0)::bigint as reached,
        coalesce(sum(drafts) filter (accepted >= draft_position), 0)::bigint as accepted
    from places
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack, draft_position, drafted, reached, sums.accepted,
    sums.accepted / nullif(reached, 0) as conditional_rate,
    sums.accepted / drafted as unconditional_rate,
    sums.accepted / all_drafts as per_draft_rate
from sums
join totals using (workload, arm, device, model, revision, dtype, engine, stack)
order by all;
