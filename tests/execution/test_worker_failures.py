"""Which class an error of a worker or of Ray under it has, and which of several explains the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.execution.training import failure_of
from service.execution.worker_group import worst
from trainers.errors import BadDataError, FailureClass, NotFiniteError


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: BadDataError("a.jsonl: line 3"), FailureClass.bad_data),
        (lambda _: NotFiniteError("loss is NaN"), FailureClass.not_finite),
        (
            lambda exceptions: exceptions.RayTaskError("train", "...", BadDataError("line 3")),
            FailureClass.bad_data,
        ),
        (lambda exceptions: exceptions.OutOfMemoryError("memory"), FailureClass.out_of_memory),
        (lambda exceptions: exceptions.ActorDiedError(), FailureClass.infrastructure),
        (
            lambda exceptions: exceptions.ActorUnavailableError("memory usage threshold was reached", None),
            FailureClass.out_of_memory,
        ),
        (lambda exceptions: exceptions.WorkerCrashedError(), FailureClass.infrastructure),
        (lambda exceptions: exceptions.NodeDiedError("gone"), FailureClass.infrastructure),
        (lambda exceptions: exceptions.GetTimeoutError("slow"), FailureClass.infrastructure),
        (lambda _: KeyError("x"), FailureClass.bug),
    ],
)
def test_class_of_an_error(make: Callable[[Any], Exception], expected: FailureClass) -> None:
    # Not at the top: Ray reads its authentication mode when it is first imported, and the
    # session's cluster sets it.
    from ray import exceptions

    failure, message = failure_of(make(exceptions))
    assert failure is expected
    assert "\n" not in message


def test_a_dead_worker_explains_what_its_peer_saw() -> None:
    died = (FailureClass.infrastructure, "a worker process died")
    assert worst([(FailureClass.bug, "Connection closed by peer"), died]) == died
