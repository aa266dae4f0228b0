"""The spec of an experiment, and what it names: data, models, earlier runs.

`fields` is the schema, `rules` what holds between its sections, `wording` the words for mistakes;
`experiment` validates a document with them and expands it into runs. `paths` and `models` check what lies
outside it.
"""
