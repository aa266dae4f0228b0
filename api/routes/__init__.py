"""One module per resource; each gives a router that `api.app` includes."""
