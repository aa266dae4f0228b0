"""From a stored run to what a worker trains, and to what it takes from the cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from service.config.hardware import Hardware, lookup
from service.config.settings import Settings
from service.scheduling.cluster import ACCELERATOR, CPU, ClusterNode, FreeRoom, holds_of
from service.specs.experiment import ExperimentSpec
from service.specs.models import checkpoints_folder, workspace_of
from trainers.config import Precision, RunConfig, TrainingSections
from trainers.data.storage import Place
from trainers.device_kinds import DEVICE_KINDS, DeviceKind


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run takes from the cluster; runs of one shape can use the same processes in turn."""

    workers: int
    resources: tuple[tuple[str, float], ...]  # Of each worker, by Ray's resource name, sorted
    device: str
    labels: tuple[tuple[str, str], ...] = ()  # Required of nodes, sorted
    exclusive: bool = False  # It holds all CPUs of its node, or those that belong to its devices
    topology: str | None = None  # Slice of devices reserved whole, by Ray's name; None = each by itself

    @property
    def scaling(self) -> dict[str, Any]:
        """Returns arguments of Ray Train's `ScalingConfig` that reserve it for a worker group."""
        each = dict(self.resources)
        found = {"num_workers": self.workers, **self.kind.ray_scaling, "resources_per_worker": each}
        if self.topology is None:
            return {**found, "label_selector": dict(self.labels) or None}
        # Ray labels the slice's nodes itself, and takes no labels besides.
        types = (name.removeprefix(ACCELERATOR) for name, _ in self.resources if name.startswith(ACCELERATOR))
        return {**found, "topology": self.topology, "accelerator_type": next(types)}

    @property
    def cpus(self) -> int:
        return int(dict(self.resources)[CPU])

    @property
    def devices(self) -> float:
        """Returns devices that all its workers hold; a part of one where runs share it."""
        counted = CPU if self.kind.counted_in_cpus else self.kind.ray_resource
        return self.workers * dict(self.resources).get(counted or "", 1.0)

    @property
    def kind(self) -> DeviceKind:
        return DEVICE_KINDS[self.device]

    def fits(self, nodes: Sequence[ClusterNode]) -> bool:
        """Returns whether idle nodes have room for all its workers."""
        return FreeRoom(nodes).holds(dict(self.resources), dict(self.labels), self.workers)


def shapes_of(
    spec: ExperimentSpec, catalogue: Mapping[str, Hardware], nodes: Sequence[ClusterNode] = ()
) -> tuple[Shape, ...]:
    """Returns the shapes that an attempt at a run may have, the widest first; one, unless the run is elastic.

    A run that is measured alone has one for each node that it could hold.
    """
    hardware = lookup(spec.hardware, catalogue)
    return tuple(
        Shape(
            hold.workers,
            tuple(sorted(hold.resources.items())),
            hardware.device,
            tuple(sorted(hold.labels.items())),
            exclusive=spec.measure == "exclusive",
            topology=hardware.topologies.get(hold.workers),
        )
        for hold in holds_of(spec, nodes, catalogue)
    )


def run_config(
    spec: ExperimentSpec,
    *,
    experiment_id: int,
    run_id: int,
    first_attempt: int = 1,  # Of the measurement: all its attempts have one folder for checkpoints
    seed: int,
    workers: int,
    cpus_held: int | None = None,  # That each worker reserves and is charged for; None = as many as it uses
    settings: Settings,
    catalogue: Mapping[str, Hardware],
    models: Mapping[str, Place] = MappingProxyType(
        {}
    ),  # Checkpoint folders by what the spec has, such as `run:12`
) -> RunConfig:
    """Returns what `trainers.entrypoint.train` gets for one run.

    Not validated again: its sections were with the spec, and what is set here keeps them valid.
    """
    sections = {name: getattr(spec, name) for name in TrainingSections.model_fields}
    sections["parallel"] = spec.parallel.model_copy(update={"workers": workers, "min_workers": None})
    sections["threads"] = spec.threads or spec.resources.cpus_per_worker
    sections["precision"] = Precision(spec.precision)
    sections["model"] = spec.model.model_copy(
        update={
            name: str(models[text])
            for name, text in (("name", spec.model.name), ("teacher", spec.model.teacher))
            if text is not None and text in models
        }
    )
    return RunConfig.model_construct(
        **sections,
        seed=seed,
        rates=lookup(spec.hardware, catalogue).pricing(
            cpus_held or spec.resources.cpus_per_worker, shared=spec.queue.share_device
        ),
        workspace=workspace_of(
            settings,
            checkpoints=str(checkpoints_folder(settings, experiment_id, run_id, first_attempt)),
            models=models.values(),
        ),
        site=settings.site(settings.pool),
        memory_gib=spec.resources.memory_gib_per_worker,
    )
