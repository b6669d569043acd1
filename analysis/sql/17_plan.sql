-- view: plan: one workload and arm of the plan, and how far it is.
-- columns: workload VARCHAR, arm VARCHAR, prompts BIGINT, jobs BIGINT, done BIGINT (jobs), failed BIGINT (jobs)
create or replace view plan as
select workload, arm, prompts, jobs, done, failed
from ledger_plan;
