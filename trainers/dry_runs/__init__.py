"""Steps whose result no run keeps: what fits into memory, a process's warm-up, and what a step costs."""
