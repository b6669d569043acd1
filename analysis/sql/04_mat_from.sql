-- macro: mat_from: the lower end of an interval of MAT. Every step emits a token, so no MAT is below 1: an end below it
--   is 1, which leaves out no value that MAT can have.
create or replace macro mat_from(lo) as
    case when lo is not null then greatest(1, lo) end;
