-- macro: interval_note: why a figure over prompts has no interval, or another kind of one; NULL where it has the usual.
create or replace macro interval_note(carried, units) as
    case
        when carried then 'a carried cache: ' || counted_in() || ' depend on each other'
        when coalesce(units, 0) < 3 then 'fewer than three ' || counted_in()
        when units < 5 then 'fewer than five ' || counted_in() || ': Student''s t, not a bootstrap'
    end;
