-- view (made once): throttled: one cell; how many of its jobs, or of the AR jobs they are paired with, ran
--   throttled, and the speedup without those.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, jobs BIGINT, known BIGINT (jobs on devices that tell), throttled BIGINT (jobs),
--   pairs_clean BIGINT (neither side throttled), speedup DOUBLE (all pairs), speedup_clean DOUBLE (over clean pairs)
create or replace view throttled as
with sides as (
    select mine.*, coalesce(mine.throttled, false) or coalesce(ar.throttled, false) as touched
    from pairs as mine
    left join raw_jobs as ar
        on ar.job_id = mine.ar_job_id and ar.attempt = mine.attempt and not ar.warmup
)
select
    workload, arm, device, model, revision, dtype, engine, stack,
    count(*) as jobs,
    count(throttled) as known,
    count(*) filter (throttled) as throttled,
    count(*) filter (comparable and not touched) as pairs_clean,
    sum(ar_decode_s) filter (comparable) / sum(scaled_s) as speedup,
    sum(ar_decode_s) filter (comparable and not touched) / sum(scaled_s) filter (not touched) as speedup_clean
from sides
group by all
order by all;
