"""Plots that the report and the web page share, as plain data for plotly.

`registry` lists the kinds of plots; each reads its `options`, takes what it needs from a `material`, and is
drawn by a pure function. What the API declares is in `plot`, which imports no statistics.
"""
