"""The ledger in words, for the command line and the report. Pure."""

from collections.abc import Mapping, Sequence

from service.domain.formats import duration, figure
from service.domain.ledger import Charge, Overhead, Sum

MARKS = {"counter": "", "sampled": "≈", "modelled": "~"}  # Before an amount of energy, by its provenance
LEGEND = (
    "energy: plain = counter, ≈ sampled, ~ modelled from rated power; time: ~ up to the last heartbeat of an "
    "attempt that died without reporting an error; lost: work that is in no result"
)
HEADINGS = ("ended", "time", "cost", "energy", "busy", "lost")  # Of `cells`
FIGURES = HEADINGS[1:]  # Those that are numbers
PARTS = {
    "worker_start": "starting workers",
    "preparation": "filling caches",
    "warm_up": "warming up",
    "restart": "restarting",
    "between_runs": "between runs",
}
"""Parts of the overhead."""


def energy(parts: Mapping[str, float]) -> str:
    """`302 + ~11 mWh`: one number per provenance."""
    known = {source: kwh for source, kwh in parts.items() if kwh}
    if not known:
        return "-"
    return " + ".join(MARKS.get(source, "") + figure("energy_kwh", kwh) for source, kwh in known.items())


def time(charge: Charge) -> str:
    return ("~" if charge.until == "its last heartbeat" else "") + duration(charge.time_s)


def cells(charge: Charge) -> list[str]:
    """How it ended, time, cost, energy, utilisation, lost time."""
    return [
        str(charge.failure_class or charge.state),
        time(charge),
        figure("cost_usd", charge.cost_usd),
        energy(charge.energy_kwh),
        "-" if charge.utilisation_pct is None else f"{charge.utilisation_pct:.0f}%",
        duration(charge.lost_s) if charge.lost_s else "-",
    ]


def sentences(total: Sum, overhead: Sequence[Overhead] = ()) -> list[str]:
    """Returns the sum in words, with the parts that were retries, lost work or overhead."""
    lines = [
        f"total: {total.attempts:,} attempt{'s' * (total.attempts != 1)}, "
        f"{duration(total.device_hours * 3600)} of device time, "
        f"{figure('cost_usd', total.cost_usd)}, {energy(total.energy_kwh)}"
    ]
    if total.co2_kg is not None:
        lines[0] += f", {figure('co2_kg', total.co2_kg)} of CO2"
    if total.retries or total.lost_s:
        share = f" ({total.lost_usd / total.cost_usd:.0%} of the cost)" if total.cost_usd else ""
        lines.append(
            f"including {total.retries:,} retr{'y' if total.retries == 1 else 'ies'}, "
            f"{duration(total.lost_s)} and {figure('cost_usd', total.lost_usd)} of lost work{share}"
        )
    if total.overhead_s:
        parts = [
            f"{PARTS.get(part.part, part.part)} {duration(part.time_s)}" for part in overhead if part.time_s
        ]
        named = f": {', '.join(parts)}" if parts else ""
        lines.append(
            f"including {figure('cost_usd', total.overhead_usd)} of overhead, which is in no run's "
            f"figures{named}"
        )
    return lines
