"""The door: what it imports, and what it makes of failures."""

from __future__ import annotations

import errno

import pytest
import torch

from trainers.entrypoint import classify, train
from trainers.errors import BadDataError, CheckpointError, FailureClass, OutOfMemoryError
from trainers.reporting import NeverStop, NullSink
from trainers.tasks.classification.task import Imdb


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (BadDataError("x"), FailureClass.bad_data),
        (CheckpointError("x"), FailureClass.storage),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), FailureClass.out_of_memory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), FailureClass.out_of_memory),
        (MemoryError(), FailureClass.out_of_memory),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), FailureClass.infrastructure),
        (torch.distributed.DistBackendError("NCCL error"), FailureClass.infrastructure),
        (ConnectionResetError("gone"), FailureClass.infrastructure),
        (OSError(errno.ENOSPC, "No space left on device"), FailureClass.storage),
        (PermissionError(errno.EACCES, "Permission denied"), FailureClass.storage),
        (ZeroDivisionError("division by zero"), FailureClass.bug),
    ],
)
def test_every_exception_has_a_class_and_one_line(error, failure):
    found, line = classify(error)
    assert found is failure
    assert line
    assert "\n" not in line


def test_long_messages_are_cut():
    assert len(classify(ValueError("x\n" * 5000))[1]) == 1000


def test_out_of_memory_names_the_batch(configure, monkeypatch):
    def full(self, logits, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Imdb, "loss", full)
    with pytest.raises(OutOfMemoryError, match="micro-batch 8 and length 48"):
        train(configure(), NullSink(), NeverStop())


def test_a_failed_run_leaves_no_thread(configure, monkeypatch):
    import threading

    before = threading.active_count()
    monkeypatch.setattr(Imdb, "loss", lambda self, logits, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(configure(), NullSink(), NeverStop())
    assert threading.active_count() == before
