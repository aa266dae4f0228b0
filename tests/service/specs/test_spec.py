"""The spec: what is accepted, what each bad input is told, and what the hash depends on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from service.config.document import MAX_BYTES, SpecError, parse
from service.config.suggestions import ALIASES
from service.specs.experiment import ExperimentSpec, json_schema, validate
from service.specs.fields import SpecFields, axis_names, canonical_json, field_names
from trainers.metrics import DECLARED

MINIMAL = {"name": "a", "task": {"name": "imdb"}}


def problems(text: str | bytes) -> list[tuple[str, str, str]]:
    """Problems of a spec's text as (type, path, message); an empty list when it is accepted."""
    raw = text.encode() if isinstance(text, str) else text
    try:
        list(validate(parse(raw)).runs())
    except SpecError as error:
        return [(problem.type, problem.path, problem.message) for problem in error.problems]
    return []


def only_problem(extra: str) -> tuple[str, str, str]:
    """The single problem of the minimal spec with `extra` lines."""
    found = problems(f"name: a\ntask: {{name: imdb}}\n{extra}\n")
    assert len(found) == 1, found
    return found[0]


def test_minimal_spec_is_accepted_and_has_one_run() -> None:
    spec = validate(MINIMAL)
    [run] = spec.runs()
    assert (run.index, run.seed, run.point) == (0, 0, {})
    assert run.spec == spec


def test_json_is_accepted_too() -> None:
    assert validate(parse(json.dumps(MINIMAL).encode())) == validate(MINIMAL)


def test_scientific_notation_is_a_number() -> None:
    spec = validate(parse(b"name: a\ntask: {name: imdb}\noptimizer: {learning_rate: 1e-4}"))
    assert spec.optimizer.learning_rate == 1e-4


def test_dates_and_words_like_on_stay_strings() -> None:
    assert validate(parse(b"name: 2026-01-01\ntask: {name: imdb}")).name == "2026-01-01"
    kind, path, _ = only_problem("deterministic: on")
    assert (kind, path) == ("wrong-type", "deterministic")


