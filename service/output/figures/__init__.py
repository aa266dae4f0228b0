"""Figures: the plots that a report and a page share, as plain data for plotly.

The story: `registry` lists the kinds of figures; each reads some `options`, takes what it needs from a
`material`, and is drawn by a pure function of `curves`, `answers`, `parallel` or `times` as a `figure`.
`choices` tells what can be drawn of some experiments. What the API declares is in `figure` and `options`,
which import no statistics.
"""
