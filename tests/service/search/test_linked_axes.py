"""Axes of lists, axes whose values move together, and what a conditional axis has elsewhere."""

from __future__ import annotations

import pytest

from service.domain.formats import point_text
from service.domain.grid import labels
from service.search.protocol import Outcome, Suggestion
from service.specs.experiment import ExperimentSpec, read_stored, validate

DDP = {"strategy": "ddp"}
LINKED = {"parallel.workers": [1, 2, 4], "batch.global_size": [16, 32, 64]}


def spec(search, **fields) -> ExperimentSpec:
    return validate({"name": "linked", "task": {"name": "imdb"}, "search": search, **fields})


def test_linked_fields_are_one_axis():
    experiment = spec({"together": [LINKED]}, parallel=DDP)
    runs = list(experiment.runs())
    assert [(run.spec.parallel.workers, run.spec.batch.global_size) for run in runs] == [
        (1, 16),
        (2, 32),
        (4, 64),
    ]
    assert [point_text(run.point) for run in runs] == [
        f"workers+batch={label}" for label in ("1+16", "2+32", "4+64")
    ]
    assert experiment.run_count() == 3


def test_linked_axes_vary_fastest_among_others_and_are_stored():
    experiment = spec(
        {"axes": {"precision": ["fp32", "bf16"]}, "together": [LINKED]}, parallel=DDP, seeds=[1, 2]
    )
    runs = list(read_stored(experiment.canonical_json()).runs())
    assert len(runs) == experiment.run_count() == 12
    assert [(run.spec.precision, run.spec.parallel.workers) for run in runs[::2]] == [
        ("fp32", 1), ("fp32", 2), ("fp32", 4), ("bf16", 1), ("bf16", 2), ("bf16", 4),
    ]  # fmt: skip


def test_an_axis_may_depend_on_a_linked_field():
    experiment = spec(
        {
            "axes": {"log_every_steps": [1, 5]},
            "together": [LINKED],
            "when": {"log_every_steps": {"parallel.workers": [1, 4]}},
        },
        parallel=DDP,
    )
    chosen = [(run.spec.parallel.workers, run.point.get("log_every_steps")) for run in experiment.runs()]
    assert chosen == [(1, 1), (1, 5), (2, None), (4, 1), (4, 5)]


@pytest.mark.parametrize(
    ("values", "short"),
    [
        ([[0.98, 0.92, 0.9], [0.98, 0.92, 0.99]], ["0.98,0.92,0.9", "0.98,0.92,0.99"]),
        ([[0.1] * 12, [1, 1, 0.5, 0.5, 0.5, 0.5]], ["0.1x12", "1,1,0.5x4"]),
        ([None, [1, 3, 5]], [None, "1,3,5"]),
        ([["1", "3"], [1, 3]], ['["1", "3"]', "[1, 3]"]),
    ],
)
def test_lists_have_short_labels_that_differ(values, short):
    assert labels(values) == short


def test_lists_are_axis_values():
    axes = {"optimizer.betas": [[0.98, 0.92, 0.9], [0.98, 0.92, 0.99]], "precision": ["fp32", "bf16"]}
    runs = list(spec({"axes": axes}, optimizer={"name": "adan"}).runs())
    assert [run.spec.optimizer.betas[-1] for run in runs] == [0.9, 0.9, 0.99, 0.99]
    assert runs[2].point == {"optimizer.betas": "0.98,0.92,0.99", "precision": "fp32"}


