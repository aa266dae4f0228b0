"""Adan: our own, `cuda_ext.Adan`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cuda_ext import MASTERS, MOMENTS
from trainers.optimizers.info import Built, Groups, Hyperparameters, Implementation, OptimizerInfo, States

if TYPE_CHECKING:
    from cuda_ext import Availability


def build(groups: Groups, chosen: Hyperparameters) -> Built:
    """Builds `cuda_ext.Adan`, with a parity record where its own kernels run."""
    import torch

    import cuda_ext
    from trainers.optimizers.masters import stored_format

    first, second, third = chosen.betas
    moments = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.moments]
    with warnings.catch_warnings():
        # The reason of a fallback goes to the run's log and record instead.
        warnings.filterwarnings("ignore", message="Adan runs", category=RuntimeWarning)
        optimizer = cuda_ext.Adan(
            groups,
            lr=chosen.learning_rate,
            betas=(first, second, third),
            eps=chosen.eps,
            implementation=chosen.implementation.value,
            master_weights=chosen.masters,
            moments_dtype=moments,
            **chosen.options,
        )
    built = Built(optimizer, optimizer.implementation, "cuda_ext.Adan", optimizer.fallback_reason)
    if not optimizer.implementation.endswith("_fused"):
        return built
    parity = cuda_ext.measure_parity(
        optimizer.implementation,
        device=groups[0]["params"][0].device,
        dtype=stored_format(groups),
        lr=chosen.learning_rate,
        betas=(first, second, third),
        eps=chosen.eps,
        weight_decay=groups[0]["weight_decay"],
        master_weights=chosen.masters,
        moments_dtype=moments,
        **chosen.options,
    )
    return replace(built, parity=parity.as_dict())


def _availability() -> Sequence[Availability]:
    from cuda_ext import availability

    return availability(compile_now=False)


ADAN = OptimizerInfo(
    name="adan",
    summary="Adan (arXiv 2208.06677), in the official code's convention of betas",
    build=build,
    betas=(0.98, 0.92, 0.99),
    # m and v; n; the gradient of the step before.
    states=States(moments=2, fp32=1, gradients=1),
    implementations=tuple(one for one in Implementation if one is not Implementation.auto),
    masters=MASTERS,
    moments=MOMENTS,
    options=("no_prox",),
    freezes_second_moment=True,
    availability=_availability,
)
