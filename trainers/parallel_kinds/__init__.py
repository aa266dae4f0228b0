"""How gradients can be exchanged, and what that costs. Imports no torch."""