def test_factors_of_layers_are_an_axis_although_their_section_may_be_left_out() -> None:
    axes = {
        "distillation.layer_weights.hidden": [[0.1, 0.2], [1.0, 1.0]],
        "distillation.hidden_weight": [1.0],
    }
    distilled = {"model": {"name": "tiny", "teacher": "hub:t"}}
    weights = [run.spec.distillation.layer_weights for run in spec({"axes": axes}, **distilled).runs()]
    assert [each.hidden for each in weights if each] == [(0.1, 0.2), (1.0, 1.0)]
    own = {**distilled, "distillation": {"hidden_weight": 1.0, "layer_weights": {"logits": 0.5}}}
    weights = [run.spec.distillation.layer_weights for run in spec({"axes": axes}, **own).runs()]
    assert [each.logits for each in weights if each] == [0.5, 0.5]
    axes["precision"] = ["fp32", "bf16"]
    when = {"distillation.layer_weights.hidden": {"precision": ["bf16"]}}
    weights = [
        run.spec.distillation.layer_weights for run in spec({"axes": axes, "when": when}, **own).runs()
    ]
    assert [each.hidden for each in weights if each] == [(1.0,), (0.1, 0.2), (1.0, 1.0)]


def test_a_conditional_axis_may_have_other_values_elsewhere():
    experiment = spec(
        {
            "axes": {"hardware": ["V100", "A100"], "batch.global_size": [16, 32, 64]},
            "when": {"batch.global_size": {"hardware": ["V100"]}},
            "otherwise": {"batch.global_size": [128, 256]},
        },
        hardware="V100",
    )
    sizes = [(run.spec.hardware[:4], run.spec.batch.global_size) for run in experiment.runs()]
    assert sizes == [("V100", 16), ("V100", 32), ("V100", 64), ("A100", 128), ("A100", 256)]
    assert experiment.run_count() == 5
    probed = {point["batch.global_size"] for point in experiment.search.probes()}
    assert {16, 32, 64, 128} <= probed


def test_of_an_axis_of_lists_a_list_is_one_value_elsewhere():
    search = {
        "axes": {"precision": ["fp32", "bf16"], "optimizer.betas": [[0.9, 0.99], [0.9, 0.999]]},
        "when": {"optimizer.betas": {"precision": ["bf16"]}},
        "otherwise": {"optimizer.betas": [0.8, 0.9]},
    }
    assert [run.spec.optimizer.betas for run in spec(search).runs()] == [
        (0.8, 0.9),
        (0.9, 0.99),
        (0.9, 0.999),
    ]
    search["otherwise"] = {"optimizer.betas": [[0.8, 0.9], [0.7, 0.9]]}
    assert [run.spec.optimizer.betas for run in spec(search).runs()][:2] == [(0.8, 0.9), (0.7, 0.9)]


def test_a_search_suggests_linked_and_other_values():
    search = {
        "name": "tpe",
        "samples": 20,
        "axes": {"precision": ["fp32", "bf16"], "log_every_steps": [1, 2]},
        "together": [LINKED],
        "when": {"log_every_steps": {"precision": ["bf16"]}},
        "otherwise": {"log_every_steps": [7, 8, 9]},
    }
    experiment = spec(search, parallel=DDP)
    tried = []
    for number in range(15):
        point = experiment.search.suggest(tried, "lower")
        resolved = experiment.at(point)
        assert (resolved.parallel.workers, resolved.batch.global_size) in [(1, 16), (2, 32), (4, 64)]
        assert resolved.log_every_steps in ([1, 2] if resolved.precision == "bf16" else [7, 8, 9])
        tried.append(Suggestion(point, Outcome.valued, float(number)))
    with pytest.raises(ValueError, match="all configurations have been suggested"):
        experiment.search.suggest(tried, "lower")


def test_the_batch_follows_the_number_of_workers():
    axes = {"parallel.workers": [1, 2, 4], "batch.per_worker_size": [8, 16]}
    runs = list(spec({"axes": axes}, parallel=DDP).runs())
    assert [run.spec.batch.global_size for run in runs] == [8, 16, 16, 32, 32, 64]
    stored = read_stored(runs[-1].spec.canonical_json())
    assert (stored.batch.global_size, stored.batch.per_worker_size) == (64, 16)


def test_a_pipelines_replica_is_one_worker_for_the_batch():
    parallel = {"strategy": "pipeline", "workers": 4, "stages": 2}
    (run,) = spec({}, parallel=parallel, batch={"per_worker_size": 16}).runs()
    assert run.spec.batch.global_size == 32
