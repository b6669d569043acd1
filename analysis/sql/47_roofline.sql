-- view (made once): roofline: one workload under AR; how near its time per token is to the time that reading the
--   weights and the KV cache takes. A low fraction is a slow baseline, which makes any speculation look good.
-- columns: workload VARCHAR, arm VARCHAR, device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine
--   VARCHAR, stack VARCHAR, bytes_per_token DOUBLE (bytes, weights without an input embedding that is not tied to the
--   output, plus the KV cache at its mean length), read_gb_per_s DOUBLE (GB / s, median of `dfbench calibrate`),
--   roofline_us DOUBLE (µs, time of the read), ar_us DOUBLE (µs a token), roofline_fraction DOUBLE (roofline_us /
--   ar_us), missing VARCHAR (what is not known)
create or replace view roofline as
with bandwidth as (
    select device, median(bytes / ns) as read_gb_per_s
    from calibration
    where kind = 'read'
    group by device
),
ar as (
    select
        workload, arm, pairs.device, model, revision, dtype, engine, stack,
        avg(weight_bytes - untied_input_embedding_bytes) as weights,
        avg(kv_bytes_per_token) as kv_bytes,
        sum(tokens * (prompt_tokens + tokens / 2)) / sum(tokens) as mean_context,
        sum(decode_s) / sum(tokens) * 1e6 as ar_us
    from pairs
    left join workers using (worker_id)
    where drafter = 'ar' and tokens > 0
    group by all
)
select
    workload, arm, device, model, revision, dtype, engine, stack,
    weights + kv_bytes * mean_context as bytes_per_token,
    read_gb_per_s,
    bytes_per_token / read_gb_per_s / 1e3 as roofline_us,
    ar_us,
    roofline_us / ar_us as roofline_fraction,
    case
        when ar_us is null then 'the run is not timed'
        when weights is null then 'the worker did not say how large its weights are'
        when read_gb_per_s is null then 'no measured read bandwidth: run dfbench calibrate'
    end as missing
from ar
left join bandwidth using (device)
order by all;
