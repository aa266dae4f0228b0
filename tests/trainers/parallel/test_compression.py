"""What data-parallel workers send of their gradients, in real runs of two workers over gloo."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.trainers.conftest import chosen
from trainers.config import Parallel

STEPS = 44  # the synthetic texts are learned after 20; the epoch's short batch is the 48th step
FEW = 8  # the warm-up ends with the fourth
KINDS = ("none", "fp16", "bf16", "powersgd", "onebit")


def changes_of(kind, **more):
    return {
        "parallel": {
            "strategy": "ddp",
            "workers": 2,
            "compression": kind,
            "compression_warmup": 0.5,
            "bucket_mib": 1,
        },
        "optimizer": {"name": "adan", "learning_rate": 3e-3},
        "model__dropout": 0.0,
        "deterministic": True,
        "length": {"steps": STEPS},
        "checkpoint": {"every_steps": 9, "every_s": 0.0},
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of a short run of each kind."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def runs_of(launch, config_in):
    """Trains a run of each of some kinds; returns results by rank."""

    def of(folder, steps, kinds=KINDS):
        ended = launch(
            [config_in(folder / kind, **changes_of(kind, length={"steps": steps})) for kind in kinds]
        )
        assert ended.codes == [0, 0]
        return {kind: [result["runs"][i] for result in ended.results] for i, kind in enumerate(kinds)}

    return of


@pytest.fixture(scope="module")
def runs(runs_of, folder):
    """Of a few steps of each kind."""
    return runs_of(folder, FEW)


@pytest.fixture(scope="module")
def learned_runs(request, runs_of, tmp_path_factory):
    """Long enough to learn the texts."""
    return runs_of(tmp_path_factory.mktemp("learned"), STEPS, sorted({"none", *chosen(request, "kind")}))


def mean_of_last(run):
    losses = [run["losses"][str(step)] for step in range(STEPS - 5, STEPS + 1)]
    return sum(losses) / len(losses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_compressed_runs_learn_about_as_well(learned_runs, kind):
    whole, compressed = learned_runs["none"][0], learned_runs[kind][0]
    learned = whole["losses"]["1"] - mean_of_last(whole)
    assert learned > 0.5
    assert whole["losses"]["1"] - mean_of_last(compressed) > 0.8 * learned


@pytest.mark.parametrize("kind", KINDS)
def test_both_workers_have_the_same_scores(runs, kind):
    first, second = (run["summary"] for run in runs[kind])
    names = ("accuracy", "validation_loss", "steps")
    assert [first[name] for name in names] == [second[name] for name in names]


@pytest.mark.parametrize(("kind", "share"), [("fp16", 1 / 2), ("bf16", 1 / 2), ("onebit", 1 / 16)])
def test_bytes_sent_shrink_as_promised(runs, kind, share):
    whole, compressed = (runs[name][0]["points"]["bytes_sent_per_step"] for name in ("none", kind))
    assert whole[str(FEW)] == 4 * runs["none"][0]["summary"]["parameters"]  # ring of two: 2 x 1/2 x K
    assert compressed[str(FEW)] <= share * whole[str(FEW)]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_sent_are_those_that_estimates_count(runs, folder, kind):
    tensors = load_file(next((folder / kind).rglob("model.safetensors")))
    parallel = Parallel.model_validate(changes_of(kind)["parallel"])
    payload = parallel.compression_info.payload
    counted = sum(payload(tuple(tensor.shape), 4, parallel) for tensor in tensors.values())
    # Between two workers a ring sends as much as there is. Signs are sent in whole chunks.
    assert runs[kind][0]["points"]["bytes_sent_per_step"][str(FEW)] == pytest.approx(counted, rel=0.01)


def test_power_sgd_sends_its_factors(runs):
    sent = runs["powersgd"][0]["points"]["bytes_sent_per_step"]
    whole = runs["none"][0]["points"]["bytes_sent_per_step"]["1"]
    assert sent["4"] == whole  # the warm-up
    assert sent["5"] < whole / 8


def test_the_second_moment_is_frozen_after_the_warm_up(runs):
    sent = runs["onebit"][0]["points"]["bytes_sent_per_step"]
    whole = runs["none"][0]["points"]["bytes_sent_per_step"]["1"]
    assert [sent[str(step)] == whole for step in (1, 4, 5, FEW)] == [True, True, False, False]


def test_communication_is_reported(runs):
    for kind in KINDS:
        run = runs[kind][0]
        assert set(run["points"]["communication_ms"]) == {str(step) for step in range(1, FEW + 1)}
        assert 0.0 <= run["summary"]["hidden_communication_s"] < run["summary"]["backward_time_s"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["powersgd", "onebit"])
def test_a_killed_run_resumes_bitwise(launch, config_in, tmp_path, kind):
    """Also after the warm-up, where errors of both workers are in the checkpoint."""
    changes = changes_of(kind, length={"steps": 15}, checkpoint={"every_steps": 2, "every_s": 0.0})
    kills = (6, 13)
    victims = [config_in(tmp_path / f"victim-{kill_at}", **changes) for kill_at in kills]
    for victim, kill_at in zip(victims, kills, strict=True):
        assert launch([victim], kill_at=kill_at).codes[-1] == -9
    ended = launch([config_in(tmp_path / "whole", **changes), *victims])
    for result in ended.results:
        whole, *resumed = result["runs"]
        for run in resumed:
            assert run["weights"] == whole["weights"]
            assert run["summary"]["statistical_efficiency"] == whole["summary"]["statistical_efficiency"]
    for run, kill_at in zip(ended.results[0]["runs"][1:], kills, strict=True):
        assert 0 < run["resumed_from"] <= kill_at  # rank 0 alone reports
    newest = max((tmp_path / "whole").glob("*/step-*"))
    kept = load_file(newest / "exchange.safetensors")
    assert {name.partition(".")[0] for name in kept} == {"0", "1"}
    assert any(tensor.any() for tensor in kept.values() if tensor.is_floating_point())
    groups = json.loads((newest / "state.json").read_text())["optimizer_groups"]
    assert {group["betas"][2] for group in groups} == {1.0 if kind == "onebit" else 0.99}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["powersgd", "onebit"])
def test_steps_that_overflow_are_skipped_and_leave_nothing_behind(launch, config_in, tmp_path, kind):
    changes = changes_of(kind, numerics={"not_finite": "skip"})
    ended = launch([config_in(tmp_path, **changes)], poison_step=25, poison_until=27)
    assert [result["runs"][0]["status"] for result in ended.results] == ["completed"] * 2
    (run,) = ended.results[0]["runs"]  # rank 0 alone reports
    assert run["points"]["skipped_steps"][str(STEPS)] == 2
    assert run["losses"]["1"] - mean_of_last(run) > 0.5
    for tensor in load_file(max(tmp_path.glob("*/step-*")) / "exchange.safetensors").values():
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"compression": "bf16"}}, r"compression bf16 belongs to strategy ddp, not single"),
        (
            {"parallel": {"strategy": "ddp", "workers": 2, "compression": "onebit"}},
            r"compression onebit is 1-bit Adan and needs optimizer\.name adan, not adamw",
        ),
        (
            {
                "parallel": {"strategy": "ddp", "workers": 2, "compression": "fp16"},
                "precision": "bf16",
                "numerics": {"parameters": "half"},
            },
            r"compression fp16 has nothing to compress",
        ),
    ],
)
def test_what_cannot_be_compressed_is_refused_with_the_spec(configure, changes, message):
    with pytest.raises(ValidationError, match=message):
        configure(**changes)


def test_adan_with_a_frozen_second_moment_follows_the_formula():
    """All four implementations, beside the formula in float64."""
    import cuda_ext

    for implementation in cuda_ext.IMPLEMENTATIONS:
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(1025, generator=generator)
        parameter = torch.nn.Parameter(start.clone())
        adan = cuda_ext.Adan([parameter], lr=1e-2, weight_decay=0.1, implementation=implementation)
        for _ in range(5):
            parameter.grad = torch.randn(1025, generator=generator)
            adan.step()
        state = adan.state[parameter]
        n = state["exp_avg_sq"].double() / (1 - 0.99**5)
        n = n.clamp(min=0.5 * n.mean())
        adan.freeze_second_moment({parameter: 0.5})
        theta, m, v, before = (
            tensor.detach().double()
            for tensor in (parameter, state["exp_avg"], state["exp_avg_diff"], state["g_prev"])
        )
        for step in range(6, 10):
            gradient = torch.randn(1025, generator=generator)
            parameter.grad = gradient.clone()
            adan.step()
            g = gradient.double()
            m, v, before = 0.98 * m + 0.02 * g, 0.92 * v + 0.08 * (g - before), g
            u = (m / (1 - 0.98**step) + 0.92 * v / (1 - 0.92**step)) / (n.sqrt() + 1e-8)
            theta = (theta - 1e-2 * u) / (1 + 1e-2 * 0.1)
        torch.testing.assert_close(parameter.detach().double(), theta, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(state["exp_avg_sq"].double(), n, rtol=1e-5, atol=0)


def test_a_second_moment_that_never_began_is_not_frozen():
    import cuda_ext

    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))
    adan = cuda_ext.Adan([used, unused])
    used.grad = torch.ones(3)
    adan.step()
    with pytest.raises(cuda_ext.ConfigurationError, match=r"of shape \(4,\) has had no step"):
        adan.freeze_second_moment({})
