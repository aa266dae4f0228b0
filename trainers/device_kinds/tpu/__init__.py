"""Google's TPUs, through torch-tpu. No run has trained on one yet. May be deleted. Imports no torch."""

from trainers.device_kinds.kind import DeviceKind
from trainers.registry import Deferred

TPU = DeviceKind(
    name="tpu",
    summary="a TPU chip",
    noun="TPU",
    torch_type="tpu",
    load=Deferred("trainers.device_kinds.tpu.backend:TpuBackend"),
    requires="torch_tpu",
    trained_on=(),
    static_shapes=True,
    serves={
        "model.teacher": (None,),
        "model.compile": (False,),
        "model.cuda_graphs": (False,),
        "optimizer.implementation": ("auto", "single_unfused", "multi_unfused"),
        "numerics.parameters": ("fp32",),
        "numerics.embeddings": ("fp32",),
        "numerics.evaluation": ("same", "fp32", "bf16"),
        "parallel.strategy": ("single", "ddp"),
        "parallel.compression": ("none",),
        "queue.share_device": (False,),
        "deterministic": (False,),
    },
    fused_steps=False,
    ray_resource="TPU",
    pod_resource="google.com/tpu",
    ray_scaling={"use_tpu": True},
    process_group="cpu:gloo,tpu:tpu_dist",
    link_gb_s=25.0,
    behind_host=True,
    teacher_precisions=("bf16", "fp32"),
)


def entries() -> tuple[DeviceKind, ...]:
    return (TPU,)
