"""The declared metrics of a run: unit, provenance, direction.

`docs/metrics.md` defines each in words. Imports no torch.
"""

from collections.abc import Iterable, Mapping

from trainers.reporting import Better as Better
from trainers.reporting import Figure as Figure
from trainers.reporting import Provenance
from trainers.tasks import METRICS, TASKS
from trainers.tasks.info import Score, TaskInfo
from trainers.telemetry.timeline import Phase

_S, _PCT = "s", "%"
EVERY_DEVICE = "mean over the run's devices"
_PROFILED = "worker:0, profiled steps"

FIGURES: Mapping[str, Figure] = {
    "train_loss": Figure("nat", better="lower"),
    "total_time_s": Figure(_S, better="lower"),
    "train_time_s": Figure(_S, better="lower"),
    **{f"{phase}_time_s": Figure(_S, scope="worker:0", better="lower") for phase in Phase},
    "checkpoint_write_s": Figure(_S, scope="worker:0", better="lower"),
    "overhead_time_s": Figure(_S, better="lower"),
    "queue_time_s": Figure(_S, better="lower"),
    "samples_per_s": Figure("1/s", better="higher"),
    "tokens_per_s": Figure("1/s", better="higher"),
    "padding_pct": Figure(_PCT, better="lower"),
    "truncated_pct": Figure(_PCT, better="lower"),
    "peak_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
    "evaluation_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
    "weight_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
    "example_ms_p50": Figure("ms", scope="last evaluation", better="lower"),
    "example_ms_p95": Figure("ms", scope="last evaluation", better="lower"),
    "bits_per_weight": Figure("bit", scope="layers of the encoder", better="lower"),
    "bits_per_weight_with_embeddings": Figure("bit", scope="whole model", better="lower"),
    "preparation_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
    "cost_usd": Figure("USD", Provenance.modelled, better="lower"),
    "energy_kwh": Figure("kWh", None, "all devices that train", better="lower"),
    "train_cost_usd": Figure("USD", Provenance.modelled, better="lower"),
    "stored_gb": Figure("GB", scope="checkpoints kept", better="lower"),
    "storage_usd_per_month": Figure("USD/month", Provenance.modelled, "checkpoints kept", better="lower"),
    "train_energy_kwh": Figure("kWh", Provenance.modelled, "all devices that train", better="lower"),
    "energy_provenance": Figure(""),
    "node_energy_kwh": Figure("kWh", None, "nodes, by the share of their devices", better="lower"),
    "node_energy_source": Figure(""),
    "co2_kg": Figure("kg", Provenance.modelled, "energy of nodes, else of devices", better="lower"),
    "achieved_tflops": Figure("TFLOP/s", scope="all devices", better="higher"),
    "teacher_tflops": Figure("TFLOP/s", scope="all devices"),
    "mfu_pct": Figure(_PCT, scope=EVERY_DEVICE, better="higher"),
    "cpu_utilisation_pct": Figure(_PCT, scope="CPUs reserved", better="higher"),
    "gpu_utilisation_pct": Figure(_PCT, Provenance.sampled, EVERY_DEVICE, better="higher"),
    "memory_utilisation_pct": Figure(_PCT, Provenance.sampled, EVERY_DEVICE),
    "mean_power_w": Figure("W", Provenance.sampled, EVERY_DEVICE, better="lower"),
    "peak_power_w": Figure("W", Provenance.sampled, "device with the most", better="lower"),
    "sm_clock_mhz": Figure("MHz", Provenance.sampled, EVERY_DEVICE),
    "kernel_active_ratio": Figure("1", scope=_PROFILED, better="higher"),
    "kernel_launches_per_step": Figure("1", scope=_PROFILED, better="lower"),
    "sm_occupancy_pct": Figure(_PCT, Provenance.modelled, _PROFILED, better="higher"),
    "sm_occupancy_wall_pct": Figure(_PCT, Provenance.modelled, _PROFILED, better="higher"),
    "bubble_pct": Figure(_PCT, scope="mean over stages", better="lower"),
    "bubble_formula_pct": Figure(_PCT, Provenance.modelled, better="lower"),
    "noise_scale": Figure("base batches", Provenance.sampled),
    "statistical_efficiency": Figure("1", Provenance.sampled, better="higher"),
    "goodput": Figure("1/s", Provenance.sampled, better="higher"),
    "hidden_communication_s": Figure(_S, scope="worker:0"),
    "bytes_sent_per_step": Figure("B", scope="worker:0", better="lower"),
    "validation_examples": Figure("1"),
    "test_examples": Figure("1"),
    "parameters": Figure("1", better="lower"),
    "steps": Figure("1", better="lower"),
}
"""All that a summary may have besides scores; which of them depends on the device and on `telemetry`."""


def _scores(tasks: Iterable[TaskInfo]) -> dict[str, Score]:
    found: dict[str, Score] = {}
    for task in tasks:
        for name, score in task.scores.items():
            if found.setdefault(name, score) != score:
                raise ValueError(
                    f"task {task.name} declares the score {name} unlike another task; give it another name"
                )
    for metric in METRICS.values():
        if found.setdefault(metric.name, metric.score) != metric.score:
            raise ValueError(f"the metric {metric.name} has the name of a score; give it another name")
    return found


SCORES: Mapping[str, Score] = _scores(TASKS.values())  # All that the evaluation of some task reports


def on_test(score: str) -> str | None:
    """Returns the name of a score on the test part; None = it is not measured there."""
    if score in SCORES and SCORES[score].tuned:
        return None
    return "test_loss" if score == "validation_loss" else f"test_{score}"


TEST_SCORES: Mapping[str, Figure] = {
    name: figure for score, figure in SCORES.items() if (name := on_test(score)) is not None
}
"""The same on the test part, which is scored once."""

POINTS: Mapping[str, Figure] = {
    "loss": Figure("nat", better="lower"),
    "learning_rate": Figure("1"),
    "grad_norm": Figure("1"),
    "epoch": Figure("1"),
    "communication_ms": Figure("ms", better="lower"),
    "hidden_communication_ms": Figure("ms"),
    "loss_scale": Figure("1"),
    "skipped_steps": Figure("1", better="lower"),
    "underflow_pct": Figure(_PCT, better="lower"),
    "stage": Figure("1"),
    "flipped_signs_pct": Figure(_PCT),
    "near_zero_pct": Figure(_PCT),
    "gpu_memory_used_mib": Figure("MiB", Provenance.sampled, "worker:0"),
    "gpu_temperature_c": Figure("°C", Provenance.sampled, "worker:0"),
    **dict.fromkeys(("task_loss", "soft_loss", "relation_loss"), Figure("nat", better="lower")),
    **dict.fromkeys(("hidden_loss", "embedding_loss", "cosine_loss"), Figure("1", better="lower")),
}
"""Points that no run ends with; the other points are figures and scores that have a value at a step."""

DECLARED: Mapping[str, Figure] = {**POINTS, **FIGURES, **SCORES, **TEST_SCORES}
"""Everything that a run reports by name and number, besides measurements outside the summary."""
