"""Which class an error of a worker or of Ray under it has, and which of several explains the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.workers.worker_attempt import failure_of, failure_of_group
from trainers.config import Parallel
from trainers.errors import BadDataError, FailureClass, NotFiniteError, PipelineError


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


DEAD = "DEAD"
PEER_GONE = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("failures", "kind", "says"),
    [
        ({0: PEER_GONE, 1: DEAD}, FailureClass.infrastructure, "worker 1 of 3: a worker process died"),
        (
            {0: PEER_GONE, 2: PEER_GONE},
            FailureClass.infrastructure,
            "worker 0 of 3 lost another: RuntimeError",
        ),
        ({0: PEER_GONE, 2: KeyError("x")}, FailureClass.bug, "worker 2 of 3: KeyError"),
        ({0: ConnectionError("reset"), 1: BadDataError("line 3")}, FailureClass.bad_data, "worker 1 of 3"),
        ({0: KeyError("x"), 1: DEAD}, FailureClass.infrastructure, "worker 1 of 3: a worker process died"),
        ({1: NotFiniteError("loss is NaN"), 2: PEER_GONE}, FailureClass.not_finite, "worker 1 of 3"),
    ],
)
def test_the_failure_of_a_group_is_the_one_that_explains_the_others(
    failures: dict[int, Any], kind: FailureClass, says: str
) -> None:
    from ray.exceptions import ActorDiedError

    errors = {rank: ActorDiedError() if error is DEAD else error for rank, error in failures.items()}
    found, message = failure_of_group(errors, Parallel(strategy="ddp", workers=3))
    assert found is kind
    assert message.startswith(says)


LOST = PipelineError("stage 0 of 2 lost stage 1 (rank 2): it died, or said nothing for 60 s")


@pytest.mark.parametrize(
    ("failures", "kind", "says"),
    [
        ({0: LOST, 3: DEAD}, FailureClass.infrastructure, "worker 3 of 4 (stage 1): a worker process died"),
        (
            {0: LOST},
            FailureClass.infrastructure,
            "worker 0 of 4 (stage 0) lost another: stage 0 of 2 lost stage 1",
        ),
        ({0: LOST, 2: KeyError("x")}, FailureClass.bug, "worker 2 of 4 (stage 1): KeyError"),
    ],
)
def test_the_failure_of_a_pipeline_names_the_stage(
    failures: dict[int, Any], kind: FailureClass, says: str
) -> None:
    from ray.exceptions import ActorDiedError

    errors = {rank: ActorDiedError() if error is DEAD else error for rank, error in failures.items()}
    found, message = failure_of_group(errors, Parallel(strategy="pipeline", workers=4, stages=2))
    assert found is kind
    assert message.startswith(says)