@pytest.mark.parametrize(
    ("extra", "kind", "path", "says"),
    [
        (
            "pool: GPUs!",
            "invalid-value",
            "pool",
            "use 1 to 63 characters of a-z 0-9 . _ -, and begin with one of a-z 0-9, such as gpus",
        ),
        ("optimzer: {}", "unknown-key", "optimzer", "did you mean 'optimizer'?"),
        ("batch: {global_sice: 8}", "unknown-key", "batch.global_sice", "did you mean 'global_size'?"),
        ("model: {student: mini}", "unknown-key", "model.student", "it is now model.name"),
        (
            "search: {axes: {model.student: [mini]}}",
            "unknown-axis",
            "search.axes.model.student",
            "it is now model.name",
        ),
        ("batch: {global_size: '16'}", "wrong-type", "batch.global_size", '"16"'),
        ("batch: {global_size: 0}", "out-of-range", "batch.global_size", "greater than or equal to 1"),
        ("batch: {global_size: " + "9" * 5000 + "}", "wrong-type", "batch.global_size", "Infinity"),
        ("optimizer: {learning_rate: .nan}", "not-finite", "optimizer.learning_rate", "NaN"),
        ("optimizer: {learning_rate: .inf}", "not-finite", "optimizer.learning_rate", "Infinity"),
        ("optimizer: {learning_rate: 1e400}", "not-finite", "optimizer.learning_rate", "finite"),
        ("optimizer: {weight_decay: 99999999999999999999}", "out-of-range", "optimizer.weight_decay", "10"),
        ("precision: fp16", "precision-not-on-hardware", "precision", "cpu does not support fp16"),
        ("precision: fp64", "invalid-value", "precision", "'fp32'"),
        ("length: {epochs: 1, steps: 3}", "invalid-value", "length", "exactly one"),
        ("optimizer: {betas: [0.9]}", "invalid-value", "optimizer", "takes 2"),
        ("optimizer: {no_prox: true}", "invalid-value", "optimizer", "belongs to adan"),
        (
            "optimizer: {masters: split}",
            "invalid-value",
            "optimizer",
            "masters split belongs to adan, not adamw",
        ),
        (
            "optimizer: {moments: bf16}",
            "invalid-value",
            "optimizer",
            "moments bf16 belongs to adan, not adamw",
        ),
        ("optimizer: {moments: fp16}", "invalid-value", "optimizer.moments", "'fp32' or 'bf16'"),
        (
            "optimizer: {name: adan, masters: split}",
            "invalid-value",
            "",
            "completes parameters stored in bf16, but these are stored in fp32; set precision: bf16",
        ),
        (
            "optimizer: {warmup_steps: 10, warmup_fraction: 0.1}",
            "invalid-value",
            "optimizer",
            "warmup_steps 10 and warmup_fraction 0.1 are both set; remove one",
        ),
        (
            "optimizer: {warmup_steps: 10}\nlength: {steps: 10}",
            "invalid-value",
            "",
            "warmup_steps 10 leaves no step of length.steps 10",
        ),
        (
            "evaluation: {every_steps: 10, every_epochs: 0.5}",
            "invalid-value",
            "evaluation",
            "every_epochs 0.5 and every_steps 10 are both set; remove one of them",
        ),
        ("evaluation: {every_steps: 0}", "out-of-range", "evaluation.every_steps", "1"),
        (
            "optimizer: {schedule: cosin}",
            "invalid-value",
            "optimizer.schedule",
            "'linear', 'constant', 'cosine', 'polynomial', 'step', 'warmup_stable_decay' or 'plateau'",
        ),
        (
            "optimizer: {schedule: step, schedule_power: 2}",
            "invalid-value",
            "optimizer",
            "schedule_power belongs to polynomial, not step; remove optimizer.schedule_power or set "
            "optimizer.schedule: polynomial",
        ),
        (
            "optimizer: {schedule_floor: 0.1}",
            "invalid-value",
            "optimizer",
            "schedule_floor belongs to cosine, polynomial, warmup_stable_decay, plateau, not linear",
        ),
        ("optimizer: {schedule: cosine, schedule_floor: 1}", "out-of-range", "optimizer.schedule_floor", "1"),
        (
            "optimizer: {schedule: step, schedule_factor: 1}",
            "out-of-range",
            "optimizer.schedule_factor",
            "less than 1",
        ),
        (
            "optimizer: {schedule: step, schedule_step_epochs: 0}",
            "out-of-range",
            "optimizer.schedule_step_epochs",
            "greater than 0",
        ),
        (
            "optimizer: {schedule: plateau, schedule_patience: -1}",
            "out-of-range",
            "optimizer.schedule_patience",
            "0",
        ),
        (
            "optimizer: {schedule: warmup_stable_decay, schedule_decay_fraction: 0.95}",
            "invalid-value",
            "optimizer",
            "schedule_decay_fraction 0.95 and a warm-up of 0.1 are more than all steps; lower one of them",
        ),
        ("optimizer: {layer_decay: 0}", "out-of-range", "optimizer.layer_decay", "greater than 0"),
        ("optimizer: {layer_decay: 1.1}", "out-of-range", "optimizer.layer_decay", "1"),
        (
            "model: {frozen: [pooler]}",
            "invalid-value",
            "model.frozen",
            "'pooler' is not a part of a model; list embeddings and numbers of layers, such as",
        ),
        (
            "model: {frozen: [0, 0]}",
            "invalid-value",
            "model.frozen",
            "0 is listed twice; list each part once",
        ),
        (
            "model: {frozen: [0]}\nparallel: {strategy: pipeline, workers: 2}",
            "invalid-value",
            "",
            "set parallel.strategy: single or ddp, or model.frozen: []",
        ),
        (
            "model: {frozen: [0]}\nlength: {steps: 0}",
            "invalid-value",
            "",
            "model.frozen [0] leaves parts out of training; remove model.frozen, or raise length.steps",
        ),
        ("model: {cuda_graphs: true}", "invalid-value", "model", "set model.encoder to packed or fused"),
        (
            "model: {encoder: fused, cuda_graphs: true}",
            "invalid-value",
            "model.cuda_graphs",
            "model.cuda_graphs true is not supported on hardware cpu; use false",
        ),
        ("parallel: {workers: 2}", "invalid-value", "parallel", "strategy: ddp"),
        ("parallel: {strategy: ddp, workers: 3}", "invalid-value", "", "such as 18"),
        ("parallel: {strategy: ddp, workers: {min: 4, max: 2}}", "invalid-value", "parallel", "lower min"),
        ("parallel: {strategy: ddp, workers: {min: 0, max: 2}}", "invalid-value", "parallel", "workers.min"),
        ("parallel: {strategy: ddp, workers: {min: 1}}", "invalid-value", "parallel", "min and max"),
        ("parallel: {workers: {min: 1, max: 1}}", "invalid-value", "parallel", "strategy: ddp"),
        ("parallel: {strategy: ddp, workers: {min: 5, max: 7}}", "invalid-value", "", "from 5 to 7 divides"),
        ("batch: {micro_size: 3}", "invalid-value", "", "divisor of 16"),
        ("batch: {global_size: most}", "invalid-value", "batch.global_size", "should be 'largest'"),
        *(
            (
                text,
                "invalid-value",
                "",
                f"batch.global_size largest is what fits in one pass of training, but {what}; set "
                f"batch.global_size to a number, or change {what.split()[0]}",
            )
            for text, what in (
                (
                    "batch: {global_size: largest, micro_size: 4}",
                    "batch.micro_size 4 divides a step into several passes",
                ),
                (
                    "batch: {global_size: largest, micro_tokens: 4096}",
                    "batch.micro_tokens 4096 divides a step into several passes",
                ),
                (
                    "batch: {global_size: largest}\nparallel: {strategy: pipeline, workers: 2}",
                    "parallel.strategy pipeline divides a step into several passes",
                ),
                (
                    "batch: {global_size: largest}\nparallel: {strategy: ddp, workers: {min: 1, max: 2}}",
                    "parallel.min_workers 1 changes the workers between attempts",
                ),
                ("batch: {global_size: largest}\nlength: {steps: 0}", "length.steps 0 trains nothing"),
            )
        ),
        (
            "batch: {global_size: largest, per_worker_size: 4}",
            "invalid-value",
            "batch",
            "per_worker_size 4 makes a global batch of 4, but global_size is largest; remove one of them",
        ),
        (
            "batch: {global_size: largest}\nqueue: {share_device: true}",
            "invalid-value",
            "",
            "set queue.share_device: false, or batch.global_size to a number",
        ),
        ("hardware: A1000", "unknown-hardware", "hardware", "did you mean 'A100'?"),
        ("hardware: TPUv3", "invalid-value", "hardware", "torch-tpu, which starts at v4"),
        ("hardware: T4\nprecision: bf16", "precision-not-on-hardware", "precision", "fp32, fp16"),
        ("seeds: []", "out-of-range", "seeds", "at least 1"),
        ("seeds: [1, 1]", "invalid-value", "seeds", "twice"),
        ("search: {axes: {batch.global_size: []}}", "invalid-value", "search.axes", "is empty"),
        ("search: {axes: {precision: [fp32, fp32]}}", "invalid-value", "search.axes", "twice"),
        ("search: {axes: {batch.size: [2]}}", "unknown-axis", "search.axes.batch.size", "unknown field"),
        (
            "search: {axes: {queue.priority: [2]}}",
            "unknown-axis",
            "search.axes.queue.priority",
            "unknown field",
        ),
        ("search: {name: random}", "invalid-value", "search", "samples"),
        ("search: {otherwise: {precision: bf16}}", "invalid-value", "search", "no condition"),
        (
            "search: {axes: {log_every_steps: [1], precision: [fp32]}, "
            "when: {log_every_steps: {precision: [fp32]}}, otherwise: {log_every_steps: []}}",
            "invalid-value",
            "search",
            "otherwise of 'log_every_steps' is empty; list at least one value or remove it",
        ),
        ("distillation: {temperature: 3}", "invalid-value", "distillation", "without a teacher"),
        ("search: {axes: {precision: 5}}", "invalid-value", "search.axes", "list its values, such as [5]"),
        ("search: {axes: {precision: low}}", "invalid-value", "search.axes", 'such as ["low"]'),
        ("search: {axes: {precision: }}", "invalid-value", "search.axes", "such as [null]"),
        (
            "search: {axes: {batch: [{global_size: 8}]}}",
            "invalid-value",
            "search.axes",
            'has the value {"global_size": 8}, but a section cannot be an axis value',
        ),
        (
            "search: {together: [{parallel.workers: [1, 2, 4], batch.global_size: [16, 32]}]}",
            "invalid-value",
            "search.together",
            "there are 3 of parallel.workers and 2 of batch.global_size; list equally many of each",
        ),
        (
            "search: {together: [{parallel.workers: [1, 2]}]}",
            "invalid-value",
            "search.together",
            "an entry links parallel.workers; list two or more fields in it, or move it to search.axes",
        ),
        (
            "search: {together: [{seeds: [1], precision: [bf16]}]}",
            "unknown-axis",
            "search.together.0.seeds",
            "unknown field 'seeds'",
        ),
        (
            "search: {together: [{precision: [fp32, fp32], batch.global_size: [8, 8]}]}",
            "invalid-value",
            "search.together",
            "precision+batch.global_size lists a combination twice",
        ),
        (
            "search: {axes: {precision: [fp32]}, together: [{precision: [fp32], batch.global_size: [8]}]}",
            "invalid-value",
            "search",
            "'precision' is in two axes; keep it in one of search.axes and search.together",
        ),
        (
            "search: {axes: {log_every_steps: [1]}, when: {precision: {log_every_steps: [1]}}, "
            "together: [{precision: [fp32], batch.global_size: [8]}]}",
            "invalid-value",
            "search",
            "when has 'precision', which is linked to others",
        ),
        (
            "parallel: {strategy: ddp, workers: 2}\nbatch: {per_worker_size: 16, global_size: 16}",
            "invalid-value",
            "batch",
            "per_worker_size 16 makes a global batch of 32, but global_size is 16; remove one of them",
        ),
        (
            "parallel: {strategy: ddp, workers: 2, min_workers: 1}\nbatch: {per_worker_size: 16}",
            "invalid-value",
            "batch",
            "set batch.global_size instead",
        ),
        (
            "batch: {per_worker_size: 0}",
            "out-of-range",
            "batch.per_worker_size",
            "greater than or equal to 1",
        ),
        (
            "parallel: {strategy: ddp, workers: 2}\nbatch: {per_worker_size: 65536}",
            "invalid-value",
            "batch",
            "more than 65536; lower it, or use fewer workers",
        ),
        ("model: {teacher: t}\ndistillation: {layer_map: []}", "out-of-range", "distillation.layer_map", "1"),
        (
            "model: {name: tiny, teacher: t}\ndistillation: {layer_map: [0, 1, 2]}",
            "invalid-value",
            "distillation.layer_map",
            "distillation.layer_map has 3 layers, but the student has 2",
        ),
        (
            "model: {name: hub:x, layers: [0, 2], teacher: t}\ndistillation: {layer_map: [0, 1, 2]}",
            "invalid-value",
            "distillation.layer_map",
            "distillation.layer_map has 3 layers, but the student has 2",
        ),
        (
            "model: {teacher: t}\ndistillation: {teacher_precision: fp16}",
            "precision-not-on-hardware",
            "distillation.teacher_precision",
            "distillation.teacher_precision fp16 needs a GPU",
        ),
        ("name: b", "not-yaml", "", "given twice"),
        ("batch: 3", "wrong-type", "batch", "3"),
        ("model: &x {}\nbatch: *x", "yaml-alias", "", "alias *x"),
    ],
)
def test_a_bad_field_gets_one_line_that_says_what_to_do(extra: str, kind: str, path: str, says: str) -> None:
    found = only_problem(extra)
    assert found[:2] == (kind, path)
    assert says in found[2]
    assert "\n" not in found[2]


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("{name: tariff}", "task tariff has no dataset on the hub; set task.path to a folder or file"),
        ("{name: imdb, path: ''}", "the path is empty"),
    ],
)
def test_a_task_without_data_is_refused(task: str, says: str) -> None:
    [(_, path, message)] = problems(f"name: a\ntask: {task}")
    assert path == "task.path"
    assert says in message


