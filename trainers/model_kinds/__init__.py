"""What is known of models before they are loaded: families, encoders, heads, quantisers. Imports no torch."""
