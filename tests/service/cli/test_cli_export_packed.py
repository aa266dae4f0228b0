"""`stillhouse export-model --packed` of a trained run, and what its folder scores in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from service.domain.states import ExperimentState
from service.specs.models import checkpoints_folder
from tests.service.cli.house import House
from trainers.config import RunConfig
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink

_SCORE = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoTokenizer
from trainers.models.binary import load_packed

folder, rows = Path(sys.argv[1]), [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
model, tokenizer = load_packed(folder), AutoTokenizer.from_pretrained(folder)
right = 0
with torch.inference_mode():
    for row in rows:
        inputs = tokenizer(row["text"], truncation=True, max_length=48, return_tensors="pt")
        right += int(model(**inputs).logits.argmax()) == row["label"]
assert not {"ray", "sqlalchemy", "service"} & set(sys.modules)
print(right / len(rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("embeddings", ["fp32", "sign"])
def test_the_packed_folder_of_a_run_scores_what_the_run_did(
    house: House, tmp_path: Path, embeddings: str
) -> None:
    write_corpus(house.folder / "reviews", train=200, test=100, seed=1)
    number = house.submitted()
    experiment = house.claimed()
    first = house.runs(number)[0]
    sections = {
        "task": {"name": "imdb", "path": "reviews", "max_length": 48, "test": "none"},
        "model": {
            "name": "tiny",
            "encoder": "binary",
            "binary": {"activations": "elastic", "activation_bits": 4, "embeddings": embeddings},
        },
        "numerics": {"evaluation": "packed"},
        "optimizer": {"learning_rate": 3e-3},
        "length": {"steps": 100},
        "batch": {"global_size": 8},
        "checkpoint": {"every_s": 0.0},
        "seed": 0,
        "threads": 1,
        "rates": {
            "hardware": "cpu",
            "device": "cpu",
            "price_usd_per_hour": 0.05,
            "price_date": "2026-01-01",
            "tdp_w": 7.5,
        },
        "workspace": {
            "checkpoints": str(checkpoints_folder(house.settings, number, first.id)),
            "cache": str(tmp_path / "cache"),
            "data_roots": (str(house.folder),),
        },
    }
    outcome = train(RunConfig.model_validate(sections), NullSink(), NeverStop())
    for run in house.runs(number):
        house.finished(run, house.begun(run, experiment), 0.9, 20.0)
    house.ended(ExperimentState.succeeded, experiment)

    folder = tmp_path / "model"
    result = house.run("export-model", f"run:{first.id}", str(folder), "--packed")
    assert result.exit_code == 0, result.output
    assert (
        "bert.encoder.layer.0.attention.self.query"
        in json.loads((folder / "config.json").read_text())["packed"]["layers"]
    )
    done = subprocess.run(
        [sys.executable, "-c", _SCORE, str(folder), str(house.folder / "reviews" / "test.jsonl")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == outcome.summary["best_score"] > 0.5
