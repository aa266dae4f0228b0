"""The text of a study: parts, what they take from each other, and one line for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from service.config.document import SpecError, parse
from service.specs.study import arms, parse_study, tuned_document

DISTILLATION = """
study: distillation
parts:
  student:
    task: {name: imdb}
    model: {name: tiny, teacher: {run: teacher/seed}}
    seeds: [0, 1]
  teacher: {task: {name: imdb}, model: {name: mini}, seeds: [0, 1, 2]}
  shared:
    task: {name: imdb}
    search: {axes: {model.teacher: [null, {best: teacher}]}}
    seeds: [5]
"""
TUNED = """
study: optimizers
parts:
  tuning:
    task: {name: imdb}
    search: {axes: {optimizer.name: [adamw, adan], optimizer.learning_rate: [1.0e-4, 1.0e-3, 1.0e-2]}}
    seeds: [0, 1]
  final: {tuned: tuning, over: [optimizer.learning_rate], seeds: [10, 11]}
"""


def lines(text: str, **changes: Any) -> list[str]:
    document = parse(text.encode())
    for path, value in changes.items():
        section: Any = document
        *sections, last = path.split("__")
        for name in sections:
            section = section[name]
        section[last] = value
    with pytest.raises(SpecError) as caught:
        parse_study(document)
    return caught.value.lines()


def test_parts_need_the_parts_that_they_name_in_any_order() -> None:
    study = parse_study(parse(DISTILLATION.encode()))
    assert {name: part.needs for name, part in study.parts.items()} == {
        "student": ("teacher",),
        "teacher": (),
        "shared": ("teacher",),
    }
    assert [spec.name for _, spec in study.outlines.values()] == [
        "distillation-student",
        "distillation-teacher",
        "distillation-shared",
    ]


def test_models_are_written_in_where_they_are_named() -> None:
    study = parse_study(parse(DISTILLATION.encode()))
    texts = {True: "run:0=7,1=8", False: "run:9"}
    student = study.parts["student"].with_models(lambda source: texts[source.by_seed])
    assert student["model"]["teacher"] == "run:0=7,1=8"
    shared = study.parts["shared"].with_models(lambda source: texts[source.by_seed])
    assert shared["search"]["axes"]["model.teacher"] == [None, "run:9"]
    assert study.parts["shared"].document["search"]["axes"]["model.teacher"] == [None, {"best": "teacher"}]


def test_a_tuned_part_links_the_values_of_each_arm() -> None:
    study = parse_study(parse(TUNED.encode()))
    _, tuning = study.outlines["tuning"]
    found = arms(tuning, ["optimizer.learning_rate"])
    assert [len(cells) for cells in found.values()] == [3, 3]
    adamw, adan = found.values()
    document = tuned_document(study.parts["final"], study.outlines["tuning"][0], [adamw[0], adan[2]])
    assert document["search"] == {
        "together": [{"optimizer.name": ["adamw", "adan"], "optimizer.learning_rate": [1e-4, 1e-2]}]
    }
    assert (document["seeds"], document["name"]) == ([10, 11], "optimizers-final")
    _, final = study.outlines["final"]
    assert final.run_count() == 4


def test_the_fresh_seeds_of_a_tuned_part_have_teachers_too() -> None:
    text = TUNED.replace("    seeds: [0, 1]", "    model: {teacher: {run: teacher/seed}}\n    seeds: [0, 1]")
    teacher = "  teacher: {task: {name: imdb}, seeds: [0, 1, 10]}\n"
    assert lines(text + teacher) == [
        "parts.final.seeds: part teacher has no seed 11, for run: teacher/seed; list the same seeds in both"
    ]
    study = parse_study(parse((text + teacher.replace("10]", "10, 11]")).encode()))
    assert study.parts["final"].needs == ("teacher", "tuning")


def test_values_that_are_tried_for_one_arm_alone_may_be_linked_too() -> None:
    text = TUNED.replace(
        "axes: {optimizer.name: [adamw, adan], optimizer.learning_rate: [1.0e-4, 1.0e-3, 1.0e-2]}",
        "together: [{optimizer.name: [adamw, adamw, adan, adan], optimizer.learning_rate: [1.0e-5, 1.0e-4, "
        "1.0e-3, 1.0e-2]}]",
    )
    _, tuning = parse_study(parse(text.encode())).outlines["tuning"]
    assert [
        [cell["optimizer.learning_rate"] for cell in cells]
        for cells in arms(tuning, ["optimizer.learning_rate"]).values()
    ] == [[1e-5, 1e-4], [1e-3, 1e-2]]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"study": ""},
            'study: "": use 1 to 36 characters of A-Z a-z 0-9 . _ - and spaces, and begin with',
        ),
        ({"part": {}}, "part: unknown key; did you mean 'parts'?"),
        ({"parts": {}}, "parts: {}: dictionary should have at least 1 item"),
        ({"parts__teacher": 3}, "parts.teacher: 3: input should be a section of fields"),
        (
            {"parts__student__model__teacher": {"run": "teacher"}},
            "parts.student.model.teacher.run: 'teacher' has no seed; write PART/seed for its run of the same "
            "seed, or use best",
        ),
        (
            {"parts__student__model__teacher": {"best": "teachr"}},
            "parts.student.model.teacher: 'teachr' is not a part of the study; did you mean 'teacher'?",
        ),
        (
            {"parts__student__model__teacher": {"bst": "teacher"}},
            'parts.student.model.teacher: {"bst": "teacher"}: input should be text; or, in a study, {best: '
            "PART} or {run: PART/seed}",
        ),
        (
            {"parts__teacher__model": {"teacher": {"best": "student"}}},
            "parts: parts wait for each other: ",
        ),
        (
            {"parts__student__seeds": [0, 4, 5]},
            "parts.student.seeds: part teacher has no seed 4, 5, for run: teacher/seed; list the same seeds "
            "in both",
        ),
        (
            {"parts__teacher__search": {"axes": {"precision": ["fp32", "bf16"]}}},
            "parts.student: run: teacher/seed is ambiguous: part teacher has 2 cells; use best: "
            "teacher, or a part with one cell",
        ),
        (
            {"parts__student__project": "other"},
            "parts.student.project: 'other' is not the study's, default; set project once, in the study",
        ),
        ({"parts__student__batch": {"size": 3}}, "parts.student.batch.size: unknown key; "),
    ],
)
def test_a_mistake_is_one_line(changes: dict[str, Any], line: str) -> None:
    (found,) = lines(DISTILLATION, **changes)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"parts__final__seeds": [1, 2]},
            "parts.final.seeds: part tuning chooses by seed 1 too, which flatters the chosen; use others",
        ),
        (
            {"parts__final__over": ["optimizer.learning_rat"]},
            "parts.final.over: 'optimizer.learning_rat' is not an axis of part tuning; did you mean "
            "'optimizer.learning_rate'?",
        ),
        (
            {"parts__final__over": ["optimizer.learning_rate", "optimizer.name"]},
            "parts.final.over: part tuning has no axis besides these; its values would be the arms to "
            "compare",
        ),
        (
            {
                "parts__tuning__search__axes": {
                    "optimizer.name": ["adamw", "adan"],
                    "optimizer.learning_rate": [1e-3],
                }
            },
            "parts.final.over: part tuning has only one value of optimizer.learning_rate; add others, or "
            "leave it out",
        ),
        (
            {
                "parts__tuning__search": {
                    "axes": {"optimizer.name": ["adamw", "adan"], "optimizer.learning_rate": [1e-4, 1e-3]},
                    "when": {"optimizer.learning_rate": {"optimizer.name": ["adan"]}},
                }
            },
            "parts.final.tuned: the arms of part tuning have different budgets "
            '(1 for {"optimizer.name":"adamw"}, 2 for {"optimizer.name":"adan"} cells); try equally many '
            "values for each",
        ),
        (
            {"parts__tuning__search__name": "random", "parts__tuning__search__samples": 4},
            "parts.final.tuned: part tuning has search.name: random, which gives arms different budgets; "
            "use grid",
        ),
        (
            {"parts__again": {"tuned": "final", "over": ["optimizer.name"], "seeds": [20]}},
            "parts.again.tuned: part final is tuned itself; name the part that tuned it, tuning",
        ),
        (
            {"parts__final__tuned": "tunig"},
            "parts.final.tuned: 'tunig' is not a part of the study; did you mean 'tuning'?",
        ),
        ({"parts__final__precision": "bf16"}, "parts.final.precision: unknown key; known: "),
        (
            {"parts__final__over": []},
            "parts.final.over: []: list should have at least 1 item",
        ),
    ],
)
def test_a_mistake_in_a_tuned_part_is_one_line(changes: dict[str, Any], line: str) -> None:
    (found,) = lines(TUNED, **changes)
    assert found.startswith(line)


def test_mistakes_of_several_parts_are_found_together() -> None:
    found = lines(DISTILLATION, parts__student__batch={"size": 3}, parts__teacher__seeds=[0, 0])
    assert [line.partition(":")[0] for line in found] == ["parts.teacher.seeds"]
    found = lines(DISTILLATION, parts__student__batch={"size": 3}, parts__shared__precision="fp3")
    assert [line.partition(":")[0] for line in found] == [
        "parts.student.batch.size",
        "parts.shared.precision",
    ]


def test_repeats_of_a_seed_are_no_further_cells() -> None:
    document = parse(DISTILLATION.encode())
    document["parts"]["teacher"]["repeats"] = 2  # type: ignore[index]
    assert parse_study(document).outlines["teacher"][1].run_count() == 6
    tuned = parse(TUNED.encode())
    tuned["parts"]["final"]["repeats"] = 3  # type: ignore[index]
    assert parse_study(tuned).outlines["final"][1].repeats == 3
