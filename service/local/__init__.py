"""A whole service on one machine: its processes, its Ray, and a doctor for both."""
