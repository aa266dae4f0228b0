"""How long a step will take before anybody runs it. Pure: layer times and byte counts in, times out."""
