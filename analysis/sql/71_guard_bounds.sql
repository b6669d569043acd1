-- view (made once): guard_bounds: one device, model, dtype, engine and stack; how far two sound passes of different shape may
--   put the logit of one token apart. In 16-bit arithmetic it is measured: one and a half times the most that shape
--   alone did to the shape controls, at least 4 ulp; more than 16 ulp is noise that the dtype cannot explain, and no
--   bound goes above it. In float32 and wider arithmetic it is 1e-4 relative.
-- columns: device VARCHAR, model VARCHAR, revision VARCHAR, dtype VARCHAR, engine VARCHAR, stack VARCHAR,
--   control_tokens BIGINT, control_max_ulp DOUBLE, control_max_relative FLOAT, bound_ulp DOUBLE (NULL where the
--   bound is relative), bound_relative DOUBLE (NULL where it is in ulp)
create or replace view guard_bounds as
select
    device, model, revision, dtype, engine, stack,
    count(*) filter (kind = 'noise') as control_tokens,
    max(abs(delta_ulp)) filter (kind = 'noise') as control_max_ulp,
    max(delta_relative) filter (kind = 'noise') as control_max_relative,
    case when dtype in ('bfloat16', 'float16') then least(16, greatest(4, 1.5 * coalesce(control_max_ulp, 0))) end
        as bound_ulp,
    case when dtype not in ('bfloat16', 'float16') then 1e-4 end as bound_relative
from guard_scores
group by device, model, revision, dtype, engine, stack;
