"""The output layer of a model that predicts a number, in whatever unit the number is.

The layer computes `scale (w x + b)` in fp32, where `scale` is near the labels' standard deviation and a
fresh `b` is their mean over `scale`. So a learning rate means the same for scores from 1 to 5 and for
prices, and half precision does not round the result. Files hold `scale w` and `scale b`, an ordinary
output layer in the labels' unit, which other libraries load as it is; because `scale` is a power of two,
nothing is lost on the way to a file and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from trainers.model_kinds.heads import NumberHead
from trainers.models.architectures import Bert


class NumberOutput(nn.Linear):
    def __init__(self, features: int, head: NumberHead) -> None:
        super().__init__(features, 1)
        self.scale = head.scale
        with torch.no_grad():
            self.bias.fill_(head.mean / head.scale)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns (B, 1) in fp32, or in the parameters' format where that is wider."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            said = functional.linear(states.to(wide), self.weight.to(wide), self.bias.to(wide))
            return said * self.scale


def install(model: PreTrainedModel, architecture: Bert, head: NumberHead) -> None:
    """Replaces the output layer of a model for sequences: the last Linear of its head."""
    of_head, module = architecture.head_modules(model)[-1]
    within, layer = [found for found in module.named_modules() if isinstance(found[1], nn.Linear)][-1]
    name = f"{of_head}.{within}" if within else of_head
    output = NumberOutput(layer.in_features, head)
    with torch.no_grad():
        output.weight.copy_(layer.weight)
    model.set_submodule(name, output)


def adopt(model: nn.Module, fresh: Collection[str]) -> None:
    """Divides weights loaded from a file by the scale, in place; `fresh` names those that the file lacks."""
    for name, scale in _scales(model):
        if name not in fresh:
            model.get_parameter(name).data.div_(scale)


def stored(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts trained weights to the form in files."""
    scales = dict(_scales(model))
    return {name: tensor * scales[name] if name in scales else tensor for name, tensor in weights.items()}


def trained(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts a file's weights to the form that is trained."""
    scales = dict(_scales(model))
    return {name: tensor / scales[name] if name in scales else tensor for name, tensor in weights.items()}


def _scales(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Names of scaled parameters with their scale."""
    for name, part in model.named_modules():
        if isinstance(part, NumberOutput):
            yield from ((f"{name}.{own}", part.scale) for own in ("weight", "bias"))
