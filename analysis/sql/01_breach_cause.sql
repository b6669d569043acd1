-- macro: breach_cause: why a speedup may lie above its bound, from what the rows say; NULL where the bound holds.
--   Times are seconds a pass.
create or replace macro breach_cause(holds, uncounted, forward, ar_forward, overhead, ar_overhead) as
    case
        when holds then null
        when uncounted <> 0 then 'its steps emit tokens that its outputs do not have: counted past EOS or the cap?'
        when forward < 0.98 * ar_forward
            then 'its passes are timed shorter than plain AR steps: an unsynchronised clock?'
        when ar_overhead > overhead
            then 'AR pays ' || round((ar_overhead - overhead) * 1e6, 1)
                || ' µs a step outside the forward that this arm does not'
        else 'timing noise or drift: measure more prompts or repeats'
    end;
