"""What a run took: time by phase, memory, energy, cost. Measured and modelled quantities never mix."""
