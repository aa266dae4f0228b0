"""Steps whose result no run keeps: what fits into memory, and a process's warm-up."""
