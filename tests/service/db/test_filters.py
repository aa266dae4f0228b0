"""The filter grammar: what it accepts, what it says about what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.db.errors import FilterError
from service.db.filters import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_LENGTH,
    All,
    Any,
    Condition,
    IsNull,
    Kind,
    Match,
    Name,
    Not,
    OneOf,
    Order,
    Relation,
    parse_filter,
    parse_order,
)

NAMES = {"precision": Kind.text, "accuracy": Kind.number, "seed": Kind.number}
PRECISION, ACCURACY = Name("precision", Kind.text), Name("accuracy", Kind.number)
SEED = Name("seed", Kind.number)


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("accuracy > 0.9", Relation(ACCURACY, ">", 0.9)),
        ("accuracy>=-1e3", Relation(ACCURACY, ">=", -1000.0)),
        ("accuracy == 1", Relation(ACCURACY, "=", 1)),
        ("accuracy <> 1", Relation(ACCURACY, "!=", 1)),
        ("precision = 'it''s'", Relation(PRECISION, "=", "it's")),
        ('precision = "a\'b"', Relation(PRECISION, "=", "a'b")),
        ("precision LIKE 'fp%'", Match(PRECISION, "fp%", False)),
        ("precision not ilike 'FP%'", Not(Match(PRECISION, "FP%", True))),
        ("precision in ('a', \"b\")", OneOf(PRECISION, ("a", "b"))),
        ("accuracy not in (1, 2.5)", Not(OneOf(ACCURACY, (1, 2.5)))),
        ("precision = fp16", Relation(PRECISION, "=", "fp16")),
        ("precision = 16", Relation(PRECISION, "=", "16")),
        ("precision != bert-base/v1.5", Relation(PRECISION, "!=", "bert-base/v1.5")),
        ("precision in (fp16, run:12)", OneOf(PRECISION, ("fp16", "run:12"))),
        ("accuracy is null", IsNull(ACCURACY)),
        ("accuracy Is Not Null", Not(IsNull(ACCURACY))),
        ("axis.batch.global_size = 8", Relation(Name("batch.global_size", Kind.axis), "=", 8)),
        ("batch.global_size = 8", Relation(SEED, "=", 8)),
        ("axis.\"x y\" = 'a'", Relation(Name("x y", Kind.axis), "=", "a")),
        (
            "accuracy > 1 and seed = 1 or not precision = 'a'",
            Any((
                All((Relation(ACCURACY, ">", 1), Relation(Name("seed", Kind.number), "=", 1))),
                Not(Relation(PRECISION, "=", "a")),
            )),
        ),
        (
            "accuracy > 1 and (seed = 1 or seed = 2)",
            All((
                Relation(ACCURACY, ">", 1),
                Any((Relation(SEED, "=", 1), Relation(SEED, "=", 2))),
            )),
        ),
        ("", None),
        (" \n", None),
    ],
)  # fmt: skip
def test_what_is_accepted(text: str, condition: Condition | None) -> None:
    assert parse_filter(text, NAMES, beside={"batch.global_size": SEED}) == condition


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("precison = 'a'", "position 1: unknown column 'precison'; did you mean 'precision'?"),
        ("accuracy > 'a'", "position 12: 'accuracy' is a number; write it without quotes"),
        ("precision = and", "position 13: expected a value, in quotes if it has spaces, found 'and'"),
        ("accuracy >", "position 11: expected a number, found the end"),
        ("accuracy > 1 seed = 2", "position 14: expected AND, OR or the end, found 'seed'"),
        ("(accuracy > 1", "position 14: expected AND, OR or ), found the end"),
        ("accuracy > 1)", "position 13: expected AND, OR or the end, found ')'"),
        ("accuracy in 1", "position 13: expected ( after IN, found '1'"),
        ("accuracy in ()", "position 14: expected a number, found ')'"),
        ("accuracy in (1", "position 15: expected , or ), found the end"),
        ("accuracy is 1", "position 13: expected NULL, found '1'"),
        ("accuracy like 'a'", "position 10: 'accuracy' is a number; compare it with =, <, > or IN"),
        ("precision like 1", "position 16: expected a quoted pattern, found '1'"),
        ("precision = 'a", "position 13: the string is not terminated; end it with '"),
        ("precision = 'a'; drop table runs", "position 16: unexpected ';'"),
        ("accuracy > 1e999", "position 12: '1e999' is out of range"),
        ("accuracy not 1", "position 14: expected LIKE, ILIKE or IN after NOT, found '1'"),
        ("and", "position 1: expected a name, found 'and'"),
        ("axis. = 1", "position 7: expected the name of an axis, found '='"),
        ("accuracy", "position 9: expected =, !=, <, <=, >, >=, LIKE, ILIKE, IN or IS, found the end"),
        ("(" * (MAX_DEPTH + 2), f"nested deeper than {MAX_DEPTH}"),
        ("not " * (MAX_DEPTH + 2) + "seed = 1", f"nested deeper than {MAX_DEPTH}"),
        (" or ".join(["seed = 1"] * (MAX_CONDITIONS + 1)), f"more than {MAX_CONDITIONS} conditions"),
        (f"seed in ({','.join('1' * (MAX_CONDITIONS + 1))})", f"more than {MAX_CONDITIONS} values"),
        (" " * (MAX_LENGTH + 1), f"the limit is {MAX_LENGTH:,}"),
    ],
)
def test_what_is_refused_and_what_is_said(text: str, said: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse_filter(text, NAMES)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_word_alone_is_looked_for_in_columns_and_axes() -> None:
    def search(text: str) -> Condition | None:
        return parse_filter(text, NAMES, searched=["precision"])

    known = All((Not(IsNull(PRECISION)), Relation(PRECISION, "=", "fp32")))
    fp32 = Any((known, Match(Name("point", Kind.text), '%"fp32"%', False)))
    assert search("fp32") == search("'fp32'") == search("(fp32)") == fp32
    assert search("not fp32 and seed = 1") == All((Not(fp32), Relation(SEED, "=", 1)))
    with pytest.raises(FilterError, match="position 10: expected =,"):
        search("precision")
    with pytest.raises(FilterError, match="unknown column 'small'"):
        search("small in vision")


def test_axes_may_be_left_out() -> None:
    with pytest.raises(FilterError, match="axis"):
        parse_filter("axis.a = 1", NAMES, axes=False)


@given(st.text())
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        parse_filter(text, NAMES)
    except FilterError as error:
        assert len(str(error)) < 500


_words = st.sampled_from(
    ["accuracy", "precision", "axis", ".", "and", "or", "not", "in", "is", "null", "like", "(", ")", ",", "=",
     "<", ">=", "1", "-2.5e3", "'a'", '"b"', "''", "x"]
)  # fmt: skip


@given(st.lists(_words, max_size=25))
def test_any_row_of_words_parses_or_is_refused(words: list[str]) -> None:
    try:
        parse_filter(" ".join(words), NAMES)
    except FilterError as error:
        assert len(str(error)) < 500


_names = st.sampled_from([PRECISION, ACCURACY, Name("batch.size", Kind.axis)])
_texts = st.text(st.characters(exclude_characters="\0"))
_numbers = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


def _values(name: Name) -> st.SearchStrategy[object]:
    if name.kind is Kind.number:
        return _numbers
    return _texts if name.kind is Kind.text else _texts | _numbers


_leaves = _names.flatmap(
    lambda name: st.one_of(
        st.builds(Relation, st.just(name), st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), _values(name)),
        st.builds(OneOf, st.just(name), st.lists(_values(name), min_size=1, max_size=3).map(tuple)),
        st.builds(IsNull, st.just(name)),
        st.builds(Match, st.just(PRECISION), _texts, st.booleans()),
    )
)
_conditions = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(All, st.lists(inner, min_size=2, max_size=3).map(tuple)),
        st.builds(Any, st.lists(inner, min_size=2, max_size=3).map(tuple)),
    ),
    max_leaves=8,
)


def written(condition: Condition) -> str:
    """A condition as text, with every part in parentheses."""
    match condition:
        case All(parts):
            return " AND ".join(f"({written(part)})" for part in parts)
        case Any(parts):
            return " or ".join(f"({written(part)})" for part in parts)
        case Not(inner):
            return f"NOT ({written(inner)})"
        case IsNull(name):
            return f"{_name(name)} is null"
        case Match(name, pattern, ignore_case):
            return f"{_name(name)} {'ILIKE' if ignore_case else 'like'} {_literal(pattern)}"
        case OneOf(name, values):
            return f"{_name(name)} IN ({', '.join(map(_literal, values))})"
        case Relation(name, operator, value):
            return f"{_name(name)}{operator}{_literal(value)}"


def _name(name: Name) -> str:
    return f'axis."{name.name}"' if name.kind is Kind.axis else name.name


def _literal(value: object) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


@given(_conditions)
def test_what_is_written_is_what_is_read(condition: Condition) -> None:
    text = written(condition)
    if len(text) <= MAX_LENGTH:
        assert parse_filter(text, NAMES) == condition


def test_orders() -> None:
    default = Order("seed", True)
    assert parse_order(None, NAMES, default=default) == (default,)
    assert parse_order("  ", NAMES, default=default) == (default,)
    assert parse_order("accuracy", NAMES, default=default) == (Order("accuracy", False),)
    assert parse_order("accuracy DESC, seed", NAMES, default=default) == (
        Order("accuracy", True),
        Order("seed", False),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acuracy", "did you mean 'accuracy'"),
        ("accuracy down", "asc or desc"),
        ("accuracy,", "separated by commas"),
        ("accuracy, seed, accuracy desc", "'accuracy' is given twice"),
    ],
)
def test_what_no_list_is_ordered_by(text: str, said: str) -> None:
    with pytest.raises(FilterError, match=said):
        parse_order(text, NAMES, default=Order("seed", True))


@pytest.mark.parametrize("text", ["precision = '\0'", 'precision like "%\0"', "axis.'\0' is null"])
def test_nul_is_refused_because_postgresql_has_no_such_text(text: str) -> None:
    with pytest.raises(FilterError, match="NUL"):
        parse_filter(text, NAMES)
