"""Whose turn it is: shares of devices between projects, users and experiments. Pure.

- `state`: what a pass is given and what it returns
- `usage`: what has been used lately, in USD that halve every seven days
- `tree`: shares of projects by weight, of users inside a project equally
- `allowances`: a pass: who may hold how many devices now, and who gives some back for whom
- `eta`: when the runs that wait will start
- `explanations`: all of that in one line of plain English
"""
