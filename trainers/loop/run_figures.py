"""The figures that a run ends with."""

import time
from collections.abc import Iterator, Mapping

from trainers.config import Precision, RunConfig
from trainers.loop.progress import Progress
from trainers.metrics import DECLARED, EVERY_DEVICE, Figure
from trainers.reporting import Measurement, Provenance
from trainers.telemetry.flops import FlopCount, Tally
from trainers.telemetry.instruments import OVERHEAD_SCOPE, OVERHEAD_TIME, Instruments
from trainers.telemetry.timeline import OVERHEAD, OWN, TRAINING, Phase, Timeline
from trainers.telemetry.usage import J_PER_KWH, RunUsage
from trainers.workers import Workers

_LEAST_WINDOW_S, _WINDOW_SHARE = 30.0, 0.1
"""A window is said once it is this long and this share of those before it: a week's run says a hundred."""
_S, _PCT, _KWH = "s", "%", "kWh"
_TERA = 1e12

_MEASURED_ALONE = {
    "gpu": ("gpu_energy_kwh", "whole GPUs"),
    "cpu": ("cpu_energy_kwh", "whole processor packages of all machines"),
    "dram": ("dram_energy_kwh", "whole memory of all machines"),
}
_PASSES = (Phase.forward, Phase.backward, Phase.bubble)
_MEANS = ("gpu_utilisation_pct", "memory_utilisation_pct", "sm_clock_mhz")


