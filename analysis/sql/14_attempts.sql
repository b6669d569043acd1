-- view: attempts: one attempt that did not commit.
-- columns: shard_id VARCHAR, job_id VARCHAR (NULL when a whole shard's attempt was lost), attempt INTEGER, kind
--   VARCHAR, message VARCHAR, node VARCHAR, worker_id VARCHAR, at VARCHAR (UTC)
create or replace view attempts as
select shard_id, job_id, attempt, kind, message, node, worker_id, "at"
from ledger_attempts;
