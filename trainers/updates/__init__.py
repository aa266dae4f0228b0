"""One optimizer update: loss scale, clipping, learning rate, and the optimizer built over a model."""
