"""Documents nobody would write: each becomes a spec or a bounded list of problems, for bounded work."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.config.document import MAX_PROBLEMS, SpecError, parse
from service.config.hardware import CATALOGUE
from service.scheduling.admission import read_spec
from service.search import SEARCHES
from service.specs.experiment import ExperimentSpec
from service.specs.fields import axis_names
from tests.drawing import scaled

CALLS = 150_000
"""Calls that any document may take to read and validate."""
CALLS_PER_BYTE = 40
MAX_TEXT = MAX_PROBLEMS * 12_000
"""Characters of an error: each problem's text is cut, and a character may be escaped as ten."""

FIELDS = (*ExperimentSpec.model_fields, "precison", "", "0", "name.name")
NAMES = (*axis_names(), "precison", "search.name", "seeds", "model", "", "model.name.x", "é")

numbers = st.one_of(
    st.integers(-3, 100),
    st.sampled_from([2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
)
words = st.one_of(
    st.sampled_from(["fp32", "bf16", "fp16", "cpu", "A100", "tiny", "mini", "imdb", "mlm", "adan", "adamw"]),
    st.sampled_from(
        ["run:1", "hub:a/b", "/etc", "../..", "ddp", "pipeline", "auto", "none", "\x00", "x" * 5000]
    ),
    st.sampled_from(["grid", "random", "asha", "tpe", "validation_loss", "\U0001f600", "\u0085", "\ufeff"]),
    st.text(max_size=6),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
listed = st.lists(scalars, max_size=6)
ranges = st.fixed_dictionaries({"low": numbers, "high": numbers}, optional={"log": st.booleans()})
long_lists = st.sampled_from([list(range(1, n)) for n in (3, 30, 1001, 10_001)])
axes = st.dictionaries(st.sampled_from(NAMES), st.one_of(listed, long_lists, ranges, values), max_size=12)
conditions = st.dictionaries(
    st.sampled_from(NAMES), st.dictionaries(st.sampled_from(NAMES), st.one_of(listed, values), max_size=3)
)


@st.composite
def searches(draw: st.DrawFn) -> Any:
    """A section `search` whose conditions mostly name its own axes."""
    chosen = draw(axes)
    names = st.sampled_from([*chosen, "precision"])
    known = st.sampled_from(
        [value for listed in chosen.values() if isinstance(listed, list) for value in listed[:9]] or [1]
    )
    needs = st.dictionaries(
        names, st.dictionaries(names, st.lists(known, max_size=3), max_size=3), max_size=6
    )
    section = {"axes": chosen}
    if draw(st.booleans()):
        section["when"] = draw(st.one_of(needs, conditions, values))
    if draw(st.booleans()):
        section["otherwise"] = draw(st.dictionaries(names, scalars, max_size=3))
    for field, strategy in {
        "name": st.sampled_from([*SEARCHES, "grit"]),
        "samples": st.one_of(st.integers(0, 20), numbers),
        "seed": numbers,
        "metric": words,
        "reference_every": numbers,
        "first_rung": numbers,
        "anything": values,
    }.items():
        if draw(st.integers(0, 3)) == 0:
            section[field] = draw(strategy)
    return section


@st.composite
def documents(draw: st.DrawFn) -> Any:
    """A document that is a valid spec but for some fields."""
    document: dict[str, Any] = {"name": "a", "task": {"name": "imdb"}}
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        annotation = (
            ExperimentSpec.model_fields[field].annotation if field in ExperimentSpec.model_fields else None
        )
        inner = tuple(getattr(annotation, "model_fields", ())) or ("x",)
        section = st.dictionaries(st.sampled_from((*inner, "y")), st.one_of(scalars, values), max_size=3)
        document[field] = draw(st.one_of(section, values, scalars))
    if draw(st.booleans()):
        document["search"] = draw(searches())
    return document


TAGS = (
    "||||!!str |!!int |!!float |!!bool |!!null |!!map |!!seq |!!set |!!timestamp |!!binary |!!omap |"
    "!!python/name:os.system |! |!x |!<x> |!!|&a |&a !!str "
)
tags = st.sampled_from(TAGS.split("|"))
yaml_scalars = st.one_of(
    st.sampled_from(
        [
            "",
            "~",
            "null",
            "010",
            "08",
            "0o9",
            "0x",
            "0xFF",
            "1e999",
            "-.inf",
            ".nan",
            "1_0",
            "1:2",
            "*a",
            "<<",
        ]
    ),
    st.sampled_from(
        ["'", '"', '"\\ud800"', '"\\x00"', "|", ">-", "- ", "? ", ": ", "#", "%", "@", "`", "---", "..."]
    ),
    st.text(alphabet="abc019.-+e_:{}[],'\"\\#&*!|>%@ \t\n\u0085\u2028\ufeff\x00\x07\U0001f600", max_size=6),
    numbers.map(repr),
)


def _flow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(st.sampled_from(["", "? "]), inner, st.sampled_from([": ", ":", " "]), inner).map(
        "".join
    )
    return st.one_of(
        st.tuples(tags, st.lists(inner, max_size=4)).map(lambda made: f"{made[0]}[{', '.join(made[1])}]"),
        st.tuples(tags, st.lists(pairs, max_size=4)).map(lambda made: f"{made[0]}{{{', '.join(made[1])}}}"),
    )


yaml_nodes = st.recursive(st.tuples(tags, yaml_scalars).map("".join), _flow, max_leaves=12)
deep = st.tuples(
    st.sampled_from(["[", "{a: ", "{? ", "- ", '{"a":', "!!seq [", "a: \n  "]), st.integers(1, 3000)
).map(lambda made: made[0] * made[1])
yaml_values = st.one_of(yaml_nodes, deep)
yaml_lines = st.tuples(
    st.sampled_from(["", "", "? ", "- ", "%"]), st.one_of(st.sampled_from(FIELDS), yaml_scalars), yaml_values
)
yaml_texts = st.lists(yaml_lines.map(lambda line: f"{line[0]}{line[1]}: {line[2]}\n"), max_size=5).map(
    lambda lines: "name: a\ntask: {name: imdb}\n" + "".join(lines)
)


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Counts the calls of Python and C functions in the block."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(before)


def check(text: bytes) -> None:
    """A spec or a SpecError, for work that is bounded by the document's length."""
    spec = None
    with counted() as calls:
        try:
            spec = read_spec(text, CATALOGUE)
        except SpecError as error:
            refused(error)
    assert calls() <= CALLS + CALLS_PER_BYTE * len(text), (calls(), len(text))
    if spec is None:
        return
    try:
        assert 1 <= spec.run_count() <= 10_000
        assert parse(spec.canonical_json().encode())
        for plan in itertools.islice(spec.runs(), 20):
            assert plan.spec.canonical_json()
    except SpecError as error:
        refused(error)


def refused(error: SpecError) -> None:
    """It lists some problems, each in one line of bounded length."""
    assert 1 <= len(error.problems) <= MAX_PROBLEMS
    assert all("\n" not in str(problem) and problem.type and problem.message for problem in error.problems)
    assert len(str(error)) <= MAX_TEXT


fuzzed = settings(max_examples=scaled(300), deadline=None, suppress_health_check=list(HealthCheck))


@fuzzed
@given(yaml_texts)
def test_any_yaml_is_a_spec_or_refused(text: str) -> None:
    check(text.encode("utf-8", "surrogatepass"))


@fuzzed
@given(st.one_of(documents(), values), st.booleans())
def test_any_json_is_a_spec_or_refused(document: Any, escaped: bool) -> None:
    text = json.dumps(document, ensure_ascii=escaped)
    check(text.encode("utf-8", "surrogatepass"))


@fuzzed
@given(st.one_of(documents(), values), st.integers(0, 10**6), st.binary(max_size=3))
def test_a_damaged_document_is_a_spec_or_refused(document: Any, place: int, damage: bytes) -> None:
    text = json.dumps(document).encode()
    place %= len(text)
    check(text[:place] + damage + text[place + len(damage) :])
