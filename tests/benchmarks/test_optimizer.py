"""How the optimizer's benchmark measures, where a GPU is not needed to see it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import optimizer


def test_steps_take_two_sets_of_gradients_in_turn() -> None:
    params = optimizer.make_parameters([(7, 5), (3,)], "cpu", torch.float32)
    first = [param.grad.clone() for param in params if param.grad is not None]
    places = [param.grad.data_ptr() for param in params if param.grad is not None]
    gradients = optimizer.Gradients(params)
    gradients.alternate()
    assert not any(torch.equal(a, b.grad) for a, b in zip(first, params, strict=True) if b.grad is not None)
    gradients.alternate()
    assert all(torch.equal(a, b.grad) for a, b in zip(first, params, strict=True) if b.grad is not None)
    assert [param.grad.data_ptr() for param in params if param.grad is not None] == places


def test_the_host_is_ahead_of_the_device_when_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, _end: object) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"{cycles / 2e9:.0e} s"))
    assert optimizer.timed_ms(lambda: done.append("step"), "cuda") == 1.5
    assert done == ["1e-02 s", "event", "step", "event"]


class Counter:
    """A GPU's counter that is refreshed every 100 ms, of a device that is another one by its number."""

    NVML_INDEX_OF_ANOTHER = 0

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-b"
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> float:
        assert self.clock.launched == self.clock.done, "read while the device works"
        return 700.0 * (self.clock.now_ms // 100) * 100


def test_energy_is_read_by_uuid_over_seconds_with_the_device_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms at 700 W: a refresh more or less is then a few percent."""
    clock = SimpleNamespace(now_ms=0.0, launched=0, done=0)

    def launch() -> None:
        clock.launched += 1

    def synchronize() -> None:
        clock.now_ms += clock.launched - clock.done
        clock.done = clock.launched

    monkeypatch.setitem(sys.modules, "pynvml", Counter(clock))  # type: ignore[arg-type]
    properties: Any = lambda device: SimpleNamespace(uuid="b")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(optimizer.time, "perf_counter", lambda: clock.now_ms / 1e3)
    assert optimizer.energy_mj(launch, "cuda") == pytest.approx(700.0, rel=0.05)
    assert clock.now_ms >= 3000.0
