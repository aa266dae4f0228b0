"""What keeps a device busy behind the host: memory it copies from, and reads that the host waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn import functional
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainers.conftest import Configure
from trainers.device_kinds import CPU, CUDA
from trainers.device_kinds.backend import Backend
from trainers.device_kinds.cuda_backend import CudaBackend
from trainers.entrypoint import train
from trainers.loop.evaluation import Evaluator
from trainers.models import dropout
from trainers.models.precision import Arithmetic, Autocast
from trainers.parallel.pipeline.deepspeed_engine import DeepSpeedPipeline
from trainers.parallel.pipeline.replica import PipelineReplica
from trainers.parallel.pipeline.torch_engine import TorchPipeline
from trainers.process import reset_process
from trainers.reporting import NeverStop, NullSink
from trainers.update import counts_underflow
from trainers.workers import GroupWorkers

HOST = torch.device("cpu")


def test_a_run_leaves_cudnns_attention_out(configure: Configure) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    reset_process(configure())
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


FLASH_3 = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
if not hasattr(torch.ops.flash_attn_3, "fwd"):
    library.define("fwd(Tensor q) -> Tensor")
    library.define("bwd(Tensor q) -> Tensor")
"""


@pytest.fixture
def flash_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that has the names of FlashAttention 3's operators, which torch registers as its own."""
    (tmp_path / "flash_attn_interface.py").write_text(FLASH_3, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("flash_attn_interface", None)
    restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.usefixtures("flash_3")
@pytest.mark.parametrize(
    "capability",
    [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)],
    ids=lambda parts: f"sm_{parts[0]}{parts[1]}",
)
def test_flash_attention_3_is_chosen_on_sm_90_and_left_by_the_next_run(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, configure: Configure
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reset_process(configure())
    CudaBackend().attend_without_dropout(torch.device("cuda", 0))
    assert current_flash_attention_impl() == ("FA3" if capability == (9, 0) else None)
    reset_process(configure())
    assert current_flash_attention_impl() is None


def test_without_its_package_torchs_flash_attention_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    CudaBackend().attend_without_dropout(torch.device("cuda", 0))
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("model", "steps", "chooses"),
    [
        ({"encoder": "packed", "attention_dropout": 0.0, "dropout": 0.1}, 1, True),
        ({"encoder": "packed", "dropout": 0.0}, 1, True),
        ({"encoder": "packed", "dropout": 0.1}, 1, False),
        ({"encoder": "packed", "attention_dropout": 0.1, "dropout": 0.0}, 1, False),
        ({"encoder": "packed", "dropout": 0.1}, 0, True),  # evaluates alone
        ({"encoder": "huggingface", "dropout": 0.0}, 1, False),
    ],
)
def test_runs_without_attention_dropout_choose_its_kernel(
    model: dict[str, Any], steps: int, chooses: bool, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is chosen, torch refuses dropout in every flash attention of the process."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(Backend, "attend_without_dropout", lambda self, device: chosen.append(device))
    train(configure(model={"name": "tiny", **model}, length={"steps": steps}), NullSink(), NeverStop())
    assert chosen == [torch.device("cpu")] * chooses


@pytest.mark.parametrize(
    ("every", "counted"), [(1, [0, 32, 64, 96]), (10, [9, 39, 69, 99]), (32, [31, 63, 95]), (50, [49, 99])]
)
def test_underflow_is_counted_in_the_first_report_of_each_32_steps(every: int, counted: list[int]) -> None:
    reports = [step for step in range(100) if (step + 1) % every == 0]
    assert [step for step in reports if counts_underflow(step, every)] == counted


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A process group whose other member is never there: what is sent is received by no one."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def test_the_numbers_of_a_step_leave_from_pinned_memory(
    alone_in_a_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[torch.Tensor, torch.device]] = []

    def send(self: object, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append((tensor, device))
        return tensor

    monkeypatch.setattr(CudaBackend, "send", send)
    device = torch.device("cuda", 0)
    assert GroupWorkers().sum([1.5, torch.tensor(2.0), 3], device) == [1.5, 2.0, 3.0]
    assert [(tensor.device, to) for tensor, to in sent] == [(HOST, device)]


def test_recordings_have_one_stream_that_waits_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            order.append((self.name, "waits for", other.name))

    class Graph:
        def replay(self) -> None:
            order.append("replay")

    @contextmanager
    def within(*_: object, **how: object) -> Iterator[None]:
        order.append(("within", how))
        yield

    own, current = Stream("own"), Stream("current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", within)
    recorder = CUDA.backend.recorder(Stream.device)
    assert recorder.rehearse(lambda: order.append("work") or 1) == 1
    assert order == [("own", "waits for", "current"), ("within", {}), "work", ("current", "waits for", "own")]
    order.clear()
    result, replay = recorder.record(lambda: order.append("work") or 2)
    replay()
    how = {"pool": "pool", "stream": own, "capture_error_mode": "thread_local"}
    assert (result, order) == (2, [("within", how), "work", "replay"])


def test_the_pool_of_recordings_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**20)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    backend, device = CudaBackend(), torch.device("cuda", 0)
    assert backend.peak_mib(device) == 1.0
    backend.recorder(device)
    assert backend.peak_mib(device) == 5.0
    backend.begin_run()
    assert backend.peak_mib(device) == 1.0


