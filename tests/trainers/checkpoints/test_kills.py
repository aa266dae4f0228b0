"""A run whose worker was killed with SIGKILL ends, bit for bit, where a run that never was ends.

`STILLHOUSE_KILL_POINTS` is the number of kills, at random steps, in each case. Every two of task, workers and
precision meet in a case.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink

STEPS = 9


@pytest.fixture(scope="module")
def teacher(config_in, tmp_path_factory) -> Path:
    """A model with a head, larger than the student."""
    folder = tmp_path_factory.mktemp("models") / "mini"
    return Path(train(config_in(folder, model__name="mini"), NullSink(), NeverStop()).checkpoint)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """A data root with lines to learn a language from."""
    folder = tmp_path_factory.mktemp("texts")
    lines = (" ".join(f"word{(i * j) % 17}" for j in range(1, 30)) + f" {i}" for i in range(300))
    (folder / "train.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def changes(request, teacher, texts):
    """What the runs of a case have beside strategy and precision."""
    return {
        "imdb": {},
        "distilled": {
            "model": {"name": "tiny", "teacher": str(teacher)},
            "workspace__model_roots": (str(teacher.parent),),
            "distillation": {
                "soft_weight": 0.5,
                "hidden_weight": 1.0,
                "embedding_weight": 0.5,
                "relation_weight": 1.0,
                "cosine_weight": 0.5,
            },
        },
        "mlm": {
            "task": {"name": "mlm", "path": "train.txt", "max_length": 24},
            "workspace__data_roots": (str(texts),),
        },
    }[request.param]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "workers", "precision"),
    [
        ("imdb", 1, "fp32"),
        ("imdb", 2, "bf16"),
        ("distilled", 1, "bf16"),
        ("distilled", 2, "fp32"),
        ("mlm", 1, "bf16"),
        ("mlm", 2, "fp32"),
    ],
    indirect=["changes"],
)
def test_killed_run_ends_bitwise_where_the_whole_one_ends(
    launch, config_in, tmp_path, kill_points, changes, workers, precision
):
    changes = {
        **changes,
        "precision": precision,
        "deterministic": True,
        "length": {"steps": STEPS},
        "parallel": {"strategy": "ddp" if workers > 1 else "single", "workers": workers},
        "checkpoint": {"every_steps": 2, "every_s": 0.0},
    }
    victims = [config_in(tmp_path / f"victim-{i}", **changes) for i in range(kill_points)]
    for victim in victims:
        kill_at = random.SystemRandom().randint(1, STEPS)
        assert launch([victim], kill_at=kill_at).codes[-1] == -9, f"killed at {kill_at}"
    ended = launch([config_in(tmp_path / "whole", **changes), *victims])
    for result in ended.results:
        whole, *resumed = result["runs"]
        assert {run["weights"] for run in resumed} == {whole["weights"]}
