"""Workers open their process group themselves, and say in one line why they cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from service.workers.worker_attempt import failure_of_group
from trainers.config import Parallel
from trainers.errors import FailureClass


@pytest.mark.parametrize(("own", "chosen"), [("cuda:3", ["cuda:3"]), ("cpu", [])])
@pytest.mark.parametrize("function", ["run", "measurement"])
def test_a_worker_takes_its_gpu_before_anything_warms_one_up(
    monkeypatch: pytest.MonkeyPatch, function: str, own: str, chosen: list[str]
) -> None:
    """All GPUs of a node are visible: the first would get a context and a warm-up of every worker."""
    import ray.train
    import ray.train.torch
    import torch

    from service.workers.profiling import ProfileOrder, _measure_in_group
    from service.workers.worker_group import _serve

    class Ready(Exception):
        pass

    calls: list[str] = []

    def make_ready(device: str) -> None:
        calls.append("make_ready")
        raise Ready

    order = SimpleNamespace(shape=SimpleNamespace(device="cuda"))
    monkeypatch.setattr(ProfileOrder, "decode", lambda word: order)
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 3))
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device(own))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr("trainers.entrypoint.make_ready", make_ready)
    with pytest.raises(Ready):
        if function == "run":
            _serve({"relay": None, "group": "g", "shared": None, "device": "cuda"})
        else:
            _measure_in_group({"order": "", "shared": ""})
    assert calls == [*chosen, "make_ready"]


@pytest.mark.parametrize(
    ("device", "variable", "shown"),
    [("cpu", "GLOO_SOCKET_IFNAME", "eth7"), ("cuda", "NCCL_SOCKET_IFNAME", "not set")],
)
def test_a_group_that_cannot_be_opened_names_its_interface_in_one_line(
    monkeypatch: pytest.MonkeyPatch, device: str, variable: str, shown: str
) -> None:
    # Not at the top: Ray reads its authentication mode when it is first imported, and the
    # session's cluster sets it.
    import ray.train
    import ray.train.torch.config as of_ray

    from service.workers import process_group

    def refuse(**_: object) -> None:
        raise RuntimeError("[enforce fail at device.cc:84]\nUnable to find address for: eth7")

    # As in a worker of which Ray Train says that it is rank 0 of 2.
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(of_ray, "_set_torch_distributed_env_vars", lambda: None)
    monkeypatch.setattr(of_ray, "_setup_torch_process_group", refuse)
    monkeypatch.setattr(process_group, "choose_interface", lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "")  # so that both are put back
    monkeypatch.setenv("MASTER_PORT", "")

    with (
        pytest.raises(process_group.NoProcessGroup) as caught,
        process_group.process_group("10.0.0.5", 4711, device=device),
    ):
        pytest.fail("it is open")
    assert caught.value.failure_class is FailureClass.infrastructure
    assert "\n" not in str(caught.value)
    assert f"{variable} ({shown})" in str(caught.value)


def test_a_worker_that_died_explains_why_the_others_have_no_group() -> None:
    from ray.exceptions import ActorDiedError

    from service.workers.process_group import NoProcessGroup

    failures = {0: NoProcessGroup("gloo cannot open the process group"), 1: ActorDiedError()}
    kind, message = failure_of_group(failures, Parallel(strategy="ddp", workers=2))
    assert (kind, message) == (FailureClass.infrastructure, "worker 1 of 2: a worker process died")
