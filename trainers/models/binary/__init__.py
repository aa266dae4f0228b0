"""`model.encoder: binary`: encoder layers whose weights, and as an option inputs, have one or a few bits.

The story: `kinds` lists what can be chosen, `quantisers` and `derivatives` are the arithmetic, `layers` a
Linear that computes with it from latent fp32 weights, `install` puts it into a model. `course` follows the
latent weights through training, `frozen` hands a trained layer on to be packed, `splitting` starts from a
ternary model of half the width. Importing this package imports no torch.
"""
