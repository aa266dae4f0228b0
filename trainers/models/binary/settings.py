"""Section `model.binary`: quantisers of weights and inputs, embeddings, derivatives. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from trainers.registry import NameIn, Section, by_name, described


@dataclass(frozen=True, slots=True)
class QuantiserInfo:
    """A quantiser of weights or inputs, or a derivative of sign."""

    name: str
    summary: str
    made: str  # Its class or function, as `module:name`; empty = inputs are not quantised
    bits: tuple[int, ...] = ()  # Of a packed weight, or possible ones of inputs


TERNARY_BITS = (2,)  # Bits of a ternary weight
BITS = (1, 2, 4, 8)  # Bits that inputs can be quantised to

_QUANTISERS = "trainers.models.binary.quantisers"

WEIGHTS: dict[str, QuantiserInfo] = by_name(
    QuantiserInfo("sign", "-1 and +1 times the mean of |W|", f"{_QUANTISERS}:Sign", (1,)),
    QuantiserInfo(
        "ternary",
        "-1, 0 and +1 times the mean of the |W| that are kept",
        f"{_QUANTISERS}:Ternary",
        TERNARY_BITS,
    ),
    QuantiserInfo("none", "as they are", f"{_QUANTISERS}:Float", (32,)),
)
"""All values of `model.binary.weights`."""

ACTIVATIONS: dict[str, QuantiserInfo] = by_name(
    QuantiserInfo("none", "as they are", "", BITS),
    QuantiserInfo("sign", "-1 and +1", f"{_QUANTISERS}:Inputs", (1,)),
    QuantiserInfo("elastic", "levels with a learned scale and shift", f"{_QUANTISERS}:ElasticInputs", BITS),
)
"""All values of `model.binary.activations`."""

DERIVATIVES: dict[str, QuantiserInfo] = by_name(
    QuantiserInfo("identity", "1 everywhere", f"{_QUANTISERS}:identity"),
    QuantiserInfo("clipped", "1 on [-1, 1], else 0", f"{_QUANTISERS}:clipped"),
    QuantiserInfo("polynomial", "2 - 2|u| on [-1, 1], else 0 (Bi-Real Net)", f"{_QUANTISERS}:polynomial"),
    QuantiserInfo("tanh", "that of tanh(k u), with sharpness k", f"{_QUANTISERS}:tanh"),
    QuantiserInfo("swish", "that of SignSwish, with sharpness k (BNN+)", f"{_QUANTISERS}:swish"),
)
"""All values of `model.binary.derivative`."""

_Sharpness = Annotated[float, Field(gt=0.0, le=1000.0)]

# By a call, because `from` is a keyword of Python.
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

    @field_validator("activation_bits")
    @classmethod
    def _supported(cls, bits: int) -> int:
        if bits not in BITS:
            shown = ", ".join(map(str, BITS))
            raise ValueError(f"activation_bits {bits} is not supported; use one of {shown}")
        return bits

    @model_validator(mode="after")
    def _has_bits(self) -> Self:
        served = ACTIVATIONS[self.activations].bits
        if self.activation_bits not in served:
            raise ValueError(
                f"activations {self.activations} has {served[0]} bit, but activation_bits is "
                f"{self.activation_bits}; set activations: elastic, or activation_bits: {served[0]}"
            )
        return self

    @model_validator(mode="after")
    def _splits_to_signs(self) -> Self:
        if self.split and WEIGHTS[self.weights].bits != (1,):
            raise ValueError(
                f"split makes two signs of each ternary weight, but weights is {self.weights}; set weights: "
                "sign, or split: false"
            )
        return self
