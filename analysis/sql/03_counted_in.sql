-- macro: counted_in: what intervals resample, by name: prompts, or conversations where prompts have several turns.
create or replace macro counted_in() as
    case when exists (select 1 from raw_jobs where turn > 0) then 'conversations' else 'prompts' end;
