"""Which class an error of a worker or of Ray under it has, and which of several explains the rest."""

from __future__ import annotations

import pytest
from ray import exceptions

from service.execution.training import failure_of
from service.execution.worker_group import worst
from trainers.errors import BadDataError, FailureClass, NotFiniteError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BadDataError("a.jsonl: line 3"), FailureClass.bad_data),
        (NotFiniteError("loss is NaN"), FailureClass.not_finite),
        (exceptions.RayTaskError("train", "...", BadDataError("line 3")), FailureClass.bad_data),
        (exceptions.OutOfMemoryError("memory"), FailureClass.out_of_memory),
        (exceptions.ActorDiedError(), FailureClass.infrastructure),
        (
            exceptions.ActorUnavailableError("memory usage threshold was reached", None),
            FailureClass.out_of_memory,
        ),
        (exceptions.WorkerCrashedError(), FailureClass.infrastructure),
        (exceptions.NodeDiedError("gone"), FailureClass.infrastructure),
        (exceptions.GetTimeoutError("slow"), FailureClass.infrastructure),
        (KeyError("x"), FailureClass.bug),
    ],
)
def test_class_of_an_error(error: Exception, expected: FailureClass) -> None:
    failure, message = failure_of(error)
    assert failure is expected
    assert "\n" not in message


def test_a_dead_worker_explains_what_its_peer_saw() -> None:
    died = (FailureClass.infrastructure, "a worker process died")
    assert worst([(FailureClass.bug, "Connection closed by peer"), died]) == died