def test_data_is_judged_by_grid_point_where_it_is_an_axis() -> None:
    [(_, path, message)] = problems(
        "name: a\ntask: {name: imdb}\nsearch: {axes: {task.name: [imdb, tariff]}}"
    )
    assert path == "task.path"
    assert message.startswith('grid point {"task.name":"tariff"}: task tariff has no dataset')
    assert not problems("name: a\ntask: {name: tariff}\nsearch: {axes: {task.path: [one.csv, two.csv]}}")
    linked = "{task.path: [old, new], task.detokenise: [penn_treebank, none]}"
    assert not problems(f"name: a\ntask: {{name: mlm}}\nsearch: {{together: [{linked}]}}")


def test_a_half_precision_teacher_may_be_compared_over_hardware() -> None:
    assert not problems(
        "name: a\ntask: {name: imdb}\nmodel: {teacher: t}\ndistillation: {teacher_precision: fp16}\n"
        "search: {axes: {hardware: [cpu, A100]}}"
    )


def test_all_problems_are_named_at_once() -> None:
    found = problems("name: a\ntask: {name: imdb, pth: x}\noptimzer: {}\nprecision: fp64")
    assert [kind for kind, _, _ in found] == ["unknown-key", "invalid-value", "unknown-key"]


def test_sequences_of_mlm_have_a_length_of_their_own() -> None:
    grid = {"search": {"axes": {"precision": ["fp32", "bf16"]}}}
    for name, usual in (("mlm", 128), ("imdb", 512)):
        spec = validate({"name": "a", "task": {"name": name}, **grid})
        assert {run.spec.task.max_length for run in spec.runs()} == {usual}
    assert validate({"name": "a", "task": {"name": "mlm", "max_length": 512}}).task.max_length == 512


