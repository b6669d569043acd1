-- macro: ulp_of: distance between neighbouring numbers of the coarser of two dtypes at a magnitude. A dtype that is
--   neither bfloat16 nor float16 counts as float32, the finest.
create or replace macro ulp_of(dtype, logits_dtype, magnitude) as
    power(2,
        floor(log2(greatest(abs(magnitude::double), 1e-30)))
        - least(
            case dtype when 'bfloat16' then 7 when 'float16' then 10 else 23 end,
            case logits_dtype when 'bfloat16' then 7 when 'float16' then 10 else 23 end
        )
    );
