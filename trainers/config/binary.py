from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, create_model, model_validator

from trainers.config.section import Section
from trainers.model_kinds.binary import ACTIVATIONS, BITS, DERIVATIVES, WEIGHTS
from trainers.registry import NameIn, described

_Sharpness = Annotated[float, Field(gt=0.0, le=1000.0)]

# By a call, because `from` is a word of Python.
Sharpness = create_model(
    "Sharpness",
    __base__=Section,
    __module__=__name__,
    __doc__="Sharpness k of the derivatives `tanh` and `swish` over the run; it grows geometrically.",
    **{  # type: ignore[call-overload]
        "from": (_Sharpness, Field(default=1.0, description="At the first step, dimensionless.")),
        "to": (_Sharpness, Field(default=10.0, description="At the last step, dimensionless.")),
    },
)


class Binary(Section):
    """What an encoder with few bits quantises; used with `model.encoder: binary`."""

    weights: Annotated[str, NameIn(WEIGHTS), described(WEIGHTS)] = "sign"
    """Quantiser of the weights of the encoder's layers."""
    weight_scale: Literal["row", "tensor"] = "row"
    """Scale of quantised weights: one for each row (an output), or one for each tensor."""
    centred: bool = False
    """Subtract the mean (of the row, or the tensor) from weights before they are quantised."""
    activations: Annotated[str, NameIn(ACTIVATIONS), described(ACTIVATIONS)] = "none"
    """Quantiser of the inputs of the encoder's layers."""
    activation_bits: int = 1
    """Bits of elastic inputs: 1, 2, 4 or 8."""
    derivative: Annotated[str, NameIn(DERIVATIVES), described(DERIVATIVES)] = "clipped"
    """Derivative that stands for that of sign in the backward pass."""
    sharpness: Sharpness = Sharpness()
    """Sharpness of `tanh` and `swish`."""
    attention: Literal["full", "elastic"] = "full"
    """Products of attention: in full precision, or of elastic queries, keys, values and probabilities."""
    embeddings: Literal["fp32", "fp16", "sign"] = "fp32"
    """Word embeddings: in full, rounded to half precision, or -1 and +1 times a scale for each row."""
    keep_first: bool = False
    """Leave the first layer in full precision."""
    keep_last: bool = False
    """Leave the last layer in full precision."""
    relu: bool = False
    """Replace the feed-forward activation by ReLU, after which elastic inputs are {0, a} and not {-a, a}."""
    clip: float | None = Field(default=None, gt=0.0, le=100.0)
    """Latent weights are kept within [-clip, clip] after each step; unset = not clipped."""
    split: bool = False
    """Start from a ternary student of half the width: each of its weights becomes the sum of two signs."""

    @model_validator(mode="after")
    def _has_bits(self) -> Binary:
        served, shown = ACTIVATIONS[self.activations].bits, ", ".join(map(str, BITS))
        if self.activation_bits not in BITS:
            raise ValueError(f"activation_bits {self.activation_bits} is not supported; use one of {shown}")
        if self.activation_bits not in served:
            raise ValueError(
                f"activations {self.activations} has {served[0]} bit, but activation_bits is "
                f"{self.activation_bits}; set activations: elastic, or activation_bits: {served[0]}"
            )
        return self

    @model_validator(mode="after")
    def _splits_to_signs(self) -> Binary:
        if self.split and WEIGHTS[self.weights].bits != 1:
            raise ValueError(
                f"split makes two signs of each ternary weight, but weights is {self.weights}; set weights: "
                "sign, or split: false"
            )
        return self