def test_a_length_that_varies_only_for_some_is_the_usual_one_for_the_others() -> None:
    axes = {"precision": ["fp32", "bf16"], "task.max_length": [64, 32]}
    search = {"axes": axes, "when": {"task.max_length": {"precision": ["bf16"]}}}
    spec = validate({"name": "a", "task": {"name": "mlm"}, "search": search})
    assert [run.spec.task.max_length for run in spec.runs()] == [128, 64, 32]


def test_an_unknown_task_is_the_only_problem() -> None:
    [(kind, path, message)] = problems("name: a\ntask: {name: imbd}")
    assert (kind, path) == ("invalid-value", "task.name")
    assert "'imdb'" in message


@pytest.mark.parametrize(
    ("extra", "kind", "path"),
    [
        ("precision: fp8x\nsearch: {axes: {precision: [fp32, bf16]}}", "invalid-value", "precision"),
        (
            "batch: {global_size: 0}\nsearch: {axes: {batch.global_size: [8]}}",
            "out-of-range",
            "batch.global_size",
        ),
        (
            "optimizer: {learning_rate: -1}\nsearch: {name: random, samples: 2, "
            "axes: {optimizer.learning_rate: {low: 1e-5, high: 1e-3}}}",
            "out-of-range",
            "optimizer.learning_rate",
        ),
        ("hardware: A1000\nsearch: {axes: {hardware: [cpu]}}", "unknown-hardware", "hardware"),
        (
            "parallel: {workers: 0}\n"
            "search: {together: [{parallel.workers: [1, 2], batch.global_size: [8, 16]}]}",
            "out-of-range",
            "parallel.workers",
        ),
    ],
)
def test_a_value_is_checked_though_an_axis_replaces_it(extra: str, kind: str, path: str) -> None:
    assert only_problem(extra)[:2] == (kind, path)


def test_a_value_that_an_axis_replaces_is_not_combined_with_others() -> None:
    extra = "parallel: {strategy: single, workers: 2}\nsearch: {axes: {parallel.strategy: [ddp]}}"
    assert not problems(f"name: a\ntask: {{name: imdb}}\n{extra}\n")


