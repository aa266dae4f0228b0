"""Full disks and damaged files: always the last good state, and one line that says so.

    python -m tests.faults.disk --count 1000 --seed 7

A quarter of the cases each: `checkpoints`, `spools` and `database` (files are damaged between two processes,
in the ways of `damage`), and `full_disk` (each of the three on a disk that fills up). The last line is one
JSON object; `wrong_state` counts the cases that kept another state than the last good one, `silent` those
that lost something without one line about it. `--seed S --case N` repeats a case.

Three losses no reader of the file can see, and no case has them: a file that was removed, one that was cut
exactly between two records, and a change inside of a value in SQLite's file, which has no checksums.
"""
