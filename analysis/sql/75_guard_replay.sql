-- view (made once): guard_replay: one cold job whose drafter was run again, fresh, on the recorded output. Other steps than
--   the recorded ones mean that the drafter knew something it should not have, or did not do what its options say.
-- columns: job_id VARCHAR, attempt INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, steps INTEGER,
--   differs_at INTEGER (position; NULL where every step is the same)
create or replace view guard_replay as
select
    job_id, attempt, workload, prompt_id, arm,
    queries as steps,
    case when position >= 0 then position end as differs_at
from witness
where kind = 'replay';
