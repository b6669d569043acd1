-- macro: metrics_by: the headline figures in your own grouping: `from metrics_by(source)`, or several columns as
--   `metrics_by((workload, source))`; any expression over `pairs` and `prompts` will do. Devices, models, dtypes,
--   engines and software stacks stay apart.
create or replace macro metrics_by(by_what) as table
    select
        by_what as "group",
        arm, device, model, revision, dtype, engine, stack,
        count(*) as jobs,
        sum(tokens)::bigint as tokens,
        sum(tokens) / nullif(sum(steps), 0) as mat,
        case when not bool_or(cache = 'carried') then mat_from(ratio_interval(list(tokens), list(steps)).lo) end as mat_lo,
        case when not bool_or(cache = 'carried') then ratio_interval(list(tokens), list(steps)).hi end as mat_hi,
        sum(ar_decode_s) filter (comparable) / sum(scaled_s) as speedup,
        sum(drafted_steps) / nullif(sum(steps), 0) as draft_coverage,
        sum(accepted) / nullif(sum(proposed), 0) as acceptance_rate
    from pairs
    left join (select workload, prompt_id, source, text from prompts) as prompts using (workload, prompt_id)
    group by all
    order by all;