class RunFigures:
    """Counts of one worker over its attempt, and the summary of the whole run.

    The `first` worker of a replica counts its model's arithmetic.
    """

    def __init__(
        self,
        config: RunConfig,
        instruments: Instruments,
        flop_count: FlopCount,
        *,
        teacher_precision: Precision | None = None,
        first: bool = True,
        timeline: Timeline | None = None,
        truncated_pct: float = 0.0,
    ) -> None:
        self._timeline = timeline or Timeline(time.perf_counter())
        self.spent_s = self._timeline.spent_s()
        """Seconds by phase up to the last `update`: what `RunUsage` has was used in them."""
        self.taken_s = time.time()  # Unix time of the last `update`
        self._config, self._instruments, self._flop_count = config, instruments, flop_count
        self._truncated_pct, self._first, self._teacher_precision = truncated_pct, first, teacher_precision
        self._flops = self._teacher_flops = 0.0
        self._began_s = time.time()
        self._unsaid, self._said_s = RunUsage(), 0.0

    def count(self, counted: Tally, teacher: FlopCount | None, *, timed: bool) -> None:
        """Adds the arithmetic of this replica's share of a step, if its time counts in the rates."""
        if not timed:
            return
        if self._first:
            self._flops += self._flop_count.training(counted)
        if teacher is not None:
            self._teacher_flops += teacher.forward(counted)

    def update(self, progress: Progress, workers: Workers, *, last: bool = False) -> list[Measurement]:
        """Adds all workers' use since the last call to the run's; every worker takes part.

        Returns the use since the last report when one is due, and at the `last` call: the ledger sums these
        windows. Use by overhead is reported at once.
        """
        instruments, timeline = self._instruments, self._timeline
        before, self.spent_s = self.spent_s, timeline.spent_s()
        began_s, self.taken_s = self.taken_s, time.time()
        passes_s = {phase: self.spent_s[phase] - before[phase] for phase in _PASSES}
        mine = (
            (instruments.window(timeline.until_s), instruments.overhead()),
            (self._flops, self._teacher_flops, sum(passes_s.values()), passes_s[Phase.bubble]),
        )
        self._flops = self._teacher_flops = 0.0
        both, counts = zip(*workers.all_gather(mine), strict=True)
        windows, overhead = zip(*both, strict=True)
        flops, teacher_flops, passes, bubble = zip(*counts, strict=True)
        progress.usage.passes_s += sum(passes)
        progress.usage.bubble_s += sum(bubble)
        progress.usage.add(windows, self._config.site.carbon_between(began_s, self.taken_s))
        progress.usage.flops += sum(flops)
        progress.usage.teacher_flops += sum(teacher_flops)
        self._unsaid.add(windows)
        devices = self._config.rates.devices_per_worker * len(windows)
        of_overhead, said = RunUsage(), []
        of_overhead.add(overhead)
        if of_overhead.device_s:
            said.append(self._window_energy(of_overhead, OVERHEAD_SCOPE, of_overhead.device_s / devices))
        window_s = self._unsaid.device_s / devices
        if not last and window_s < max(_LEAST_WINDOW_S, _WINDOW_SHARE * self._said_s):
            return said
        usage, self._unsaid = self._unsaid, RunUsage()
        self._said_s += window_s
        return [*said, *self._of_window(usage, window_s)]

    def _window_energy(self, usage: RunUsage, scope: str, window_s: float) -> Measurement:
        joules, provenance = self._energy(usage)
        end_s = time.time()
        return Measurement(
            "window_energy_kwh", joules / J_PER_KWH, _KWH, provenance, scope, end_s - window_s, end_s
        )

    def _of_window(self, usage: RunUsage, window_s: float) -> Iterator[Measurement]:
        energy = self._window_energy(usage, "all devices that train", window_s)
        yield energy
        start_s, end_s = energy.start_s, energy.end_s
        if self._config.rates.kind.counted_in_cpus:
            utilisation = 100.0 * usage.cpu_s / usage.device_s if usage.device_s else None
            how = Provenance.counter
        else:
            utilisation, how = usage.mean("gpu_utilisation_pct"), Provenance.sampled
        if utilisation is not None:
            yield Measurement("window_utilisation_pct", utilisation, _PCT, how, EVERY_DEVICE, start_s, end_s)

    def shown(self) -> Mapping[str, float]:
        return self._instruments.shown()

    def summary(self, progress: Progress, parameters: int) -> dict[str, float | int | str | None]:
        """Returns the final figures by name (`docs/metrics.md`); `parameters` are the trained ones."""
        spent_s = self.spent_s
        total_s = sum(spent_s[phase.value] for phase in OWN)
        training_s = sum(spent_s[phase.value] for phase in TRAINING)
        energy_j, provenance = self._energy(progress.usage)
        train_s = total_s - spent_s[Phase.validation.value] - spent_s[Phase.test.value]
        share = train_s / total_s if total_s else 1.0
        return {
            **progress.scores,
            **progress.costs,
            "train_loss": progress.train_loss,
            "total_time_s": total_s,
            "train_time_s": train_s,
            OVERHEAD_TIME: sum(spent_s[phase.value] for phase in OVERHEAD),
            **{f"{phase}_time_s": seconds for phase, seconds in spent_s.items()},
            "checkpoint_write_s": progress.checkpoint_write_s,
            "queue_time_s": progress.usage.queue_s,
            **(self._rates(progress, training_s) if self._config.trains else {}),
            "truncated_pct": self._truncated_pct,
            "peak_memory_mib": progress.usage.peak_memory_mib,
            "preparation_memory_mib": progress.usage.preparation_memory_mib,
            "cost_usd": progress.usage.cost_usd,
            "energy_kwh": energy_j / J_PER_KWH,
            "train_cost_usd": progress.usage.cost_usd * share,
            "train_energy_kwh": energy_j / J_PER_KWH * share,
            "energy_provenance": provenance.value,
            **self._whole_system(progress.usage, energy_j / J_PER_KWH),
            **self._utilisation(progress),
            **self._bubble(progress),
            **self._sent(progress),
            **progress.usage.profiled,
            "parameters": parameters,
            "steps": progress.step,
        }

    def measurements(
        self, summary: Mapping[str, float | int | str | None], progress: Progress
    ) -> Iterator[Measurement]:
        """Yields the summary's numbers as measurements, and those that no summary has."""
        end_s = time.time()
        node = progress.usage.measured("node")
        told = {"energy_kwh": Provenance(str(summary["energy_provenance"]))}
        told |= {"node_energy_kwh": node[1]} if node else {}
        for name, value in summary.items():
            if isinstance(value, int | float):
                figure = DECLARED.get(name) or Figure("1")
                provenance = figure.provenance or told[name]
                yield Measurement(
                    name, float(value), figure.unit, provenance, figure.scope, self._began_s, end_s
                )
        for kind, (name, scope) in _MEASURED_ALONE.items():
            measured = progress.usage.measured(kind)
            if measured is not None:
                joules, provenance = measured
                yield Measurement(name, joules / J_PER_KWH, _KWH, provenance, scope, self._began_s, end_s)
        if not self._config.rates.kind.counted_in_cpus:
            usage, (_, provenance) = progress.usage, self._energy(progress.usage)
            modelled = provenance is Provenance.modelled
            for device, joules in (usage.modelled_device_j if modelled else usage.device_j).items():
                name, scope, kwh = "device_energy_kwh", f"device:{device}", joules / J_PER_KWH
                yield Measurement(name, kwh, _KWH, provenance, scope, self._began_s, end_s)
        for reason, seconds in progress.usage.throttled_s.items():
            yield Measurement(
                "throttled_time_s", seconds, _S, Provenance.sampled, f"reason:{reason}", self._began_s, end_s
            )

    def _energy(self, usage: RunUsage) -> tuple[float, Provenance]:
        """Energy of the training devices: measured throughout, or modelled throughout."""
        if self._config.rates.kind.counted_in_cpus:
            measured = usage.measured("cpu_share")
        else:
            measured = usage.measured("gpu") if self._alone else None
        return measured or (usage.modelled_j, Provenance.modelled)

    def _whole_system(self, usage: RunUsage, energy_kwh: float) -> dict[str, float | str]:
        """Energy of the nodes, where it is known, and CO2 of that, else of the devices' energy."""
        site, node, found = self._config.site, usage.measured("node"), dict[str, float | str]()
        if node is not None:
            energy_kwh = found["node_energy_kwh"] = node[0] / J_PER_KWH
            found["node_energy_source"] = " and ".join(usage.node_methods)
        if site.carbon_kg_per_kwh is not None and usage.device_s:
            found["co2_kg"] = energy_kwh * site.pue * usage.carbon_s / usage.device_s
        return found

    @property
    def _alone(self) -> bool:
        return self._instruments.device.exclusive and not self._config.rates.shared

    def _rates(self, progress: Progress, training_s: float) -> dict[str, float]:
        usage, flops = progress.usage, progress.usage.flops + progress.usage.teacher_flops
        rates = {
            "samples_per_s": progress.timed_samples / training_s if training_s else 0.0,
            "tokens_per_s": progress.timed_tokens / training_s if training_s else 0.0,
            "padding_pct": progress.padding_pct,
            "achieved_tflops": flops / training_s / _TERA if training_s else 0.0,
        }
        if usage.teacher_flops and training_s:
            rates["teacher_tflops"] = usage.teacher_flops / training_s / _TERA
        at_peak_s = self._at_peak_s(usage)
        if at_peak_s is not None and training_s:
            devices = self._config.rates.devices_per_worker * self._config.parallel.workers
            rates["mfu_pct"] = 100.0 * at_peak_s / (training_s * devices)
        return rates

    def _at_peak_s(self, usage: RunUsage) -> float | None:
        """Returns the arithmetic's time at published peaks, each format's own; None = a format has none."""
        peaks = self._config.rates.peak_tflops or {}
        parts = {self._config.precision: usage.flops}
        if self._teacher_precision is not None and usage.teacher_flops:
            parts[self._teacher_precision] = parts.get(self._teacher_precision, 0.0) + usage.teacher_flops
        if not parts.keys() <= peaks.keys():
            return None
        return sum(flops / (peaks[precision] * _TERA) for precision, flops in parts.items())

    def _bubble(self, progress: Progress) -> dict[str, float]:
        stages, usage = self._config.parallel.stage_count, progress.usage
        if stages == 1 or not usage.passes_s:
            return {}
        found = {"bubble_pct": 100.0 * usage.bubble_s / usage.passes_s}
        if self._config.parallel.schedule != "zero_bubble":
            # Each micro-batch passes a stage as often as the stage has chunks.
            passes = self._config.accumulation * self._config.parallel.chunks // stages
            found["bubble_formula_pct"] = 100.0 * (stages - 1) / (passes + stages - 1)
        return found

    def _sent(self, progress: Progress) -> dict[str, float]:
        if not progress.bytes_sent or not progress.step:
            return {}
        return {
            "hidden_communication_s": progress.hidden_communication_s,
            "bytes_sent_per_step": progress.bytes_sent / progress.step,
        }

    def _utilisation(self, progress: Progress) -> dict[str, float]:
        usage = progress.usage
        if self._config.rates.kind.counted_in_cpus:
            return {"cpu_utilisation_pct": 100.0 * usage.cpu_s / usage.device_s if usage.device_s else 0.0}
        found = {name: usage.mean(name) for name in _MEANS}
        if self._alone:
            found["mean_power_w"] = usage.mean("power_w")
            found["peak_power_w"] = usage.peaks.get("power_w")
        return {name: value for name, value in found.items() if value is not None}
