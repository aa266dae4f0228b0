class AdanError(Exception):
    """Base of everything that `cuda_ext` raises on purpose."""


class HyperParameterError(AdanError, ValueError):
    """A learning rate, beta, eps, weight decay or norm outside its range."""


class ConfigurationError(AdanError, ValueError):
    """Options that do not go together, or that this machine cannot serve."""


class TensorMismatchError(AdanError, TypeError):
    """A parameter or gradient of a dtype or device that the step cannot take."""


class LayoutError(AdanError, ValueError):
    """A parameter with gaps or overlaps in memory."""


class SparseGradientError(AdanError, TypeError):
    """A sparse gradient: Adan's g_prev, m, v and n are dense, a skipped row would silently keep old ones."""


class StateDictError(AdanError, ValueError):
    """A state dict that does not fit the parameters, or lacks part of Adan's state."""


class BuildError(AdanError, RuntimeError):
    """The compiler is missing or refused the sources; the message carries its last lines."""
