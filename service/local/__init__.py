"""A whole service on one machine: its processes, its Ray, and checks of both."""