@pytest.mark.parametrize(
    ("extra", "path", "says"),
    [
        ("learning_rate: 1e-5", "learning_rate", "did you mean 'optimizer.learning_rate'?"),
        ("priority: 75", "priority", "did you mean 'queue.priority'?"),
        ("batch: {size: 8}", "batch.size", "did you mean 'global_size'?"),
        ("model: {learning_rate: 1}", "model.learning_rate", "did you mean 'optimizer.learning_rate'?"),
        ("search: {axes: {lr: [1e-5]}}", "search.axes.lr", "did you mean 'optimizer.learning_rate'?"),
        ("search: {axes: {batch.size: [8]}}", "search.axes.batch.size", "did you mean 'batch.global_size'?"),
        ("search: {method: bayes}", "search.method", "did you mean 'name'?"),
        ("num_train_epochs: 3", "num_train_epochs", "did you mean 'length.epochs'?"),
        ("fp16: true", "fp16", "did you mean 'precision'?"),
        ("per_device_train_batch_size: 8", "per_device_train_batch_size", "did you mean 'batch.micro_size'?"),
        ("searcher: {metric: loss}", "searcher", "did you mean 'search'?"),
        ("optimizer: {lr: 1e-5}", "optimizer.lr", "did you mean 'learning_rate'?"),
        ("optimizer: {power: 2}", "optimizer.power", "did you mean 'schedule_power'?"),
        ("optimizer: {zzz: 1}", "optimizer.zzz", "known: betas, eps, implementation, "),
    ],
)
def test_an_unknown_name_is_answered_by_meaning_then_by_spelling(extra: str, path: str, says: str) -> None:
    _, found, message = only_problem(extra)
    assert found == path
    assert says in message


@pytest.mark.parametrize("extra", ["qqqq: 1", "optimizer: {zzz: 1}", "search: {axes: {zzz: [1]}}"])
def test_a_list_of_names_is_never_cut(extra: str) -> None:
    assert "..." not in only_problem(extra)[2]


def test_every_alias_means_a_field_of_the_spec_or_a_figure() -> None:
    known = {*field_names(), *SpecFields.model_fields, *DECLARED}
    assert {name for names in ALIASES.values() for name in names} <= known
    assert not ALIASES.keys() & {*field_names(), *SpecFields.model_fields}


def test_a_bad_axis_value_names_its_grid_point() -> None:
    [(kind, path, message)] = problems(
        "name: a\ntask: {name: imdb}\nsearch: {axes: {precision: [bf16, fp64]}}"
    )
    assert (kind, path) == ("invalid-value", "precision")
    assert 'grid point {"precision":"fp64"}' in message


def test_a_field_that_is_an_axis_takes_its_first_value() -> None:
    text = b"name: a\ntask: {name: imdb}\nparallel: {strategy: ddp}\nbatch: {global_size: 30}\n"
    spec = validate(parse(text + b"search: {axes: {parallel.workers: [3, 2]}}"))
    assert spec.parallel.workers == 3
    assert [run.spec.parallel.workers for run in spec.runs()] == [3, 2]


def test_repeats_run_each_seed_again_after_all_seeds() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    spec = validate({**MINIMAL, "seeds": [4, 7], "repeats": 3, "search": {"axes": axes}})
    runs = list(spec.runs())
    assert spec.run_count() == len(runs) == 12
    assert [(run.seed, run.repeat) for run in runs[:6]] == [(4, 0), (7, 0), (4, 1), (7, 1), (4, 2), (7, 2)]
    measured = sorted(runs, key=lambda run: run.place)
    blocks = [measured[at : at + 2] for at in range(0, 12, 2)]
    assert [{(run.seed, run.repeat) for run in block} for block in blocks] == [
        {(run.seed, run.repeat)} for run in runs[:6]
    ]
    assert all(len({run.cell for run in block}) == 2 for block in blocks)
    assert len({run.spec.sha256() for run in runs if run.point == {"precision": "fp32"}}) == 1
    assert runs[0].spec.repeats == 1


@pytest.mark.parametrize(
    ("extra", "path", "words"),
    [
        ("repeats: 0", "repeats", "0: input should be greater than or equal to 1"),
        ("repeats: 2.5", "repeats", "2.5: input should be a valid integer"),
        ("seeds: [1, 1]", "seeds", "set repeats to run it again"),
        ("seeds: [1, 2]\nrepeats: 9000", "", "shorten search.axes, repeats or seeds"),
        ("search: {axes: {repeats: [1, 2]}}", "search.axes.repeats", "repeats"),
        ("seeds: 3", "seeds", "3: input should be a list"),
        ("model: {teacher: {best: a}}", "model.teacher", "in a study, {best: PART} or {run: PART/seed}"),
        (
            "search: {axes: {optimizer.betas: [[0.9, 0.99], [0.9, 1.5]]}}",
            "optimizer.betas.1",
            "1.5: input should be less than 1",
        ),
    ],
)
def test_a_wrong_value_is_one_line(extra: str, path: str, words: str) -> None:
    _, found, message = only_problem(extra)
    assert found == path
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("base", [{}, {"layer_weights": None}, {"layer_weights": {"relation": [2.0]}}])
def test_fields_of_a_section_that_may_be_left_out_are_axes(base: dict[str, Any]) -> None:
    spec = validate(
        {
            **MINIMAL,
            "model": {"name": "mini", "teacher": "run:1"},
            "distillation": {"hidden_weight": 1.0, **base},
            "search": {"axes": {"distillation.layer_weights.hidden": [[1, 1, 1, 1], [0, 0, 1, 2]]}},
        }
    )
    found = [run.spec.distillation.layer_weights for run in spec.runs()]
    assert [of and of.hidden for of in found] == [(1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 1.0, 2.0)]
    assert {of and of.relation for of in found} == {(2.0,) if base.get("layer_weights") else (1.0,)}


