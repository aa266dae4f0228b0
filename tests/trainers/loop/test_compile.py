"""The compiled model: the same numbers, the same names, no compilation for a width of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainers.entrypoint import train
from trainers.reporting import NeverStop


@pytest.mark.slow
@pytest.mark.timeout(600)
# torch's compiler uses what torch deprecates, and asks hidden states for their gradients.
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"], ids=["C++", "graphs"])
def test_compiled_run_has_the_losses_of_a_plain_one(config_in, tmp_path, recorder, monkeypatch, backend):
    from torch._dynamo.utils import counters  # Takes seconds, which collecting the tests would take as well.

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **how: compile_layer(layer, backend=backend, **how)
    )
    changes = {"model__dropout": 0.0, "length": {"steps": 8}}
    counters["stats"].clear()
    plain = type(recorder)()
    whole = train(config_in(tmp_path / "plain", **changes), plain, NeverStop())
    compiled = train(config_in(tmp_path / "compiled", model__compile=True, **changes), recorder, NeverStop())
    assert recorder.series("loss") == pytest.approx(plain.series("loss"), rel=1e-3)
    assert recorder.facts["compiled"] is True
    assert recorder.facts["attention"] == "sdpa"
    names = [set(load_file(Path(run.checkpoint) / "model.safetensors")) for run in (whole, compiled)]
    assert names[0] == names[1]
    # Training, evaluation, and rows that are not padded: each once for both layers.
    assert counters["stats"]["unique_graphs"] <= 3
    # Compiled graphs are kept for other runs: what compiling took is in no figure of this one.
    summary = compiled.summary
    assert summary["preparation_time_s"] > 10 * summary["forward_time_s"] / summary["steps"]
