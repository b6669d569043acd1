-- view: witness: one position that the guard computed again.
-- columns: run_id VARCHAR, kind VARCHAR (control; noise; teacher; again; witness; replay), job_id VARCHAR, attempt
--   INTEGER, workload VARCHAR, prompt_id VARCHAR, arm VARCHAR, position INTEGER, shape VARCHAR (ar; spec; full),
--   queries INTEGER (tokens in the pass), token_id INTEGER, token_logit FLOAT, top1_id INTEGER, top1_logit FLOAT,
--   top2_id INTEGER, top2_logit FLOAT, recorded_logit FLOAT, worker_id VARCHAR, device VARCHAR
create or replace view witness as
select
    run_id, kind, job_id, attempt, workload, prompt_id, arm, position, shape, queries, token_id, token_logit, top1_id,
    top1_logit, top2_id, top2_logit, recorded_logit, worker_id, device
from raw_witness;
