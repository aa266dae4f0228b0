"""Adan: our own, `cuda_ext.Adan`."""

import warnings
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import cuda_ext
from trainers.optimizers.info import Built, Groups, Hyperparameters, Implementation, OptimizerInfo, States
from trainers.registry import Deferred


def build(groups: Groups, chosen: Hyperparameters) -> Built:
    """Builds `cuda_ext.Adan`, with a parity record where its own kernels run."""
    import torch

    from trainers.optimizers.masters import stored_format

    settings: dict[str, Any] = {
        "lr": chosen.learning_rate,
        "betas": chosen.betas,
        "eps": chosen.eps,
        "master_weights": chosen.masters,
        "moments_dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.moments],
        **chosen.options,
    }
    with warnings.catch_warnings():
        # The reason of a fallback goes to the run's log and record instead.
        warnings.filterwarnings("ignore", message="Adan runs", category=RuntimeWarning)
        optimizer = cuda_ext.Adan(groups, implementation=chosen.implementation.value, **settings)
    built = Built(optimizer, optimizer.implementation, "cuda_ext.Adan", optimizer.fallback_reason)
    if not optimizer.implementation.endswith("_fused"):
        return built
    parity = cuda_ext.measure_parity(
        optimizer.implementation,
        device=groups[0]["params"][0].device,
        dtype=stored_format(groups),
        weight_decay=groups[0]["weight_decay"],
        **settings,
    )
    return replace(built, parity=asdict(parity))


ADAN = OptimizerInfo(
    name="adan",
    summary="Adan (arXiv 2208.06677), in the official code's convention of betas",
    build=build,
    betas=(0.98, 0.92, 0.99),
    # m and v; n; the gradient of the step before.
    states=States(moments=2, fp32=1, gradients=1),
    implementations=tuple(one for one in Implementation if one is not Implementation.auto),
    masters=cuda_ext.MASTERS,
    moments=cuda_ext.MOMENTS,
    options=("no_prox",),
    freezes_second_moment=True,
    availability=partial(Deferred("cuda_ext:availability"), compile_now=False),
)
