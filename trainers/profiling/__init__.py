"""Measures the steps of a run on this machine, for forecasts."""
