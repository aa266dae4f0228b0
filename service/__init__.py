"""The experiment domain: from a submitted spec to a tested answer.

The packages, from what all others use to what people use; each imports only those before it:

- `domain`: states, records, events and figures; `config`: an installation's settings and hardware
- `fairness`: shares of devices between projects, users and experiments
- `search` and `specs`: what can be asked for, and the runs that it means
- `db` and `store`: what is kept, in SQL
- `notifications`: how people are told what happened
- `scheduling`: whose turn it is, and the job that Ray is given
- `planner`: what runs will take, before they run
- `recording`, `workers`, `driving`: an experiment at work, from worker to database
- `analysis`: which configuration wins, by how much, and how sure that is
- `output`: reports, model folders, cards and traces
- `client`, `cli`: how people reach it; `local`, `manifests`: a service on one machine, and on Kubernetes
"""
