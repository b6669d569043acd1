-- view: prompts: one prompt of the plan or of the warm-up.
-- columns: workload VARCHAR, prompt_id VARCHAR, source VARCHAR, text VARCHAR, messages VARCHAR (JSON), prompt_ids
--   INTEGER[], prompt_sha VARCHAR, warmup BOOLEAN
create or replace view prompts as
select workload, prompt_id, source, text, messages, prompt_ids, prompt_sha, warmup
from raw_prompts;
