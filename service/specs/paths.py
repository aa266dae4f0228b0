"""Checks the paths that a spec names: those under the configured roots, presets and hub ids.

For the API, `stillhouse validate` and the driver. `trainers.data.paths.find` is the rule.
"""

from collections.abc import Callable, Sequence

from service.config.document import Problem, first_problems
from service.specs.experiment import ExperimentSpec, nothing
from service.specs.models import FIELDS as MODEL_FIELDS
from service.specs.models import references
from trainers.data.paths import HUB, OutsideRoots, UnusablePath, find, id_on_hub
from trainers.data.storage import Place
from trainers.models.origin import PRESETS, WEIGHTS, without_weights

_FIELDS = ("task.path", *MODEL_FIELDS)

Roots = Callable[[str], tuple[Place, ...]]  # Allowed folders of `data` or `model` paths


def dataset_problem(text: str, roots: Roots) -> Problem | None:
    def of(path: Place) -> Problem | None:
        if path.is_dir():
            wrong = "is an empty folder; put the data in it" if next(path.iterdir(), None) is None else None
        elif not path.is_file():
            wrong = "is neither a folder nor a file, but a device or pipe"
        else:
            wrong = "is an empty file; put the data in it" if path.stat().st_size == 0 else None
        return Problem("path-not-found", "task.path", f"'{text}' {wrong}") if wrong else None

    others = "; put it there, or give another folder or file, or hub:<id>"
    return _problem_of(text, "task.path", "dataset", roots("data"), of, others)


def model_problem(text: str, roots: Roots, field: str = "model.name") -> Problem | None:
    """Whether a run exists is not checked here."""
    if text in PRESETS and field == "model.teacher":
        return Problem(
            "model-without-weights", field, f"'{text}' is a preset, which has no trained weights; "
            "give a folder, hub:<id> or run:<id>",
        )  # fmt: skip
    try:
        if text in PRESETS or references(text):
            return None
    except ValueError as error:
        return Problem("invalid-value", field, str(error))

    # Imported here: only specs that name a folder pay for the library.
    from trainers.data.tokenizers import SOURCES

    def of(path: Place) -> Problem | None:
        if not path.is_dir():
            return Problem("path-not-found", field, f"'{text}' is a file; give its folder")
        reason = None
        if not (path / "config.json").is_file():
            reason = "has no config.json; add it"
        elif not (path / WEIGHTS).is_file():
            reason = f"has no weights: {without_weights(path)}"
        elif not any((path / name).is_file() for name in SOURCES):
            reason = f"has no tokenizer ({', '.join(SOURCES)}); copy the files of its own tokenizer there"
        return None if reason is None else Problem("model-without-weights", field, f"'{text}' {reason}")

    others = "; give a folder, hub:<id>, run:<id>"
    if field == "model.name":
        others += f", or a preset ({', '.join(PRESETS)})"
    return _problem_of(text, field, "model", roots("model"), of, others)


def _problem_of(
    text: str,
    field: str,
    what: str,
    roots: Sequence[Place],
    of: Callable[[Place], Problem | None],
    others: str = "",
) -> Problem | None:
    """Judges an id on the hub, or by `of` what is at a path; `others` ends the message where nothing is."""
    if text.startswith(HUB):
        try:
            id_on_hub(text, what)
        except UnusablePath as error:
            return Problem("invalid-value", field, str(error))
        return None
    try:
        return of(find(text, roots))
    except OutsideRoots as error:
        variable = f"STILLHOUSE_{'DATA' if what == 'dataset' else 'MODEL'}_ROOTS"
        fix = f"move it into one, or add its folder to the service's {variable}"
        return Problem("path-outside-roots", field, f"{error}; {fix}")
    except UnusablePath as error:
        return Problem("path-not-found", field, f"{error}{others}")
    except OSError as error:
        return Problem("path-not-found", field, f"'{text}' cannot be read: {error.strerror}")


def path_problems(
    spec: ExperimentSpec, roots: Roots, *, before_each: Callable[[], None] = nothing
) -> list[Problem]:
    def problem(field: str, text: str) -> Problem | None:
        before_each()
        if field == "task.path":
            return dataset_problem(text, roots)
        return model_problem(text, roots, field)

    problems = (problem(field, text) for field in _FIELDS for text in _texts(spec, field))
    return first_problems(one for one in problems if one is not None)


def _texts(spec: ExperimentSpec, field: str) -> list[str]:
    return list(dict.fromkeys(value for value in spec.values_of(field) if isinstance(value, str)))