def test_a_gpu_is_sent_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[bool, bool]] = []

    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool) -> str:
            copied.append((device.type == "cuda", non_blocking))
            return "there"

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: Pinned())
    assert CUDA.backend.send(torch.zeros(2), torch.device("cuda", 0)) == "there"
    assert copied == [(True, True)]


class Reads(TorchDispatchMode):
    """Counts numbers that are read one by one: on a GPU the host waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_evaluation_waits_once_a_batch_and_copies_from_pinned_memory(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, reads, transfers = [], Reads(), []
    monkeypatch.setattr(type(CPU.backend), "pinning", lambda self, device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    forward, read = Evaluator._forward, Evaluator._read

    def watched(self: Evaluator, *given: Any) -> Any:
        with monkeypatch.context() as inside, reads:
            inside.setattr(type(CPU.backend), "synchronize", _refuse)
            return forward(self, *given)

    def transferred(self: Evaluator, *given: Any) -> Any:
        transfers.append(given)
        return read(self, *given)

    monkeypatch.setattr(Evaluator, "_forward", watched)
    monkeypatch.setattr(Evaluator, "_read", transferred)
    outcome = train(configure(length={"steps": 1}), NullSink(), NeverStop())
    assert outcome.summary["score"] is not None
    assert transfers
    assert reads.count == 0
    assert len(pinned) >= 2 * len(transfers)


def _refuse(*_: object) -> None:
    raise AssertionError("the host waits")


def test_attention_off_the_cpu_drops_what_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def recorded(query: torch.Tensor, *_: object, dropout_p: float = 0.0, **options: object) -> torch.Tensor:
        rates.append(dropout_p)
        return query

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    heads = [torch.empty(2, 3, 8, 4, device="meta") for _ in range(3)]
    for rate in (0.1, 0.0):
        dropout.attention(torch.nn.Identity(), *heads, None, rate)
    assert rates == [0.1, 0.0]


@pytest.mark.parametrize(
    ("arithmetic", "sent"),
    [(Arithmetic(), torch.float32), (Autocast(HOST, torch.bfloat16), torch.bfloat16)],
    ids=["fp32", "autocast"],
)
def test_stages_send_hidden_states_in_the_precision_of_the_products(
    arithmetic: Arithmetic, sent: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(distributed, "send", lambda tensor, *_: seen.append(tensor.dtype))
    monkeypatch.setattr(distributed, "recv", lambda tensor, *_: seen.append(tensor.dtype))
    batch = SimpleNamespace(computed_shape=torch.Size((2, 3)))
    stage: Any = SimpleNamespace(
        _device=HOST,
        _width=4,
        _groups=SimpleNamespace(line=None),
        _arithmetic=arithmetic,
        _step=SimpleNamespace(micro_batches=[batch], capacity=32),
        _rank_of=lambda stage: stage,
        _hidden_dtype=lambda: torch.float32,
    )
    with arithmetic.context():
        PipelineReplica._send(stage, torch.zeros(2, 3, 4), 1)
        assert PipelineReplica._receive(stage, batch, 1).dtype == torch.float32
    assert seen == [sent, sent]
    chunk: Any = lambda hidden, batch: torch.zeros(2, 3, 4)  # noqa: E731
    assert TorchPipeline.apply(stage, chunk, None, 0, last=False).dtype == sent


@pytest.mark.parametrize(
    ("arithmetic", "sent"),
    [(Arithmetic(), torch.float32), (Autocast(HOST, torch.bfloat16), torch.bfloat16)],
    ids=["fp32", "autocast"],
)
def test_deepspeeds_stages_send_hidden_states_in_the_same_format(
    arithmetic: Arithmetic, sent: torch.dtype
) -> None:
    """And their gradients: DeepSpeed sends those in the format of what they are of."""
    computed: list[torch.dtype] = []

    def layer(hidden: torch.Tensor, batch: object) -> torch.Tensor:
        computed.append(hidden.dtype)
        return hidden * 2.0

    stages: list[Any] = [
        SimpleNamespace(
            _device=HOST,
            _batch=object(),
            _arithmetic=arithmetic,
            _hidden_dtype=lambda: torch.float32,
            _layout=SimpleNamespace(chunks=[range(2), range(2, 4)]),
            _workers=SimpleNamespace(stage=stage, stages=2),
        )
        for stage in range(2)
    ]
    assert [[DeepSpeedPipeline.sends(stage, n) for n in range(4)] for stage in stages] == [
        [False, True, False, False], [False] * 4
    ]  # fmt: skip
    given = torch.ones(2, 3, 4)
    message = DeepSpeedPipeline.apply(stages[0], SimpleNamespace(apply=layer), given, sent=True)  # type: ignore[arg-type]
    received = message.detach().requires_grad_()
    last = DeepSpeedPipeline.apply(stages[1], SimpleNamespace(apply=layer), received, sent=False)  # type: ignore[arg-type]
    last.sum().backward()
    assert received.grad is not None
    assert (message.dtype, received.grad.dtype, last.dtype) == (sent, sent, torch.float32)
    assert computed == [torch.float32] * 2
