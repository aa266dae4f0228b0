"""Reads `accuracy=0.005` and `cost_usd:lower`, and names a claim's test."""

from collections.abc import Iterable, Mapping

from service.analysis.answers import BadQuestion, Claim
from service.config.suggestions import nearest
from service.domain.metrics import METRICS, Metric, better_of
from trainers.metrics import DECLARED


def assignments(texts: Iterable[str] | None, parameter: str) -> dict[str, float]:
    """Reads NAME=NUMBER, each name once."""
    numbers: dict[str, float] = {}
    for text in texts or ():
        name, separator, value = (part.strip() for part in text.rpartition("="))
        try:
            if not separator or not name:
                raise ValueError
            number = float(value)
        except ValueError:
            raise BadQuestion(
                parameter, f"'{text[:100]}' is not NAME=NUMBER, such as accuracy=0.005"
            ) from None
        if name in numbers:
            raise BadQuestion(parameter, f"'{name[:100]}' is given twice; give it once")
        numbers[name] = number
    return numbers


def one_assignment(texts: Iterable[str] | None, parameter: str) -> tuple[str, float] | None:
    numbers = assignments(texts, parameter)
    if len(numbers) > 1:
        raise BadQuestion(parameter, f"{len(numbers)} values are given; give one")
    return next(iter(numbers.items()), None)


def metric_of(
    text: str, known: Mapping[str, object], parameter: str = "metric", headline: str | None = None
) -> Metric:
    """Reads `cost_usd`, or `noise_scale:lower` where no direction is declared.

    `known` has the figures that any run has, besides the columns of a run; `parameter` is named in errors.
    """
    name, _, direction = text.strip().partition(":")
    columns = [metric.name for metric in METRICS]
    if name not in columns and name not in known:
        everything = dict.fromkeys([*columns, *known])
        if name in DECLARED:
            own = name.removeprefix("test_")
            instead = f"; on the validation part it is {own}" if own in everything else ""
            raise BadQuestion(parameter, f"none of these runs has {name}{instead}")
        raise BadQuestion(parameter, f"unknown metric '{name[:100]}'; {nearest(name[:100], everything)}")
    if direction in ("lower", "higher"):
        return Metric(name, "lower" if direction == "lower" else "higher")
    if direction:
        raise BadQuestion(
            parameter, f"'{direction[:100]}' is not a direction; write {name}:lower or {name}:higher"
        )
    better = better_of(name, headline)
    if better is None:
        raise BadQuestion(
            parameter,
            f"the direction of {name} is unknown; write {name}:lower or {name}:higher",
        )
    return Metric(name, better)


def test_words(claim: Claim) -> str:
    seeds = str(claim.seeds_a)
    if claim.seeds_a != claim.seeds_b:
        seeds += f" and {claim.seeds_b}"
    if claim.pairs > claim.seeds_a:
        return f"{claim.test} over {claim.pairs} runs of {seeds} seed{'s' * (claim.seeds_a != 1)}"
    examples = f" and {claim.examples:,} examples" if claim.examples else ""
    return f"{claim.test} over {seeds} seeds{examples}"


def correction_words(claim: Claim) -> str:
    return f", corrected over {claim.claims:,} claims" if claim.claims > 1 else ""


def steps_words(claim: Claim) -> str:
    return ", whose spread is below the figure's resolution" if claim.at_resolution else ""
