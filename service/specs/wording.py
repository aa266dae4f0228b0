"""Translates pydantic's errors about a document into problems."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from service.config.document import MAX_SUGGESTIONS, Problem, SpecError, document_path, error_words, refusal
from service.config.suggestions import SCHEMA, all_of, did_you_mean, meant, nearest, spelt_like
from service.search import SEARCHES, Search
from service.search import protocol as searches
from service.specs.fields import GridTooLarge, SpecFields, field_names
from trainers.config import Section

_RENAMED = {"model.student": "model.name"}  # Fields that documents may still have under an earlier name
_FOLLOWS = "default_factory_not_called"  # A default that depends on a field which has an error itself
_TYPES = {
    "extra_forbidden": "unknown-key",
    "missing": "missing-field",
    "value_error": "invalid-value",
    "finite_number": "not-finite",
    "string_pattern_mismatch": "invalid-value",
    "enum": "invalid-value",
    "literal_error": "invalid-value",
}
_LONGEST_NAME = 60  # Characters of a name that a message suggests
_RANGE = ("greater_than", "less_than", "too_short", "too_long", "string_too")


@contextlib.contextmanager
def naming_problems(document: Mapping[str, object]) -> Iterator[None]:
    """Raises pydantic's errors as a `SpecError`."""
    try:
        yield
    except ValidationError as error:
        raise SpecError(_problems(error.errors(include_url=False), document)) from None
    except (TypeError, ValueError) as error:
        raise refusal("wrong-type", f"{error}") from None


def _problems(entries: Iterable[Any], document: Mapping[str, object]) -> Iterator[Problem]:
    unknown = 0
    for entry in entries:
        if entry["type"] == "extra_forbidden":
            unknown += 1
            location = [str(part) for part in entry["loc"]]
            hint = _nearest_key(location) if unknown <= MAX_SUGGESTIONS else SCHEMA
            yield Problem("unknown-key", document_path(location, document), f"unknown key; {hint}")
        elif entry["type"] != _FOLLOWS:
            yield _problem(entry, document)


def _problem(entry: Any, document: Mapping[str, object]) -> Problem:
    location = [str(part) for part in entry["loc"]]
    kind = entry["type"]
    path = document_path(location, document)
    stable = _TYPES.get(kind, "out-of-range" if kind.startswith(_RANGE) else "wrong-type")
    if isinstance(entry.get("ctx", {}).get("error"), GridTooLarge):
        stable = "grid-too-large"
    message = error_words(entry)
    if path.endswith(("model.name", "model.teacher")) and isinstance(entry["input"], dict):
        message += "; or, in a study, {best: PART} or {run: PART/seed}"
    elif kind == "string_pattern_mismatch" and (
        similar := _matching(entry["input"], entry["ctx"]["pattern"])
    ):
        message += f", such as {similar}"
    return Problem(stable, path, message)


def _matching(text: str, pattern: str) -> str | None:
    """Returns a text like this one that matches the pattern of a name, if a simple change suffices."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:_LONGEST_NAME]).strip("._-")
    return next((name for name in (plain, plain.lower()) if re.fullmatch(pattern, name)), None)


def nearest_axis(name: str, known: Iterable[str]) -> str:
    if name in _RENAMED:
        return f"it is now {_RENAMED[name]}"
    if name in field_names():
        return "a field of the spec, but one that cannot be an axis; set it outside search.axes"
    return nearest(name, known, SCHEMA)


def _nearest_key(location: Sequence[str]) -> str:
    if (name := _RENAMED.get(".".join(location))) is not None:
        return f"it is now {name}"
    fields: Mapping[str, Any] = SpecFields.model_fields
    place = ""
    for part in location[:-1]:
        annotation = fields[part].annotation if part in fields else None
        if annotation is Search:
            if owners := searches.names(lambda search: location[-1] in search.section.model_fields):
                return f"it belongs to search.name: {owners}"
            place += f"{part}."
            fields = {
                name: field
                for search in SEARCHES.values()
                for name, field in search.section.model_fields.items()
            }
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            place += f"{part}."
            fields = annotation.model_fields
    own = {f"{place}{name}": name for name in fields}
    elsewhere = {name.rpartition(".")[2]: name for name in (*field_names(), *SpecFields.model_fields)}
    found = meant(".".join(location), [*own, *SpecFields.model_fields, *field_names()])
    if suggested := did_you_mean(list(dict.fromkeys(own.get(name, name) for name in found))):
        return suggested
    close = spelt_like(location[-1], elsewhere | {name: name for name in fields})
    close.sort(key=lambda name: name not in fields)  # Names of other sections come last.
    return did_you_mean(close[:1]) or all_of(fields, SCHEMA)