def test_product_order_is_axes_as_listed_then_seeds_fastest() -> None:
    spec = validate(
        {
            **MINIMAL,
            "seeds": [7, 8],
            "search": {"axes": {"precision": ["fp32", "bf16"], "batch.global_size": [8, 16]}},
        }
    )
    runs = list(spec.runs())
    assert [run.index for run in runs] == list(range(8))
    assert [(run.point["precision"], run.point["batch.global_size"], run.seed) for run in runs[:5]] == [
        ("fp32", 8, 7),
        ("fp32", 8, 8),
        ("fp32", 16, 7),
        ("fp32", 16, 8),
        ("bf16", 8, 7),
    ]
    assert runs[0].cell == runs[1].cell != runs[2].cell
    assert runs[4].spec.precision == "bf16"
    assert not runs[4].spec.search.axes


def test_random_search_draws_distinct_points_and_repeats_itself() -> None:
    document = {
        **MINIMAL,
        "search": {
            "name": "random",
            "samples": 20,
            "seed": 3,
            "axes": {
                "optimizer.eps": [10.0**-n for n in range(1, 15)],
                "batch.global_size": list(range(1, 1001)),
            },
        },
    }
    spec = validate(document)
    first = [canonical_json(run.point) for run in spec.runs()]
    assert len(set(first)) == 20 == spec.run_count()
    assert first == [canonical_json(run.point) for run in validate(document).runs()]


def test_a_huge_grid_is_refused_before_it_is_expanded() -> None:
    axes = {
        name: list(range(1, 1001)) for name in ("batch.global_size", "task.train_examples", "log_every_steps")
    }
    started = time.perf_counter()
    found = problems(yaml.safe_dump({**MINIMAL, "search": {"axes": axes}}))
    assert [kind for kind, _, _ in found] == ["grid-too-large"]
    assert "1,000,000,000 runs, more than the limit of 10,000" in found[0][2]
    assert time.perf_counter() - started < 5  # Expanding it would take hours.


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"\xff\xfe", "not-utf-8"),
        (b"", "not-a-mapping"),
        (b"[1, 2]", "not-a-mapping"),
        (b"just words", "not-a-mapping"),
        (b"{{{{", "not-yaml"),
        (b"a: b: c", "not-yaml"),
        (b"[" * 100_000, "too-deep"),
        (b"[" + b"1," * 200_000 + b"1]", "too-large"),
        (b"a" * (MAX_BYTES + 1), "too-large"),
        (b"a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]", "yaml-alias"),
        (b"x: !!python/object/apply:os.system ['true']", "not-yaml"),
    ],
)
def test_a_hostile_document_is_refused_with_its_type(text: bytes, kind: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(parse(text))
    [problem] = caught.value.problems
    assert problem.type == kind
    assert "\n" not in str(problem)


@given(st.binary(max_size=300))
def test_any_bytes_are_accepted_or_refused_but_never_crash(text: bytes) -> None:
    try:
        validate(parse(text))
    except SpecError as error:
        assert all(problem.message and "\n" not in problem.message for problem in error.problems)


_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(ExperimentSpec.model_fields)), _json, max_size=4))
def test_any_value_in_any_field_is_accepted_or_refused_in_one_line(document: dict[str, object]) -> None:
    try:
        validate({**MINIMAL, **document})
    except SpecError as error:
        assert all(problem.type and "\n" not in str(problem) for problem in error.problems)


@pytest.mark.parametrize("strategies", [["single", "ddp"], ["ddp", "single"]])
def test_an_axis_that_only_some_strategies_have_leaves_the_others_as_they_are(strategies: list[str]) -> None:
    axes = {"parallel.strategy": strategies, "parallel.workers": [2, 4]}
    search = {"axes": axes, "when": {"parallel.workers": {"parallel.strategy": ["ddp"]}}}
    spec = validate({**MINIMAL, "search": search})
    parallel = {(str(plan.spec.parallel.strategy), plan.spec.parallel.workers) for plan in spec.runs()}
    assert parallel == {("single", 1), ("ddp", 2), ("ddp", 4)}
    assert spec.search.otherwise == {"parallel.workers": 1}
    assert validate(json.loads(spec.canonical_json())) == spec


