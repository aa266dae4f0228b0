"""Checks the paths that a spec names: folders under the configured roots, presets and hub ids.

For the API, `stillhouse validate` and the driver. `trainers.data.paths.find` is the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.config.document import Problem, first_problems
from service.specs.experiment import ExperimentSpec, nothing
from service.specs.models import FIELDS as MODEL_FIELDS
from service.specs.models import reference
from trainers.data.paths import HUB, OutsideRoots, UnusablePath, find, id_on_hub
from trainers.models.origin import PRESETS

_FIELDS = ("task.path", *MODEL_FIELDS)

Roots = Callable[[str], tuple[Path, ...]]  # Allowed folders of `data` or `model` paths


def dataset_problem(text: str, roots: Roots) -> Problem | None:
    if text.startswith(HUB):
        return _id_problem(text, "dataset", "task.path")
    try:
        path = find(text, roots("data"))
        if path.is_dir():
            if next(path.iterdir(), None) is None:
                return Problem(
                    "path-not-found", "task.path", f"'{text}' is an empty folder; put the data in it"
                )
        elif not path.is_file():
            return Problem(
                "path-not-found",
                "task.path",
                f"'{text}' is neither a folder nor a file, but a device or pipe",
            )
        elif path.stat().st_size == 0:
            return Problem("path-not-found", "task.path", f"'{text}' is an empty file; put the data in it")
    except OutsideRoots as error:
        return Problem("path-outside-roots", "task.path", str(error))
    except UnusablePath as error:
        return Problem("path-not-found", "task.path", str(error))
    except OSError as error:
        return Problem("path-not-found", "task.path", f"'{text}' cannot be read: {error.strerror}")
    return None


def model_problem(text: str, roots: Roots, field: str = "model.name") -> Problem | None:
    """Whether a run exists is not checked here."""
    if text in PRESETS and field == "model.teacher":
        return Problem(
            "model-without-weights", field, f"'{text}' is a preset, which has no trained weights; "
            "give a folder, hub:<id> or run:<id>",
        )  # fmt: skip
    if text in PRESETS:
        return None
    if text.startswith(HUB):
        return _id_problem(text, "model", field)
    try:
        if reference(text) is not None:
            return None
    except ValueError as error:
        return Problem("invalid-value", field, str(error))
    try:
        path = find(text, roots("model"))
        if not path.is_dir():
            return Problem("path-not-found", field, f"'{text}' is a file; give its folder")
        if not (path / "config.json").is_file():
            return Problem("model-without-weights", field, f"'{text}' has no config.json; add it")
        if not (path / "model.safetensors").is_file():
            return Problem("model-without-weights", field, f"'{text}' has no model.safetensors; add it")
    except OutsideRoots as error:
        return Problem("path-outside-roots", field, str(error))
    except UnusablePath as error:
        message = f"{error}; give a folder, hub:<id>, run:<id>"
        if field == "model.name":
            message += f", or a preset ({', '.join(PRESETS)})"
        return Problem("path-not-found", field, message)
    except OSError as error:
        return Problem("path-not-found", field, f"'{text}' cannot be read: {error.strerror}")
    return None


def _id_problem(text: str, what: str, field: str) -> Problem | None:
    try:
        id_on_hub(text, what)
    except UnusablePath as error:
        return Problem("invalid-value", field, str(error))
    return None


def path_problems(
    spec: ExperimentSpec, roots: Roots, *, before_each: Callable[[], None] = nothing
) -> list[Problem]:
    """Returns the first problems of the paths in a spec, axes included."""

    def problem(field: str, text: str) -> Problem | None:
        before_each()
        if field == "task.path":
            return dataset_problem(text, roots)
        return model_problem(text, roots, field)

    problems = (problem(field, text) for field in _FIELDS for text in _texts(spec, field))
    return first_problems(one for one in problems if one is not None)


def _texts(spec: ExperimentSpec, field: str) -> list[str]:
    return list(dict.fromkeys(value for value in spec.values_of(field) if isinstance(value, str)))
