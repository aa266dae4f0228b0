"""Faults by the thousand: kill -9, SIGSTOP past the lease, many clients at once, and full disks, all checked.

    python -m tests.faults.campaign --kills 100 --freezes 100 --histories 10 --databases sqlite --seed 7

The API, schedulers, drivers, recorders and workers are the product's own code in processes of their own.
Three things are replaced: Ray, by a stand-in whose "cluster" forks local processes (`node`, `ray_stand_in`
and `group_stand_in`); training, by a simulation that takes milliseconds (`trainer`); and waiting times, which
are shorter (`timing`). Every process is forked from one that has imported everything.

- `plan`: what happens, from a seed; pure
- `node`, `processes`, `ray_stand_in`, `group_stand_in`, `trainer`, `timing`: an installation that costs
  little
- `stand_ins`: where these are put in place; `warming`: what processes need not work out for themselves
- `databases`, `installation`: its database and its life
- `clients`, `faults`: what people and bad luck do to it
- `checker`: whether everything acknowledged is there, once; reads tables and events, and shares no code with
  the store
- `rounds`: the parts above, joined
- `full_disks`, `script`: a database on a small disk, and every kind of write that fills it
"""
