"""Errors that end a training run, each with the failure class that decides the retry."""

from enum import StrEnum
from typing import ClassVar


class FailureClass(StrEnum):
    """Why an attempt failed; the retry decision and people's filters go by it."""

    infrastructure = "infrastructure"  # A machine, process or network failed
    storage = "storage"  # A checkpoint, a prediction or the cache cannot be written or read
    out_of_memory = "out_of_memory"  # The batch does not fit in memory: a *result* of the grid
    not_finite = "not_finite"  # Loss or gradients became NaN or infinite
    bad_data = "bad_data"  # The dataset is missing, empty, malformed or has changed between attempts
    bad_spec = "bad_spec"  # The spec asks for something impossible
    preempted = "preempted"  # The cluster took the resources back
    lost = "lost"  # Cause unknown: the driver and its lease are gone
    bug = "bug"  # An unexpected error; the traceback is in the log


FAILURES_OF_MACHINES = frozenset({FailureClass.infrastructure, FailureClass.storage, FailureClass.lost})
"""Failures that are not the run's own."""


class TrainingError(Exception):
    """Base of all errors that a run ends with. The message is one line that says what to do."""

    failure_class: ClassVar[FailureClass] = FailureClass.bug


class BadSpecError(TrainingError):
    """The run's configuration cannot be carried out here."""

    failure_class = FailureClass.bad_spec


class BadDataError(TrainingError):
    """The dataset cannot be read: names file, line and field."""

    failure_class = FailureClass.bad_data


class NotFiniteError(TrainingError):
    """Loss or gradient norm is NaN or infinite on some worker."""

    failure_class = FailureClass.not_finite


class OutOfMemoryError(TrainingError):
    """A step does not fit into the device's memory."""

    failure_class = FailureClass.out_of_memory


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read back."""

    failure_class = FailureClass.storage


class CacheError(TrainingError):
    """The node's cache cannot be written, or what belongs in it cannot be read from the storage."""

    failure_class = FailureClass.storage


class PipelineError(TrainingError):
    """A stage of a pipeline is gone, or said nothing for too long; names it."""

    failure_class = FailureClass.infrastructure


_ALLOCATION = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "device_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
)


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _ALLOCATION)
