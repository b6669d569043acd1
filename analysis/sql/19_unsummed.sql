-- view (made once): unsummed: one job whose step rows must be read: its commit left no sums of it, or took another AR
--   job for its pair than `couples` does; and the AR jobs of such jobs.
-- columns: job_id VARCHAR, attempt INTEGER
create or replace view unsummed as
with alone as (
    select couples.job_id, couples.attempt, couples.ar_job_id
    from couples
    left join raw_sums as sums using (job_id, attempt)
    where sums.job_id is null or sums.ar_job_id is distinct from couples.ar_job_id
)
select job_id, attempt from alone
union
select ar_job_id, attempt from alone where ar_job_id is not null;
