"""Passes that are recorded once and replayed: on the CPU, where a tape takes the place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.encoders import PAD, build, examples, install
from benchmarks.step_trace import StepTrace
from cuda_ext import encoder as kernels
from tests.trainers.conftest import Configure, Launch, Recorder
from tests.trainers.corpora import EACH_HEAD, write_task
from tests.trainers.tape import Tape
from trainers import parallel
from trainers.data.batches import Batch, collate
from trainers.data.segments import StaticRow, StaticShape
from trainers.device_kinds import CPU, DEVICE_KINDS
from trainers.device_kinds.backend import Backend
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.parallel.recorded import RecordedReplica
from trainers.parallel.replica import Replica
from trainers.reporting import NeverStop
from trainers.tasks import TASKS
from trainers.tasks.scores import class_loss
from trainers.telemetry.timeline import Phase, Timeline
from trainers.update import Update

FUSED = {"name": "tiny", "encoder": "fused", "cuda_graphs": True}
STEPS = 20
REPEATED = tuple(name for name in EACH_HEAD if TASKS[name].head.reads != "guessed")

pytestmark = pytest.mark.skipif(
    kernels.why_unavailable("cpu") is not None, reason="there are no encoder kernels here"
)


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    """Recordings on the CPU, and a device kind with torch's dropout, as a GPU has it."""
    tape = Tape()
    kind = replace(CPU, name="taped", host_dropout=False, load=cache(Backend))
    monkeypatch.setitem(DEVICE_KINDS, "taped", kind)
    monkeypatch.setattr(Backend, "recorder", lambda self, device: tape)
    return tape


def ended(configure: Configure, to: Path, *, stop_after: int | None = None, **changes: Any) -> Recorder:
    """Train; returns what was reported, with the run's last weights among the facts."""
    fields = {"model": FUSED, "length__steps": STEPS, "batch": {"global_size": 8, "micro_size": 4}, **changes}
    config = configure(**fields)
    workspace = config.workspace.model_copy(update={"checkpoints": str(to)})
    rates = config.rates.model_copy(update={"device": "taped"})
    recorder = Recorder(stop_after=stop_after)
    outcome = train(config.model_copy(update={"rates": rates, "workspace": workspace}), recorder, recorder)
    recorder.facts["weights"] = load_file(Path(outcome.checkpoint or "") / "model.safetensors")
    recorder.facts["summary"] = outcome.summary
    return recorder


