"""Whose turn it is: shares of devices between projects, users and experiments. Pure.

- `state`: what a pass is given and what it returns
- `usage`: what has been used lately, in USD that halve every seven days
- `tree`: shares of projects by weight, of users inside a project equally
- `rules`: constants and small rules of a pass
- `backlog`: experiments that have never started a run, kept in order between passes
- `allowances`: a pass: who may hold how many devices now, and who gives some back for whom
- `lanes`: the state of the lanes while a pass is made
- `preemptions`: which runs stop for a run that finds too few free devices
- `handovers`: which experiments start no more runs, because runs of higher priority come first
- `standings`: what people are told after a pass: scores, turns and reasons
- `eta`: when the runs that wait will start
- `explanations`: all of that in one line of plain English
"""
