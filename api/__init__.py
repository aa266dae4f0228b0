"""HTTP over the service: routes, problems, live streams, the web page.

The story runs `app` (assembly) -> `routes` (one module per resource) -> `problems` (every error's
stable type). Answers are the domain's dataclasses. Nothing here holds SQL, torch or Ray.
"""
