-- view: workers: one worker that took part, with what it read back from what it loaded.
-- columns: worker_id VARCHAR, node VARCHAR, device VARCHAR, joined_at VARCHAR, left_at VARCHAR, logits_dtype
--   VARCHAR, weight_bytes BIGINT (bytes), untied_input_embedding_bytes BIGINT (bytes), kv_bytes_per_token BIGINT
--   (bytes), facts VARCHAR (JSON)
create or replace view workers as
select
    worker_id, node, device, joined_at, left_at,
    facts ->> '$.logits_dtype' as logits_dtype,
    (facts ->> '$.weight_bytes')::bigint as weight_bytes,
    (facts ->> '$.untied_input_embedding_bytes')::bigint as untied_input_embedding_bytes,
    (facts ->> '$.kv_bytes_per_token')::bigint as kv_bytes_per_token,
    facts
from ledger_workers;
