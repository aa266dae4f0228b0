"""AdamW: torch's own, over fp32 masters where parameters are stored in half precision."""

from trainers.device_kinds import kind_of
from trainers.optimizers.info import Built, Groups, Hyperparameters, Implementation, OptimizerInfo, States

_FLAGS = {
    Implementation.single_unfused: {"foreach": False, "fused": False},
    Implementation.multi_unfused: {"foreach": True, "fused": False},
    Implementation.multi_fused: {"foreach": False, "fused": True},
}


def build(groups: Groups, chosen: Hyperparameters) -> Built:
    import torch

    from trainers.optimizers.masters import MasterAdamW, stored_format

    implementation = chosen.implementation
    if implementation is Implementation.auto:
        fused = kind_of(groups[0]["params"][0].device).fused_steps
        implementation = Implementation.multi_fused if fused else Implementation.multi_unfused
    has_masters = stored_format(groups) is not torch.float32
    first, second = chosen.betas
    optimizer = (MasterAdamW if has_masters else torch.optim.AdamW)(
        groups,
        lr=chosen.learning_rate,
        betas=(first, second),
        eps=chosen.eps,
        **_FLAGS[implementation],
    )
    library = "torch.optim.AdamW" + (", fp32 masters" if has_masters else "")
    return Built(optimizer, implementation.value, library)


ADAMW = OptimizerInfo(
    name="adamw",
    summary="torch's AdamW (arXiv 1711.05101)",
    build=build,
    betas=(0.9, 0.999),
    states=States(moments=2),
    implementations=tuple(_FLAGS),
)