SEARCHES: list[dict[str, Any]] = [
    {"name": "grid"},
    {"name": "random", "samples": 3},
    {"name": "asha"},
    {"name": "tpe", "samples": 3},
]


@pytest.mark.parametrize("backwards", [False, True], ids=["as-listed", "condition-first"])
@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: str(search["name"]))
def test_an_axis_left_out_keeps_the_specs_value_whatever_the_search(
    search: dict[str, Any], backwards: bool
) -> None:
    axes: dict[str, Any] = {"optimizer.name": ["adan", "adamw"], "optimizer.weight_decay": [0.01, 0.02]}
    if backwards:
        axes = dict(reversed(axes.items()))
    when = {"optimizer.weight_decay": {"optimizer.name": ["adan"]}}
    spec = validate(
        {**MINIMAL, "optimizer": {"weight_decay": 0.3}, "search": {**search, "axes": axes, "when": when}}
    )
    assert spec.at({"optimizer.name": "adamw"}).optimizer.weight_decay == 0.3
    with_decay = {"optimizer.name": "adan", "optimizer.weight_decay": 0.02}
    assert spec.at(with_decay).optimizer.weight_decay == 0.02
    assert len(list(spec.runs())) == 3
    assert validate(json.loads(spec.canonical_json())) == spec


@pytest.mark.parametrize("backwards", [False, True], ids=["as-listed", "condition-first"])
@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: str(search["name"]))
def test_workers_that_only_some_strategies_have_are_an_axis_of_any_search(
    search: dict[str, Any], backwards: bool
) -> None:
    axes: dict[str, Any] = {"parallel.strategy": ["pipeline", "single"], "parallel.workers": [2, 4]}
    if backwards:
        axes = dict(reversed(axes.items()))
    when = {"parallel.workers": {"parallel.strategy": ["pipeline"]}}
    spec = validate({**MINIMAL, "search": {**search, "axes": axes, "when": when}})
    assert len(list(spec.runs())) == 3
    assert spec.at({"parallel.strategy": "single"}).parallel.workers == 1


def test_how_an_optimizer_stores_things_and_its_warmup_are_axes() -> None:
    axes = {
        "optimizer.masters": ["fp32", "split"],
        "optimizer.moments": ["fp32", "bf16"],
        "optimizer.warmup_steps": [0, 10],
    }
    half = {"precision": "bf16", "numerics": {"parameters": "half"}, "optimizer": {"name": "adan"}}
    spec = validate({**MINIMAL, **half, "search": {"axes": axes}})
    kept = {(run.spec.optimizer.masters, run.spec.optimizer.moments) for run in spec.runs()}
    assert kept == {("fp32", "fp32"), ("fp32", "bf16"), ("split", "fp32"), ("split", "bf16")}
    in_fp16 = {**MINIMAL, **half, "hardware": "V100", "precision": "fp16"}
    plans = list(validate({**in_fp16, "search": {"axes": axes}}).runs())
    reasons = {plan.point["optimizer.masters"]: plan.refusal for plan in plans}
    assert reasons["fp32"] is None
    assert reasons["split"] is not None
    assert "these are stored in fp16" in reasons["split"].reason
    with pytest.raises(SpecError, match=r"optimizer\.masters split .* these are stored in fp16"):
        validate({**in_fp16, "search": {"axes": {**axes, "optimizer.masters": ["split"]}}})


@pytest.mark.parametrize(
    "axes", [{"length.steps": [100, 0]}, {"length.steps": {"low": 0, "high": 9}}, {"seed_only": None}]
)
@pytest.mark.parametrize(
    "search", [{"name": "asha", "samples": 2}, {"name": "random", "stop_diverging": 3.0}]
)
def test_searches_that_judge_training_are_refused_where_nothing_is_trained(
    axes: dict[str, Any], search: dict[str, Any]
) -> None:
    fixed = "seed_only" in axes
    axes = {"batch.global_size": [8, 16]} if fixed else axes
    document = {**MINIMAL, "search": {"samples": 2, **search, "axes": axes}}
    if fixed:
        document["length"] = {"steps": 0}
    with pytest.raises(SpecError, match=r"needs training runs, but length\.steps is 0"):
        validate(document)


def test_evaluation_in_a_format_that_a_gpu_lacks_is_refused_and_a_cpu_rounds() -> None:
    for word in ("fp16", "bf16"):
        validate({**MINIMAL, "numerics": {"evaluation": word}})
    validate({**MINIMAL, "hardware": "V100", "numerics": {"evaluation": "fp16"}})
    with pytest.raises(SpecError, match=r"V100.* does not support bf16"):
        validate({**MINIMAL, "hardware": "V100", "numerics": {"evaluation": "bf16"}})


def test_values_behind_two_conditions_are_checked_before_tpe_draws_them() -> None:
    search = {
        "name": "tpe",
        "samples": 3,
        "axes": {
            "optimizer.name": ["adamw", "adan"],
            "optimizer.no_prox": [False, True],
            "optimizer.weight_decay": [0.01, 99.0],
        },
        "when": {
            "optimizer.no_prox": {"optimizer.name": ["adan"]},
            "optimizer.weight_decay": {"optimizer.no_prox": [True]},
        },
    }
    with pytest.raises(SpecError, match=r"99\.0: input should be less than or equal to 10"):
        list(validate({**MINIMAL, "search": search}).runs())


