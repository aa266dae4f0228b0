"""HTTP over the service: routes, request and response shapes, problems, live streams, the web page.

The story runs `app` (assembly) -> `routes` (one module per resource) -> `shapes` (what goes over
the wire) and `problems` (every error's stable type). Nothing here holds SQL, torch or Ray.
"""
