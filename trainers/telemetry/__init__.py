"""What a run took: time by phase, memory, energy, cost, and the facts to reproduce it.

Windows begin and end and return dataclasses. Measured and modelled quantities never mix.
"""