def test_a_range_of_workers_is_those_that_divide_the_batch() -> None:
    spec = validate({**MINIMAL, "parallel": {"strategy": "ddp", "workers": {"min": 2, "max": 8}}})
    assert (spec.parallel.workers, spec.parallel.min_workers) == (8, 2)
    assert spec.worker_numbers == (8, 4, 2)
    assert validate(json.loads(spec.canonical_json())) == spec


def test_the_hash_depends_on_meaning_not_on_text() -> None:
    one = validate(parse(b"name: a\ntask: {name: imdb}\nseeds: [0]"))
    other = validate(parse(b"task:\n  name: imdb\n# a comment\nname: a\n"))
    changed = validate(parse(b"name: a\ntask: {name: imdb}\nseeds: [1]"))
    assert one.sha256() == other.sha256() != changed.sha256()


def test_a_spec_survives_its_canonical_json() -> None:
    spec = validate({**MINIMAL, "optimizer": {"name": "adan", "betas": [0.9, 0.9, 0.99]}})
    again = validate(json.loads(spec.canonical_json()))
    assert again == spec
    assert again.sha256() == spec.sha256()


def test_every_field_of_the_schema_is_described() -> None:
    schema = json_schema()
    sections = [schema, *schema["$defs"].values()]
    missing = [
        f"{section.get('title')}.{name}"
        for section in sections
        for name, field in section.get("properties", {}).items()
        if "description" not in field
        and "description" not in schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
    ]
    assert not missing


def test_every_axis_name_is_a_field() -> None:
    names = axis_names()
    assert {"precision", "batch.global_size", "optimizer.implementation", "hardware"} <= set(names)
    assert not {name for name in names if name.startswith(("search", "queue", "seeds"))}


def test_frozen_parts_are_an_axis() -> None:
    values = [[], ["embeddings"], ["embeddings", 0, 1]]
    spec = validate({**MINIMAL, "search": {"axes": {"model.frozen": values}}})
    assert [list(run.spec.model.frozen) for run in spec.runs()] == values


def test_layers_of_a_preset_are_refused_at_submission() -> None:
    base = {"name": "n", "task": {"name": "imdb"}, "model": {"name": "mini", "layers": [0, 2]}}
    with pytest.raises(
        SpecError, match=r"model\.layers needs a student with weights, but 'mini' is a preset"
    ):
        validate(base)
    of_run, of_preset = validate(base | {"search": {"axes": {"model.name": ["run:1", "mini"]}}}).runs()
    assert of_run.refusal is None
    assert of_preset.refusal is not None
    assert of_preset.refusal.reason.startswith("model.layers: model.layers needs a student")
    alone = validate(base | {"search": {"axes": {"model.name": ["mini"]}}})
    with pytest.raises(SpecError, match=r'grid point \{"model.name":"mini"\}: model.layers needs'):
        list(alone.runs())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"search": {"name": "tpe", "samples": 3}}, "has nothing to search"),
        ({"search": {"name": "tpe", "axes": {"precision": ["fp32"]}}}, "needs search.samples"),
        ({"reuse": True}, "chooses its runs after submission"),
        ({"search": {"name": "tpe", "samples": 3, "axes": {"model.name": ["run:3"]}}}, "suggests later"),
    ],
)
def test_what_tpe_cannot_do_is_refused(fields: dict[str, Any], said: str) -> None:
    search = {"name": "tpe", "samples": 3, "axes": {"batch.global_size": [8, 16]}}
    with pytest.raises(SpecError, match=said):
        validate({"name": "n", "task": {"name": "imdb"}, "search": search, **fields})


@pytest.mark.parametrize(("task", "better"), [("mlm", "lower"), ("imdb", "higher")])
def test_a_search_by_score_goes_the_way_of_the_tasks_headline(task: str, better: str) -> None:
    search = {"name": "tpe", "samples": 2, "metric": "best_score", "axes": {"batch.global_size": [8, 16]}}
    assert validate({"name": "n", "task": {"name": task}, "search": search}).metric_better == better


def test_a_search_by_score_over_tasks_that_are_judged_otherwise_is_refused() -> None:
    search = {"name": "tpe", "samples": 2, "metric": "score", "axes": {"task.name": ["imdb", "mlm"]}}
    with pytest.raises(SpecError, match=r"search\.metric: the direction of 'score' is unknown"):
        validate({**MINIMAL, "search": search})


def test_values_that_tpe_may_draw_are_checked_at_submission() -> None:
    axes = {"optimizer.learning_rate": {"low": 1e-5, "high": 20.0, "log": True}}
    spec = validate(
        {"name": "n", "task": {"name": "imdb"}, "search": {"name": "tpe", "samples": 3, "axes": axes}}
    )
    with pytest.raises(SpecError, match=r"20\.0: input should be less than or equal to 10"):
        list(spec.runs())
