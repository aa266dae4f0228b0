"""From bytes to plain values: YAML by the core schema, JSON by a JSON parser, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from service.config.document import MAX_DEPTH, MAX_PROBLEMS, Problem, SpecError, parse, shortened


def refused(text: str | bytes) -> Problem:
    with pytest.raises(SpecError) as caught:
        parse(text if isinstance(text, bytes) else text.encode())
    [problem] = caught.value.problems
    assert "\n" not in str(problem)
    return problem


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010", 10),
        ("08", 8),
        ("-0", 0),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("True", True),
        ("FALSE", False),
        ("Null", None),
        ("~", None),
        ("", None),
        ("-.INF", -math.inf),
        ("9223372036854775807", 2**63 - 1),
        ("99999999999999999999", 1e20),
        ("0xffffffffffffffffff", float(0xFFFFFFFFFFFFFFFFFF)),
        ("0x" + "f" * 300, math.inf),
        ("9" * 5000, math.inf),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("0b11", "0b11"),
        ("2026-01-01", "2026-01-01"),
        ("'5'", "5"),
        ("\u0663", "\u0663"),
        ("!!str 5", "5"),
        ("! 5", "5"),
        ("!!int 010", 10),
        ("!!int '5'", 5),
        ("!!float 3", 3.0),
        ("!!bool true", True),
        ("!!null ''", None),
        ("!!seq [1]", [1]),
        ("!!map {a: 1}", {"a": 1}),
        ("&anchor 1", 1),
    ],
)
def test_a_value_is_read_by_the_core_schema(written: str, value: object) -> None:
    read = parse(f"x: {written}\n".encode())["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "written",
    [
        "!!int ''",
        "!!int 1.5",
        "!!int 99999999999999999999",
        "!!float one",
        "!!bool foo",
        "!!bool 1",
        "!!null 0",
        "!!timestamp foo",
        "!!timestamp 2026-01-01",
        "!!binary aGk=",
        "!!set [a]",
        "!!map [a]",
        "!!seq {a: 1}",
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
        "!!str [a]",
        "!!int [1]",
        "!mine 1",
        "!!python/object/apply:os.system ['true']",
        "!!python/name:os.system",
    ],
)
def test_a_tag_that_does_not_fit_is_refused(written: str) -> None:
    problem = refused(f"name: a\nx: {written}\n")
    assert problem.type == "not-yaml"
    assert problem.message.startswith("line 2: the tag ")
    assert problem.message.endswith("; remove the tag")


@pytest.mark.parametrize("text", ["? [a, b]\n: 1", "{{}: b}", "{[a]: b}", "a: {? {b: 1} : 2}"])
def test_a_key_that_is_not_a_word_is_refused(text: str) -> None:
    assert refused(text).message == "line 1: a list or section is used as a key; a key is a word"


def test_keys_are_taken_as_they_are_written() -> None:
    text = b"1: a\nnull: b\ntrue: c\n1e3: d\n<<: {e: f}\n"
    assert parse(text) == {"1": "a", "null": "b", "true": "c", "1e3": "d", "<<": {"e": "f"}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2", "line 2: key 'a' is given twice"),
        ("{a: 1, 'a': 2}", "line 1: key 'a' is given twice"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ("a: 1\n---\nb: 2", "line 2: a second document begins"),
        ('{"a": "\\ud83d"}', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
    ],
)
def test_an_ambiguous_document_is_refused(text: str, says: str) -> None:
    problem = refused(text)
    assert problem.type == "not-yaml"
    assert says in problem.message


@pytest.mark.parametrize(
    "value", ["\U0001f600", "next\u0085line", "\u2028", "tab\there", "\ufeff", "é" * 10_000, "no", "010", "#"]
)
@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("before", ["", "\n", "# spec.yaml --set a=1\n# more\n", "\ufeff"])
def test_json_keeps_its_text(value: str, escaped: bool, before: str) -> None:
    document = {"a": value, value: [value]}
    assert parse((before + json.dumps(document, ensure_ascii=escaped)).encode()) == document


def test_the_flow_style_of_yaml_is_not_taken_for_json() -> None:
    assert parse(b"{a: 1, b: [x, 'y'], # why\n c: {}}") == {"a": 1, "b": ["x", "y"], "c": {}}


def test_numbers_of_json_are_those_of_yaml() -> None:
    read = parse(b'{"a": 10000000000000000000000, "b": 1e999, "c": -5, "d": NaN, "e": 1.0}')
    assert (read["a"], read["b"], read["c"], read["e"]) == (1e22, math.inf, -5, 1.0)
    assert isinstance(read["d"], float)
    assert math.isnan(read["d"])


@pytest.mark.parametrize(("opened", "closed"), [('{"a":', "}"), ("[", "]")])
@pytest.mark.parametrize("before", ['{"a":', "a: "], ids=["json", "yaml"])
def test_nesting_is_limited_exactly(before: str, opened: str, closed: str) -> None:
    def nested(levels: int) -> bytes:
        text = before + opened * (levels - 1) + "1" + closed * (levels - 1)
        return (text + "}" * (before[0] == "{")).encode()

    assert parse(nested(MAX_DEPTH))
    assert refused(nested(MAX_DEPTH + 1)).type == "too-deep"
    assert refused(nested(100_000)).type == "too-deep"


@pytest.mark.parametrize("text", ['{"a": [%s1]}' % ("1," * 99_990), "a: [%s1]" % ("1," * 99_990)])
def test_as_many_values_as_allowed_are_read(text: str) -> None:
    assert len(str(parse(text.encode())["a"])) > 99_990
    assert refused(text.replace("1]", "1" + ",1" * 20 + "]")).type == "too-large"


def test_an_error_lists_a_bounded_number_of_bounded_problems() -> None:
    made: list[Problem] = []

    def problems() -> Iterator[Problem]:
        for _ in range(1000):
            made.append(Problem("unknown-key", "k" * 10_000, "m" * 100_000))
            yield made[-1]

    error = SpecError(problems())
    assert (len(error.problems), error.more, len(made)) == (MAX_PROBLEMS, True, MAX_PROBLEMS + 1)
    assert len(str(error)) < 50_000
    assert error.lines()[-1] == "there are more problems; fix these first"
    assert shortened("x" * 100, 10) == "xxxxxxx..."