def require_equal_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow, id="bf16"),
        pytest.param(
            {"optimizer": {"name": "adan", "learning_rate": 1e-3, "max_grad_norm": 0.1}},
            marks=pytest.mark.slow,
            id="clipped",
        ),
        pytest.param(
            {"batch": {"global_size": 8, "micro_tokens": 90}}, marks=pytest.mark.slow, id="token budget"
        ),
        pytest.param({"batch": {"global_size": 8}}, marks=pytest.mark.slow, id="one micro-batch"),
    ],
)
def test_replayed_passes_are_those_of_a_run_without_recordings(
    tape: Tape, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Losses, norms, noise and weights are equal, dropout included."""
    recorded = ended(configure, tmp_path / "recorded", **changes)
    assert tape.recorded >= 2 * 2
    assert tape.replayed >= STEPS
    monkeypatch.setattr(parallel, "RecordedReplica", Replica)
    replayed = tape.replayed
    plain = ended(configure, tmp_path / "plain", **changes)
    assert tape.replayed == replayed
    for name in ("loss", "grad_norm", "gradient_noise_scale"):
        assert recorded.series(name) == plain.series(name)
    assert len(recorded.series("loss")) == STEPS
    require_equal_weights(recorded.facts["weights"], plain.facts["weights"])


@pytest.mark.parametrize(
    "task", [REPEATED[0], *(pytest.param(task, marks=pytest.mark.slow) for task in REPEATED[1:])]
)
def test_rows_of_a_few_shapes_have_the_losses_of_rows_of_any(
    tape: Tape, configure: Configure, tmp_path: Path, task: str
) -> None:
    write_task(tmp_path / "data" / task, task)
    fields = {
        "task": {"name": task, "path": task, "max_length": 40},
        "workspace__cache": str(tmp_path / "cache"),
        "workspace__data_roots": (str(tmp_path / "data"),),
        "length__steps": 6,
    }
    model = {**FUSED, "dropout": 0.0}
    static = ended(configure, tmp_path / "static", model=model, **fields)
    dynamic = ended(configure, tmp_path / "dynamic", model={**model, "cuda_graphs": False}, **fields)
    assert tape.replayed
    assert static.series("loss") == pytest.approx(dynamic.series("loss"), rel=2e-4)
    assert static.facts["summary"]["score"] == pytest.approx(dynamic.facts["summary"]["score"], abs=0.02)


@pytest.mark.slow
def test_a_stopped_run_resumes_bitwise(tape: Tape, configure: Configure, tmp_path: Path) -> None:
    whole = ended(configure, tmp_path / "whole", deterministic=True)
    ended(configure, tmp_path / "parts", deterministic=True, stop_after=7)
    resumed = ended(configure, tmp_path / "parts", deterministic=True)
    assert 0 < resumed.resumed_from < STEPS
    require_equal_weights(whole.facts["weights"], resumed.facts["weights"])


@pytest.mark.slow
def test_recording_is_not_the_time_of_a_step(
    tape: Tape, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, record, phases, during = Timeline.enter, tape.record, [], []
    monkeypatch.setattr(Timeline, "enter", lambda self, phase: (phases.append(phase), enter(self, phase)))
    monkeypatch.setattr(tape, "record", lambda work: (during.append(phases[-1]), record(work))[1])
    ended(configure, tmp_path / "run")
    assert set(during) == {Phase.warm_up}


def test_all_shapes_are_recorded_before_the_first_step(
    tape: Tape, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, recorded, shapes = RecordedReplica._forward_backward, [], []

    def counted(self: RecordedReplica, batch: Batch, *given: Any) -> torch.Tensor:
        recorded.append(tape.recorded)
        shapes.append(batch.shape)
        return compute(self, batch, *given)

    monkeypatch.setattr(RecordedReplica, "_forward_backward", counted)
    ended(configure, tmp_path / "run")
    assert 1 < len(set(shapes)) < len(shapes) / 2
    # Forward, the first backward pass of a step, and further ones.
    assert set(recorded) == {3 * len(set(shapes))}


@pytest.mark.slow
def test_a_resumed_run_records_what_it_has_left(tape: Tape, configure: Configure, tmp_path: Path) -> None:
    ended(configure, tmp_path / "run", stop_after=STEPS - 2)
    before = tape.recorded
    assert ended(configure, tmp_path / "run").resumed_from >= STEPS - 2
    assert tape.recorded - before < before


@pytest.mark.parametrize("micro_size", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_gradients_are_written_once_and_never_cleared(
    tape: Tape, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_size: int
) -> None:
    """Not added to zeros, one launch for each parameter."""
    update, launched = Update.clear, []

    def clear(self: Update) -> None:
        with StepTrace("cpu") as trace:
            update(self)
        launched.append(trace.launched)

    monkeypatch.setattr(Update, "clear", clear)
    ended(configure, tmp_path / "run", batch={"global_size": 8, "micro_size": micro_size})
    assert set(launched) == {0}
    ends = [names[-1] for names in tape.names]
    expected = {"_foreach_copy_", "_foreach_add_"} if micro_size == 4 else {"_foreach_copy_"}
    assert {end for end in ends if end.startswith("_foreach")} == expected
    assert ends.count("_foreach_copy_") == tape.recorded // (2 + (micro_size == 4))


@pytest.mark.slow
def test_two_workers_replay_bitwise_what_they_launch(
    launch: Launch, config_in: Configure, tmp_path: Path
) -> None:
    """Gradients are averaged after the recorded passes; dropout, accumulation and late reading included."""
    found = {}
    for taped in ("replayed", "launched"):
        configs = []
        for name, batch in (("whole", {}), ("accumulated", {"micro_size": 2})):
            config = config_in(
                tmp_path / taped / name,
                model=FUSED,
                parallel={"strategy": "ddp", "workers": 2},
                length={"steps": STEPS},
                batch={"global_size": 8, **batch},
            )
            rates = config.rates.model_copy(update={"device": "taped"})
            configs.append(config.model_copy(update={"rates": rates}))
        ended = launch(configs, taped=taped, behind_host=True)
        found[taped] = [run for result in ended.results if result is not None for run in result["runs"]]
    for replayed, launched in zip(found["replayed"], found["launched"], strict=True):
        assert replayed["status"] == launched["status"] == "completed"
        assert (launched["replayed"], replayed["replayed"] > STEPS) == (0, True)
        assert replayed["reads"] == launched["reads"] > 0
        assert replayed["losses"] == launched["losses"]
        assert replayed["weights"] == launched["weights"]
        noise = [run["points"].get("noise_scale", {}) for run in (replayed, launched)]
        assert noise[0] == pytest.approx(noise[1], rel=1e-3)


@pytest.mark.slow
def test_few_shapes_are_recorded(tape: Tape, configure: Configure, tmp_path: Path) -> None:
    ended(configure, tmp_path / "run", length__steps=60)
    assert tape.recorded <= 3 * 12


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": {**FUSED, "encoder": "huggingface"}}, "set model.encoder to packed or fused"),
        ({"model": {**FUSED, "teacher": "run:1"}}, "cuda_graphs records no teacher"),
        ({"parallel": {"activation_checkpointing": True}}, "activation_checkpointing: false"),
        ({"parallel": {"strategy": "pipeline", "workers": 2}}, "parallel.strategy: ddp"),
        (
            {"parallel": {"strategy": "ddp", "workers": 2, "compression": "powersgd"}},
            "parallel.compression: none, fp16 or bf16",
        ),
        ({"task": {"name": "mlm", "path": "reviews", "max_length": 48}}, "number of tokens in each"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    configure: Configure, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        configure(**{"model": FUSED, **fields})


def test_a_device_that_records_nothing_is_refused(configure: Configure) -> None:
    with pytest.raises(BadSpecError, match=r"model\.cuda_graphs needs a GPU"):
        train(configure(model=FUSED), Recorder(), NeverStop())


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x * float(x.sum()), "the host reads a number"),
        (lambda x: x + torch.randint(9, ()), "the host draws a number"),
        (lambda x: x.nonzero(), "a shape depends on the data"),
    ],
)
def test_a_tape_refuses_what_a_graph_would_keep(work: Any, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        Tape().record(lambda: work(torch.ones(3)))


def test_a_tape_replays_on_the_memory_that_it_had() -> None:
    x, total = torch.ones(3), torch.zeros(())
    result, replay = Tape().record(lambda: total.add_(x.sum()) * 2)
    assert total == 0.0, "a recording computes nothing"
    for _ in range(2):
        x += 1.0
        replay()
    assert (float(total), float(result)) == (15.0, 30.0)


def rows(count: int, seed: int) -> Batch:
    lengths = np.random.default_rng(seed).integers(3, 40, count)
    return collate(examples(list(lengths), 48), np.arange(count), PAD, 8)


def test_rows_as_long_have_tensors_of_one_shape() -> None:
    layout = StaticRow(StaticShape(None, PAD, 9, 48), 8, 400)
    shapes: dict[int, set[object]] = {}
    for seed in range(40):
        batch = layout(rows(8 - seed % 2, seed), seed=0, epoch=0)
        assert batch.segments is not None
        length = batch.segments.input_ids.shape[1]
        assert length == batch.padded_tokens == sum(batch.segments.lengths)
        assert length % 8 == 0
        assert batch.segments.longest >= max(batch.segments.lengths)
        shapes.setdefault(length, set()).add(batch.shape)
    assert 1 < len(shapes) < 12
    assert all(len(found) == 1 for found in shapes.values())


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 23, 39, 47, 48])
def test_no_segment_is_said_to_be_longer_than_its_row(tokens: int) -> None:
    """A last batch of one short text: torch's backward pass refuses such a bound."""
    layout = StaticRow(StaticShape(None, PAD, 5, 48), 8, 400)
    batch = layout(collate(examples([tokens], 48), np.arange(1), PAD, 8), seed=0, epoch=0)
    assert batch.segments is not None
    assert max(batch.segments.lengths) <= batch.segments.longest <= batch.segments.input_ids.numel()


@pytest.mark.parametrize("tokens", [1, 7, 8, 63, 64, 65, 1000, 4095, 4096])
def test_a_row_is_longer_than_its_tokens_by_an_eighth_at_most(tokens: int) -> None:
    length = StaticRow(StaticShape(None, PAD, 9, 48), 8, 1 << 20).length_of(tokens)
    assert tokens < length <= tokens + max(8, tokens / 8)


def test_a_replayed_micro_batch_is_two_launches_and_the_copies_of_its_numbers(
    tape: Tape, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tensors of the batch, the factor of the loss, and the seeds."""
    compute, launches = RecordedReplica._forward_backward, []

    def traced(self: RecordedReplica, *given: Any) -> torch.Tensor:
        before = tape.replayed, tape.recorded
        with StepTrace("cpu") as trace:
            loss = compute(self, *given)
        if (tape.replayed, tape.recorded) == (before[0] + 2, before[1]):
            launches.append(trace.launched)
        return loss

    monkeypatch.setattr(RecordedReplica, "_forward_backward", traced)
    ended(configure, tmp_path / "run")
    assert len(launches) >= STEPS
    assert set(launches) == {9 + 1 + 1}


class Sent(TorchDispatchMode):
    """Remembers the operators that take a tensor of the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {leaf.device.type for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)}
            for of in ((args, kwargs), result)
        )
        if "cpu" in given and "meta" in made:
            self.names.append(str(func))
        return result


def test_passes_send_nothing_to_the_device() -> None:
    """What the host sends while it records would stay what it was; seen on tensors without values."""
    model = install(build("tiny"), "fused", host=False).to(torch.bfloat16).to("meta").train()
    layout = StaticRow(StaticShape(None, PAD, 9, 48), 8, 400)
    batch = layout(rows(8, 0), seed=0, epoch=0).empty_on(torch.device("meta"))
    taken = iter(torch.zeros(64, dtype=torch.int64, device="meta"))
    with kernels.seeds_from(lambda: next(taken)), StepTrace() as trace, Sent() as sent:
        class_loss(model(batch).logits, batch).backward()
    assert trace.host_reads.total() == 0
    assert sent.names == []
