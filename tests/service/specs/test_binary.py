"""Specs of binary encoders and of stages: what is an axis, and what is refused at submission."""

from __future__ import annotations

import pytest

from service.config.document import SpecError
from service.specs.experiment import json_schema, validate
from service.specs.fields import axis_names

MINIMAL = {"name": "bits", "task": {"name": "imdb"}}


def refused(document):
    with pytest.raises(SpecError) as error:
        list(validate({**MINIMAL, **document}).runs())
    return list(error.value.problems)


def test_all_choices_are_axes():
    names = {name.removeprefix("model.binary.") for name in axis_names() if name.startswith("model.binary.")}
    assert {"weights", "activations", "activation_bits", "derivative", "sharpness.to", "embeddings"} <= names
    spec = validate(
        {
            **MINIMAL,
            "model": {"encoder": "binary", "binary": {"activations": "elastic"}},
            "search": {
                "axes": {
                    "model.binary.weights": ["sign", "ternary"],
                    "model.binary.activation_bits": [1, 2, 4, 8],
                    "model.binary.derivative": ["identity", "clipped", "polynomial", "tanh", "swish"],
                    "model.binary.sharpness.to": [5.0, 10.0],
                }
            },
        }
    )
    *_, last = spec.runs()
    assert (spec.run_count(), last.spec.model.binary.derivative) == (2 * 4 * 5 * 2, "swish")
    assert last.spec.model.binary.sharpness.model_dump() == {"from": 1.0, "to": 10.0}


@pytest.mark.parametrize("bits", [[3], [1, 3]])
def test_a_cell_out_of_range_is_refused_with_its_field(bits):
    problems = refused(
        {
            "model": {"encoder": "binary", "binary": {"activations": "elastic"}},
            "search": {"axes": {"model.binary.activation_bits": bits}},
        }
    )
    assert any("activation_bits 3 is not supported; use one of 1, 2, 4, 8" in one.message for one in problems)


def test_the_published_schema_says_what_each_choice_is():
    fields = json_schema()["$defs"]["Binary"]["properties"]
    assert fields["derivative"]["enum"] == ["identity", "clipped", "polynomial", "tanh", "swish"]
    assert "Bi-Real Net" in fields["derivative"]["description"]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"model": {"encoder": "binary"}, "precision": "bf16"}, "computes in fp32, tf32, not bf16"),
        ({"model": {"encoder": "binary", "compile": True}}, "compile does not work with encoder binary"),
        (
            {"model": {"encoder": "binary"}, "parallel": {"strategy": "pipeline", "workers": 2}},
            "cannot be divided into pipeline stages",
        ),
        ({"model": {"encoder": "binary"}, "hardware": "tpu-v5e"}, "binary runs on cpu, cuda"),
        (
            {"stages": [{}, {"model": {"encoder": "binary"}}], "hardware": "tpu-v5e"},
            "stage 2: model.encoder binary runs on cpu, cuda",
        ),
        ({"stages": [{}, {"model": {"name": "mini"}}]}, "a stage starts from the best checkpoint"),
        ({"stages": [{}]}, "at least 2"),
        ({"stages": [{}, {"modle": {}}]}, "stage 2 changes modle"),
    ],
)
def test_mistakes_are_refused_in_one_line(document, reason):
    problems = refused(document)
    assert any(reason in problem.message for problem in problems), problems
    assert all("\n" not in problem.message for problem in problems)


def test_a_chain_needs_no_teacher_of_its_own():
    spec = validate(
        {
            **MINIMAL,
            "distillation": {"hidden_weight": 1.0},
            "length": {"epochs": 2},
            "stages": [{"length": {"epochs": 1}}, {"model": {"encoder": "binary"}}],
        }
    )
    assert spec.steps_of(160) == (1 + 2) * (160 // spec.batch.global_size)
