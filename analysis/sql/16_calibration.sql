-- view: calibration: one timed pass, or one timed sweep over memory, of `dfbench calibrate`.
-- columns: run_id VARCHAR, worker_id VARCHAR, device VARCHAR, model VARCHAR, dtype VARCHAR, engine VARCHAR, stack
--   VARCHAR, kind VARCHAR (forward; read), context INTEGER (tokens in the KV cache), queries INTEGER (tokens in the
--   pass), bytes BIGINT (read), sample INTEGER, ns BIGINT (ns)
create or replace view calibration as
select run_id, worker_id, device, model, dtype, engine, stack, kind, context, queries, bytes, sample, ns
from raw_calibration;
