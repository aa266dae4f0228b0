"""The CUDA kernels against the float64 reference; what they promise about streams, graphs and launches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cuda_ext import IMPLEMENTATIONS, Adan, ConfigurationError, counters, measure_parity, native
from tests.cuda_ext.paired import MOVEMENT_BOUNDS, SIZES, VALUE_BOUNDS, Paired, misaligned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

STORAGE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16-master": (torch.bfloat16, {}),
    "bf16-split": (torch.bfloat16, {"master_weights": "split"}),
    "fp16-master": (torch.float16, {}),
}


@pytest.fixture(scope="module", autouse=True)
def cuda_kernels() -> None:
    if reason := native.why_unavailable("cuda"):
        pytest.fail(f"a GPU is here and its kernels are not: {reason}")


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, device="cuda") for size in sizes]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("storage", STORAGE)
def test_follows_the_reference_at_steps_1_2_and_100(implementation: str, storage: str) -> None:
    dtype, options = STORAGE[storage]
    values = zeros(*SIZES, dtype=dtype)
    paired = Paired([(values, {"weight_decay": 0.01})], implementation=implementation, **options)
    for steps in (1, 1, 98):
        paired.step(steps)
        assert paired.worst_error() < MOVEMENT_BOUNDS[dtype]
        assert paired.worst_error(of="value") < VALUE_BOUNDS[dtype]


@pytest.mark.parametrize("implementation", ["single_fused", "multi_fused"])
@pytest.mark.parametrize(
    "options",
    [
        {"no_prox": True, "weight_decay": 0.1},
        {"maximize": True},
        {"max_grad_norm": 0.5},
        {"betas": (0.0, 0.0, 0.0)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_follows_the_reference_with_each_option(implementation: str, options: dict[str, Any]) -> None:
    paired = Paired(
        [(zeros(3, 1025, 30522), {}), (zeros(9), {"lr": 0.1})], implementation=implementation, **options
    )
    paired.step(5)
    assert paired.worst_error() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_misaligned_views_follow_the_reference(dtype: torch.dtype) -> None:
    values = [misaligned(size, dtype, "cuda") for size in SIZES]
    paired = Paired([(values + zeros(40_000, dtype=dtype), {})], implementation="multi_fused")
    paired.step(3)
    assert paired.worst_error() < MOVEMENT_BOUNDS[dtype]


def test_forty_groups_and_empty_tensors() -> None:
    groups = [(zeros(5, 0), {"lr": 1e-3 * (index + 1)}) for index in range(40)]
    paired = Paired(groups, implementation="multi_fused", max_grad_norm=1.0)
    paired.step(3)
    assert paired.worst_error() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parity_record(dtype: torch.dtype) -> None:
    record = measure_parity("multi_fused", device="cuda", dtype=dtype)
    assert record.passed
    assert record.kernels_ran["cuda_launches"] == record.steps


def test_one_launch_without_clipping_and_two_with_and_a_table_only_when_it_changes() -> None:
    for max_grad_norm, launches in ((0.0, 1), (1.0, 2)):
        params = [torch.nn.Parameter(value) for value in zeros(*SIZES)]
        optimizer = Adan(params, implementation="multi_fused", max_grad_norm=max_grad_norm)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        before = counters()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            optimizer.step()
            torch.cuda.synchronize()
        after = counters()
        assert after["cuda_tables"] == before["cuda_tables"]
        assert after["cuda_launches"] - before["cuda_launches"] == 1
        kernels = [e.name for e in recorded.events() if "CUDA" in str(e.device_type) and "kernel" in e.name]
        assert len(kernels) == launches
        assert sum("adan_kernel" in name for name in kernels) == 1
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        assert counters()["cuda_tables"] >= after["cuda_tables"]


def test_a_step_with_clip_unscale_and_skip_never_synchronises(no_synchronisation: None) -> None:
    params = [torch.nn.Parameter(value) for value in zeros(*SIZES)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = Adan(params, implementation="multi_fused", max_grad_norm=1.0)
    optimizer.grad_scale = torch.full((), 2.0, device="cuda")
    optimizer.found_inf = torch.zeros((), device="cuda")
    for _ in range(3):
        optimizer.step()


def test_found_inf_leaves_everything_as_it_was() -> None:
    params = [torch.nn.Parameter(value) for value in zeros(3, 1025)]
    optimizer = Adan(params, implementation="multi_fused")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(1, device="cuda")
    for param in params:
        param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[number][name])
    optimizer.found_inf = torch.zeros(1, device="cuda")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scaler_changes_nothing_but_the_range(unscale_first: bool) -> None:
    results = []
    for scaled in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(17, 3).cuda()
        optimizer = Adan(model.parameters(), implementation="multi_fused", max_grad_norm=0.5)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            batch = torch.randn(8, 17, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_graph_replays_the_eager_steps_and_reads_the_present_rate() -> None:
    rate = torch.full((), 1e-3, device="cuda")
    eager, captured = ([torch.nn.Parameter(value) for value in zeros(*SIZES)] for _ in range(2))
    optimizers = [
        Adan(params, lr=rate, implementation="multi_fused", capturable=True, max_grad_norm=1.0)
        for params in (eager, captured)
    ]
    for a, b in zip(eager, captured, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizers[1].step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    optimizers[0].step()
    for step in range(3):
        rate.fill_(1e-3 * (step + 1))
        for a, b in zip(eager, captured, strict=True):
            a.grad.copy_(torch.randn_like(a))
            b.grad.copy_(a.grad)
        optimizers[0].step()
        graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


def test_capture_without_capturable_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(5, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = Adan([param], implementation="multi_fused")
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ConfigurationError, match="capturable"), torch.cuda.graph(graph):
        optimizer.step()


def test_the_callers_stream_is_used() -> None:
    """The gradient is written on the side stream after a wait: a step on another stream would miss it."""
    param = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    param.grad = torch.zeros_like(param)
    optimizer = Adan([param], lr=0.5, implementation="multi_fused")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        param.grad.fill_(1.0)
        optimizer.step()
    side.synchronize()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -0.5))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    values = [torch.zeros(1025, device="cuda:1"), torch.zeros(1025, device="cuda:0")]
    paired = Paired([(values, {})], implementation="multi_fused")
    paired.step(3)
    assert paired.worst_error() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_is_written_beside_the_buffers(dtype: torch.dtype, offset: int) -> None:
    guard, size = 64, 33_001
    buffers = []

    def guarded(wanted: torch.dtype) -> torch.Tensor:
        memory = torch.full((2 * guard + offset + size,), -77.0, device="cuda").to(wanted)
        inside = memory[guard + offset : guard + offset + size]
        inside.fill_(0.5)
        buffers.append(memory)
        return inside

    param = torch.nn.Parameter(guarded(dtype))
    optimizer = Adan([param], implementation="multi_fused", max_grad_norm=1.0)
    param.grad = guarded(dtype)
    optimizer.step()
    state = optimizer.state[param]
    for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "g_prev", "master"):
        if name in state:
            inside = guarded(state[name].dtype)
            inside.copy_(state[name])
            state[name] = inside
    optimizer.step()
    for memory in buffers:
        for edge in (memory[: guard + offset], memory[guard + offset + size :]):
            assert torch.equal(edge, torch.full_like(edge, -77.0))


def test_a_tensor_past_two_to_the_31_elements() -> None:
    size = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    param = torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.zeros_like(param)
    param.grad[-3:] = 1.0
    optimizer = Adan(
        [param], lr=0.5, master_weights="none", moments_dtype=torch.bfloat16, implementation="multi_fused"
    )
    optimizer.step()
    assert param.detach()[-4:].tolist() == [0.0, -0.5, -0.5, -0.5]
    assert float(param.detach()[:1000].abs().max()) == 0.0


def test_state_moves_from_the_gpu_to_the_cpu_and_back() -> None:
    on_gpu = [torch.nn.Parameter(torch.zeros(1025, device="cuda"))]
    optimizer = Adan(on_gpu, implementation="multi_fused")
    on_gpu[0].grad = torch.ones(1025, device="cuda")
    optimizer.step()
    on_cpu = [torch.nn.Parameter(on_gpu[0].detach().cpu())]
    other = Adan(on_cpu, implementation="multi_fused")
    other.load_state_dict(optimizer.state_dict())
    assert other.state[on_cpu[0]]["step"].device.type == "cpu"
    for params, one in ((on_gpu, optimizer), (on_cpu, other)):
        params[0].grad = torch.full_like(params[0], 0.5)
        one.step()
    torch.testing.assert_close(on_gpu[0].detach().cpu(), on_cpu[0].detach(), rtol=1e-5, atol=1e-7)
