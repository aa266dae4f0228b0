"""The experiment domain: spec, states, queue, store, scheduler, Ray execution, client, command line.

The story runs `spec` (what was asked) -> `store` and `queue` (what is kept) -> `execution`
(what happens in Ray) -> `client` and `cli` (what people see). Pure modules (`spec`, `grid`,
`states`, `failures`, `hardware`) do no I/O.
"""
