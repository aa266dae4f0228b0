"""Measuring a step on this machine: a group of local processes, layer times, the cost of an exchange."""
