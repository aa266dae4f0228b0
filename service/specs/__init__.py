"""What can be asked for: the spec, and what it names (data, models, earlier runs).

`fields` is the schema, `rules` what holds between its sections, `wording` how a mistake is told; `experiment`
validates a document with them and expands it into runs. `paths` and `models` check what lies outside it.
"""
