"""The search for the largest micro-batch, with a memory that ends where the test says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.config import Parallel
from trainers.data.batches import TrainingBatches
from trainers.data.tokens import TokenSet
from trainers.device_kinds import kind_of
from trainers.distillation.objective import Objective
from trainers.dry_runs import micro_batch
from trainers.dry_runs.micro_batch import (
    BatchSearch,
    DryRun,
    StageDryRun,
    choose,
    fits,
    forget,
    keep,
    key_of,
    largest,
    passes_held,
    recalled,
)
from trainers.entrypoint import classify, train
from trainers.errors import FailureClass, OutOfMemoryError
from trainers.loop.run_figures import RunFigures
from trainers.models import student
from trainers.models.origin import Preset
from trainers.models.precision import Arithmetic, Autocast
from trainers.parallel.pipeline.layers import StagePartition
from trainers.reporting import NeverStop, NullSink
from trainers.tasks import base
from trainers.workers import Workers

CUDA = torch.device("cuda", 0)


class Device:
    """A memory that holds so many examples, and counts how often it was asked."""

    def __init__(self, holds: int) -> None:
        self.holds, self.asked = holds, []

    def attempt(self, size: int) -> None:
        self.asked.append(size)
        if size > self.holds:
            raise torch.OutOfMemoryError(f"tried to allocate {size}")


class Pair(Workers):
    """One of two workers, whose other found a size of its own."""

    world = 2

    def __init__(self, other: int) -> None:
        self.other = other

    def all_gather(self, value):
        return [value, self.other]


@pytest.fixture(autouse=True)
def _named_device(monkeypatch):
    """Nothing here asks a GPU: its name and memory are given."""

    class Properties:
        name, total_memory = "Test GPU", 1 << 34

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)


@given(st.integers(1, 3000), st.integers(0, 4000))
def test_largest_divisor_that_fits_is_found_in_few_tries(share, holds):
    device = Device(holds)
    found = largest(share, lambda size: fits_without_collecting(device, size))
    assert found == max(
        (size for size in range(1, share + 1) if share % size == 0 and size <= holds), default=0
    )
    divisors = sum(share % size == 0 for size in range(1, share + 1))
    assert len(device.asked) <= 2 + divisors.bit_length()


def fits_without_collecting(device: Device, size: int) -> bool:
    try:
        device.attempt(size)
    except torch.OutOfMemoryError:
        return False
    return True


def test_running_out_of_memory_is_an_answer_and_other_errors_are_errors():
    device = Device(4)
    assert fits(lambda: device.attempt(4))
    assert not fits(lambda: device.attempt(5))
    with pytest.raises(RuntimeError, match="device-side assert"):
        fits(broken)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_a_library_that_cannot_allocate_is_out_of_memory(words):
    def attempt() -> None:
        raise RuntimeError(words)

    assert not fits(attempt)
    assert classify(RuntimeError(words))[0] is FailureClass.out_of_memory


def broken() -> None:
    raise RuntimeError("device-side assert")


def test_what_a_failed_try_held_is_free_afterwards():
    import weakref

    held = []

    def attempt() -> None:
        tensor = torch.empty(1000)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("too much")

    assert not fits(attempt)
    assert held[0]() is None


@pytest.mark.slow
def test_size_is_found_once_and_remembered(configure):
    config = configure(batch__global_size=64)
    device = Device(20)
    assert choose(config, Workers(), CUDA, {"layers": 2}, device.attempt) == 16
    again = Device(20)
    assert choose(config, Workers(), CUDA, {"layers": 2}, again.attempt) == 16
    assert again.asked == []
    other = Device(8)
    assert choose(config, Workers(), CUDA, {"layers": 12}, other.attempt) == 8


def test_workers_take_the_smallest(configure, tmp_path):
    parallel = {"strategy": "ddp", "workers": 2}
    config = configure(batch__global_size=64, parallel=parallel, workspace=in_folder(configure, tmp_path))
    assert choose(config, Pair(4), CUDA, {}, Device(100).attempt) == 4


def test_not_even_one_fits_is_out_of_memory_on_every_worker(configure, tmp_path):
    config = configure(batch__global_size=8, workspace=in_folder(configure, tmp_path))
    with pytest.raises(OutOfMemoryError, match="not even one example of length 48") as caught:
        choose(config, Workers(), CUDA, {}, Device(0).attempt)
    assert classify(caught.value)[0] is FailureClass.out_of_memory
    # Nothing is remembered, and the next run tries anew.
    assert choose(config, Workers(), CUDA, {}, Device(8).attempt) == 8


@pytest.mark.slow
def test_a_size_that_ran_out_of_memory_is_searched_anew(configure, tmp_path):
    config = configure(batch__global_size=8, workspace=in_folder(configure, tmp_path))
    assert choose(config, Workers(), CUDA, {}, Device(8).attempt) == 8
    assert choose(config, Workers(), CUDA, {"other": 1}, Device(4).attempt) == 4
    forget(config, CUDA, {})
    assert choose(config, Workers(), CUDA, {}, Device(2).attempt) == 2
    remembered = Device(1)
    assert choose(config, Workers(), CUDA, {"other": 1}, remembered.attempt) == 4
    assert remembered.asked == []


def in_folder(configure, folder) -> dict[str, object]:
    return {**configure().workspace.model_dump(), "cache": str(folder / "cache")}


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"task__max_length": 32},
        {"optimizer__name": "adan"},
        {"batch__global_size": 16},
        {"model__compile": True},
        {"numerics": {"parameters": "half"}, "precision": "bf16"},
    ],
)
def test_what_changes_memory_changes_the_key(configure, change):
    assert key_of(configure(), CUDA, {}) != key_of(configure(**change), CUDA, {})


def test_how_much_is_masked_changes_the_key(configure):
    def masking(**how):
        return key_of(configure(task={"name": "mlm", "path": "texts", **how}), CUDA, {})

    keys = {masking(), masking(masked_fraction=0.6), masking(whole_word=True)}
    assert len(keys) == 3


@pytest.mark.slow
def test_how_long_the_examples_are_changes_the_key(config_in, tmp_path, monkeypatch):
    """A size that was found on short texts may be too large for those that fill `task.max_length`."""
    shapes = []
    monkeypatch.setattr(micro_batch, "choose", lambda *run: shapes.append(run[3]) or 8)
    for length in (24, 40):
        folder = tmp_path / str(length)
        train(config_in(folder, task__max_length=length, length={"steps": 1}), NullSink(), NeverStop())
    first, second = ({**shape} for shape in shapes)
    assert (first.pop("longest example"), second.pop("longest example")) == (24, 40)
    assert first == second


def test_what_does_not_change_memory_leaves_the_key(configure):
    first = configure(seed=1, optimizer__learning_rate=1e-5, length={"steps": 9})
    assert key_of(first, CUDA, {}) == key_of(configure(), CUDA, {})


def test_on_the_cpu_and_with_a_number_nothing_is_tried(configure):
    device = Device(1)
    assert choose(configure(), Workers(), torch.device("cpu"), {}, device.attempt) == 8
    assert choose(configure(batch__micro_size=2), Workers(), CUDA, {}, device.attempt) == 2
    assert device.asked == []


def test_a_searched_size_is_a_budget_of_positions(configure):
    config = configure(batch__global_size=64)
    for device, size, budget in ((CUDA, 16, 768), (CUDA, 64, None), (torch.device("cpu"), 16, None)):
        assert micro_batch.in_tokens(config, size, device, 48).batch.micro_tokens == budget
    by_hand = configure(batch={"global_size": 64, "micro_size": 16})
    assert micro_batch.in_tokens(by_hand, 16, CUDA, 48).batch.micro_tokens is None


def test_a_budget_makes_fewer_micro_batches_and_none_larger_than_what_was_tried():
    lengths = np.random.default_rng(0).integers(4, 49, 640)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    data = TokenSet(np.ones(offsets[-1], dtype=np.uint16), offsets, np.zeros(640, dtype=np.int64))
    counts = []
    for budget in (None, 768):
        batches = TrainingBatches(
            data, seed=0, global_size=64, micro_size=16, replica=0, replicas=1, pad_id=0, multiple=8,
            micro_tokens=budget,
        )  # fmt: skip
        micros = [micro for step in range(10) for micro in batches[step].micro_batches]
        assert all(micro.input_ids.numel() <= 768 for micro in micros)
        assert sum(micro.examples for micro in micros) == 640
        counts.append(len(micros))
    assert counts[1] < 0.75 * counts[0]


def test_a_pipeline_keeps_enough_micro_batches_for_its_stages(configure, tmp_path):
    parallel = {"strategy": "pipeline", "workers": 2}
    config = configure(batch__global_size=72, parallel=parallel, workspace=in_folder(configure, tmp_path))
    device = Device(100)
    assert choose(config, Pair(100), CUDA, {}, device.attempt) == 9  # 8 for 2 stages
    assert device.asked == [9]
    assert choose(config, Pair(6), CUDA, {"other": 1}, Device(7).attempt) == 6


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("1f1b", (4, 3, 2, 1)), ("gpipe", (6,) * 4), ("interleaved", (11, 9, 7, 5)), ("zero_bubble", (8,) * 4)],
)
def test_stages_hold_as_many_passes_as_their_schedule_has_in_flight(schedule, held):
    parallel = Parallel(strategy="pipeline", workers=4, schedule=schedule)
    assert tuple(passes_held(parallel, stage, 6) for stage in range(4)) == held
    assert passes_held(parallel, 0, 1) == (2 if schedule in ("interleaved", "zero_bubble") else 1)


@pytest.mark.parametrize(("stage", "held"), [(0, 2), (1, 1)])
def test_trial_of_a_stage_holds_what_the_stage_holds(configure, stage, held):
    config = configure(parallel={"strategy": "pipeline", "workers": 2}, batch__global_size=8)
    data = base.build("imdb").prepare(config, Preset("tiny"), lambda line: None)
    model = student.build(
        Preset("tiny"),
        head=data.head,
        vocabulary_size=data.vocabulary_size,
        dropout=0.0,
        max_length=48,
        pad_id=data.pad_id,
    )
    partition = StagePartition.of(config.parallel, model, stage)
    lives: list[int] = []
    alive = 0

    def came(*_) -> None:
        nonlocal alive
        alive += 1
        lives.append(alive)

    def left(*_) -> None:
        nonlocal alive
        alive -= 1

    layer = next(part for part in model.encoder.encoder.layer if any(True for _ in part.parameters()))
    layer.register_forward_hook(came)
    layer.register_full_backward_hook(left)
    dry_run = StageDryRun(
        config, model, Objective(base.build("imdb")), Arithmetic(), data.train, device=torch.device("cpu"),
        pad_id=data.pad_id, multiple=1, transform=None, partition=partition, stage=stage,
        width=model.model.config.hidden_size,
    )  # fmt: skip
    dry_run.at_size(2)
    assert (max(lives), alive) == (held, 0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stage_of_half_parameters_is_rehearsed_with_hidden_states_of_their_format(configure):
    config = configure(
        parallel={"strategy": "pipeline", "workers": 2},
        batch__global_size=8,
        precision="bf16",
        numerics={"parameters": "half"},
    )
    data = base.build("imdb").prepare(config, Preset("tiny"), lambda line: None)
    model = student.build(
        Preset("tiny"), head=data.head, vocabulary_size=data.vocabulary_size, dropout=0.0, max_length=48,
        pad_id=data.pad_id,
    )  # fmt: skip
    arithmetic = Autocast(torch.device("cpu"), torch.bfloat16, half_parameters=True)
    arithmetic.prepare(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dry_run = StageDryRun(
        config, model, Objective(base.build("imdb")), arithmetic, data.train, device=torch.device("cpu"),
        pad_id=data.pad_id, multiple=1, transform=None,
        partition=StagePartition.of(config.parallel, model, 1), stage=1, width=model.model.config.hidden_size,
    )  # fmt: skip
    dry_run.rehearse(4)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_damaged_memory_is_no_answer_and_is_written_anew(tmp_path):
    file = tmp_path / "sizes" / "key"
    assert recalled(file) is None
    file.parent.mkdir()
    for text in ("", "{", "four", "0", "-4"):
        file.write_text(text)
        assert recalled(file) is None
    keep(file, 4)
    assert recalled(file) == 4


def test_runs_that_keep_an_answer_at_the_same_time_leave_a_whole_one(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: keep(tmp_path / "key", 65_536), range(40)))
    assert [(path.name, recalled(path)) for path in tmp_path.iterdir()] == [("key", 65_536)]


def test_an_answer_that_cannot_be_kept_is_no_error(tmp_path):
    (tmp_path / "sizes").write_text("a file in the place of the folder")
    keep(tmp_path / "sizes" / "key", 4)
    assert recalled(tmp_path / "sizes" / "key") is None


@pytest.mark.parametrize(
    ("place", "words", "forgotten"),
    [
        (
            "trainers.update.Update.apply",
            "a step does not fit in memory at micro-batch 4 and length 48",
            1,
        ),
        (
            "trainers.loop.evaluation.Evaluator._forward",
            "an evaluation does not fit in memory at batch 64",
            0,
        ),
        ("trainers.loop.assembly.build_optimizer", "the preparation of the first step does not fit", 0),
    ],
)
def test_what_ran_out_of_memory_is_named_and_a_steps_size_forgotten(
    configure, recorder, monkeypatch, place, words, forgotten
):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("too much")

    forgets = []
    monkeypatch.setattr(micro_batch, "choose", lambda *_: 4)
    monkeypatch.setattr(micro_batch, "forget", lambda config, *_: forgets.append(config.batch.micro_size))
    monkeypatch.setattr(place, out_of_memory)
    with pytest.raises(OutOfMemoryError, match=words):
        train(configure(), recorder, NeverStop())
    assert forgets == ["auto"] * forgotten


def test_figures_count_with_the_size_that_was_chosen(configure, recorder, monkeypatch):
    seen = []

    class Seen(RunFigures):
        def __init__(self, config, *arguments, **more):
            seen.append(config)
            super().__init__(config, *arguments, **more)

    monkeypatch.setattr(micro_batch, "choose", lambda *_: 2)
    monkeypatch.setattr("trainers.loop.assembly.RunFigures", Seen)
    train(configure(length={"steps": 1}), recorder, NeverStop())
    assert seen[0].accumulation == 4
    assert recorder.facts["config"]["batch"]["micro_size"] == "auto"


def test_run_after_one_that_did_not_fit_starts_clean(configure, recorder, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("too much")

    with monkeypatch.context() as broken:
        broken.setattr("trainers.update.Update.apply", out_of_memory)
        with pytest.raises(OutOfMemoryError, match="does not fit in memory at micro-batch 8"):
            train(configure(), recorder, NeverStop())
    outcome = train(configure(), type(recorder)(), NeverStop())
    assert outcome.status == "completed"


@pytest.mark.parametrize(
    ("model", "size"),
    [({"name": "tiny"}, 8), ({"name": "tiny", "encoder": "packed", "cuda_graphs": True}, 16)],
    ids=["launched", "recorded"],
)
def test_trial_tries_whole_batches_with_a_mask_also_where_examples_are_few(
    configure, monkeypatch, model, size
):
    """A recording keeps its memory next to that of passes that are not recorded."""
    config = configure(batch__global_size=8, task__train_examples=5, model=model)
    data = base.build("imdb").prepare(config, Preset("tiny"), lambda line: None)
    tried = []
    monkeypatch.setattr(DryRun, "_pass", lambda self, batch: tried.append(batch))
    dry_run = DryRun(
        config, torch.nn.Linear(1, 1), Objective(base.build("imdb")), Arithmetic(), data.train,
        device=torch.device("cpu"), pad_id=data.pad_id, multiple=1, transform=None,
    )  # fmt: skip
    dry_run.at_size(8)
    (batch,) = tried
    assert batch.input_ids.shape == batch.attention_mask.shape == (size, dry_run.longest)


def test_trial_leaves_no_gradient_and_counts_what_the_optimizer_will_keep(configure, recorder, monkeypatch):
    seen = {}

    def chosen(config, workers, device, shape, attempt):
        allocated = []
        empty = torch.empty

        def counting(*arguments, **options):
            if options.get("dtype") is torch.uint8:
                allocated.append(arguments[0])
            return empty(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", counting)
            attempt(3)
        dry_run = attempt.__self__
        seen["gradients"] = [p.grad for p in dry_run._module.parameters() if p.grad is not None]
        seen["bytes"] = allocated
        seen["parameters"] = sum(p.numel() for p in dry_run._module.parameters())
        return 4

    monkeypatch.setattr(micro_batch, "choose", chosen)
    outcome = train(configure(), recorder, NeverStop())
    assert outcome.status == "completed"
    assert seen["gradients"] == []
    assert seen["bytes"] == [8 * seen["parameters"]]  # two fp32 moments
    assert (recorder.facts["micro_size"], recorder.facts["accumulation"]) == (4, 2)


def seeker(configure, tmp_path, device=CUDA, workers=None, **fields):
    config = configure(batch__global_size="largest", workspace=in_folder(configure, tmp_path), **fields)
    return BatchSearch(config, workers or Workers(), device, {}, lambda: lambda: 0.0)


@pytest.mark.parametrize(
    ("holds", "examples", "found"),
    [(1, 90, 1), (13, 90, 13), (100, 90, 90), (100, 9000, 96), (3000, 9000, 2816)],
)
def test_largest_batch_is_found_to_an_eighth_within_the_training_data(
    configure, tmp_path, holds, examples, found
):
    device = Device(holds)
    config = seeker(configure, tmp_path).found(device.attempt, examples)
    assert (config.batch.global_size, config.micro_size, config.accumulation) == (found, found, 1)
    assert found <= holds < found * 9 / 8 + 1 or found == examples
    assert len(device.asked) <= 2 * examples.bit_length()


def test_largest_batch_is_that_of_the_fullest_worker_times_their_number(configure, tmp_path):
    parallel = {"strategy": "ddp", "workers": 2}
    search = seeker(configure, tmp_path, workers=Pair(12), parallel=parallel)
    assert search.found(Device(50).attempt, 1000).batch.global_size == 24


def test_a_batch_is_found_once_per_shape_and_a_resumed_run_keeps_its_own(configure, tmp_path):
    assert seeker(configure, tmp_path).found(Device(8).attempt, 90).batch.size == 8
    idle = Device(0)
    seed = seeker(configure, tmp_path, seed=3)
    assert seed.found(idle.attempt, 90).batch.size == 8
    assert idle.asked == []
    seed.forget()
    assert seeker(configure, tmp_path).found(idle.attempt, 90).batch.size == 8
    assert seeker(configure, tmp_path, precision="bf16").found(idle.attempt, 90).batch.size == 8, "its folder"
    (tmp_path / "checkpoints" / "batch-size.json").unlink()
    with pytest.raises(OutOfMemoryError, match="not even one example of length 48"):
        seeker(configure, tmp_path, precision="bf16").found(idle.attempt, 90)


def test_on_the_cpu_a_run_trains_with_what_its_declared_memory_holds(configure, recorder, tmp_path):
    """On a CPU the limit is the memory that its worker reserves: it grows with it, and is kept."""
    found = {}
    train(configure(batch__global_size=1, length={"steps": 1}), recorder, NeverStop())
    here_mib = kind_of(torch.device("cpu")).backend.peak_mib(torch.device("cpu"))
    for more_mib in (60, 240):
        config = configure(
            batch__global_size="largest",
            length={"epochs": 1},
            task__max_length=256,
            memory_gib=(here_mib + more_mib) / 0.9 / 1024,
            workspace={**configure().workspace.model_dump(), "checkpoints": str(tmp_path / str(more_mib))},
        )
        outcome = train(config, recorder, NeverStop())
        assert outcome.status == "completed"
        size = found[more_mib] = recorder.facts["global_size"]
        assert recorder.facts["config"]["batch"]["global_size"] == "largest"
        assert (recorder.facts["micro_size"], recorder.facts["accumulation"]) == (size, 1)
        assert f"batch.global_size largest: {size} examples" in recorder.logs
        assert outcome.summary["steps"] == -(-recorder.facts["train_examples"] // size)
    assert 1 <= found[60] < found[240]
