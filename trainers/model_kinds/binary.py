"""Options of `model.binary`: quantisers of weights and inputs, and derivatives of sign.

Imports no torch: the entries name the classes that compute, which `trainers.models.binary.install` loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainers.registry import by_name

MODULE = "trainers.models.binary"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    """A quantiser of weights, a value of `model.binary.weights`.

    Attributes:
        made: The class, as `module:Class`; see `trainers.models.binary.quantisers`.
        bits: Bits of a weight when packed.
        quantises: Whether weights lose anything.
    """

    name: str
    summary: str
    made: str
    bits: int
    quantises: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsInfo:
    """A quantiser of the inputs of binary layers, a value of `model.binary.activations`.

    Attributes:
        made: The class, as `module:Class`; None = inputs stay as they are.
        bits: Supported values of `model.binary.activation_bits`.
    """

    name: str
    summary: str
    made: str | None
    bits: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivativeInfo:
    """A surrogate for the derivative of sign, which is 0 or undefined; `made` as for weights."""

    name: str
    summary: str
    made: str


TERNARY_BITS = 2
"""Bits of a ternary weight."""
BITS = (1, 2, 4, 8)
"""Bits that inputs can be quantised to."""

_QUANTISERS = f"{MODULE}.quantisers"
_DERIVATIVES = f"{MODULE}.derivatives"

WEIGHTS: dict[str, WeightsInfo] = by_name(
    WeightsInfo(name="sign", summary="-1 and +1 times the mean of |W|", made=f"{_QUANTISERS}:Sign", bits=1),
    WeightsInfo(
        name="ternary",
        summary="-1, 0 and +1 times the mean of the |W| that are kept",
        made=f"{_QUANTISERS}:Ternary",
        bits=TERNARY_BITS,
    ),
    WeightsInfo(name="none", summary="as they are", made=f"{_QUANTISERS}:Float", bits=32, quantises=False),
)
"""All values of `model.binary.weights`."""

ACTIVATIONS: dict[str, ActivationsInfo] = by_name(
    ActivationsInfo(name="none", summary="as they are", made=None, bits=BITS),
    ActivationsInfo(name="sign", summary="-1 and +1", made=f"{_QUANTISERS}:SignInputs", bits=(1,)),
    ActivationsInfo(
        name="elastic",
        summary="levels with a learned scale and shift",
        made=f"{_QUANTISERS}:ElasticInputs",
        bits=BITS,
    ),
)
"""All values of `model.binary.activations`."""

DERIVATIVES: dict[str, DerivativeInfo] = by_name(
    DerivativeInfo(name="identity", summary="1 everywhere", made=f"{_DERIVATIVES}:Identity"),
    DerivativeInfo(name="clipped", summary="1 on [-1, 1], else 0", made=f"{_DERIVATIVES}:Clipped"),
    DerivativeInfo(
        name="polynomial",
        summary="2 - 2|u| on [-1, 1], else 0 (Bi-Real Net)",
        made=f"{_DERIVATIVES}:Polynomial",
    ),
    DerivativeInfo(name="tanh", summary="that of tanh(k u), k the sharpness", made=f"{_DERIVATIVES}:Tanh"),
    DerivativeInfo(
        name="swish", summary="that of SignSwish, k the sharpness (BNN+)", made=f"{_DERIVATIVES}:Swish"
    ),
)
"""All values of `model.binary.derivative`."""
