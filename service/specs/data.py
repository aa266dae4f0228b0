"""Checks the data that a spec names, as far as its first rows show.

For the API, `stillhouse validate` and `stillhouse preview`. Results are remembered for as long as the files
stay as they are. Data that this process cannot see, such as the hub's, is checked by the first run.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from cachetools import LRUCache

from service.config.document import Problem, first_problems
from service.specs.experiment import ExperimentSpec, nothing
from service.specs.paths import Roots
from trainers.config import TaskConfig, Workspace
from trainers.data.cache import in_use
from trainers.data.paths import HUB, UnusablePath, find
from trainers.data.storage import Place, copied
from trainers.errors import CacheError

_FILES = 64  # Files of a folder that are compared one by one; of more, only the folders are
_REMEMBERED = 1024
_COPIED_BYTES = 64 << 20

Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Dataset:
    path: Place = field(compare=False)
    task: TaskConfig = field(compare=False)
    key: str  # Tells it apart from all others


_FOUND: LRUCache[str, tuple[Signature, Sequence[str]]] = LRUCache(_REMEMBERED)
"""Results of earlier checks, with the signature from before each dataset was read."""
_LOCK = threading.Lock()


class UnreadData(Exception):
    """The first rows of a dataset have to be read, because it is new or has changed."""


def data_problems(
    tasks: Iterable[TaskConfig],
    roots: Roots,
    *,
    before_each: Callable[[], None] = nothing,
    may_read: bool = True,
) -> list[Problem]:
    """Returns the first problems in the first rows of the datasets that runs name.

    `before_each` is called before each dataset, and may raise to end the check. With `may_read` False it
    answers from earlier checks, or raises `UnreadData`.
    """
    folders = roots("data")

    def mistakes() -> Iterator[str]:
        seen: set[str] = set()  # Several ways of reading a dataset find the same.
        for dataset in _datasets(tasks, folders):
            before_each()
            for mistake in _mistakes(dataset, folders, may_read):
                if mistake not in seen:
                    seen.add(mistake)
                    yield mistake

    return first_problems(Problem("bad-data", "task.path", mistake) for mistake in mistakes())


def room_problems(
    specs: Iterable[ExperimentSpec], roots: Roots, *, before_each: Callable[[], None] = nothing
) -> list[Problem]:
    """Returns token budgets of batches that an example of the data exceeds, as far as its first rows show.

    Runs that train on a choice of the examples are checked once they have chosen. `specs` are those of the
    runs of a grid, their data checked; `before_each` is called before each dataset is read.
    """
    folders = roots("data")

    def too_small() -> Iterator[Problem]:
        for spec in specs:
            limit, task = spec.batch.micro_tokens, spec.task
            if (
                limit is None
                or limit >= task.max_length
                or task.train_examples is not None
                or not spec.trains
            ):
                continue
            for dataset in _datasets([task], folders):
                before_each()
                longest = _looked_up("longest_example", dataset, _signature(dataset.path)[0], folders) or 0
                if limit < longest:
                    yield Problem(
                        "out-of-range",
                        "batch.micro_tokens",
                        f"{limit} is below the longest training example, which has at least {longest} "
                        f"tokens; raise it to task.max_length {task.max_length}, or lower task.max_length",
                    )

    return first_problems(dict.fromkeys(too_small()))


def train_examples(task: TaskConfig, roots: Sequence[Place]) -> int | None:
    """Returns about how many examples of a dataset at hand are trained on; None = it cannot be read here."""
    for dataset in _datasets([task], roots):
        return _looked_up("train_count", dataset, _signature(dataset.path)[0], tuple(roots))
    return None


@functools.lru_cache(maxsize=_REMEMBERED)
def _looked_up(what: str, dataset: _Dataset, _signature: Signature, roots: tuple[Place, ...]) -> int | None:
    """Returns what a function of `trainers.tasks.inspection` finds in a dataset; None = it is not at hand."""
    # Imported here: only specs with data at hand pay for the import.
    from trainers.tasks import inspection

    with at_hand(dataset.path, roots) as (near, within):
        if near is None:
            return None
        found: int | None = getattr(inspection, what)(near, dataset.task, roots=within)
        return found


@contextmanager
def at_hand(
    path: Place, roots: Sequence[Place], workspace: Workspace | None = None
) -> Iterator[tuple[Path | None, Sequence[Path]]]:
    """Yields where a dataset can be read, and the roots that it may not lead out of.

    A store's is copied to the workspace's cache, or for the moment; None = it has more than 64 MiB, or cannot
    be read now, and is left to the run.
    """
    if isinstance(path, Path):
        yield path, [root for root in roots if isinstance(root, Path)]
        return
    with TemporaryDirectory(prefix="stillhouse-data-") as folder, ExitStack() as stack:
        if workspace is not None:
            stack.enter_context(in_use(workspace))
        near: Path | None = None
        with suppress(OSError, CacheError):
            if sum(status.st_size for status in path.files().values()) <= _COPIED_BYTES:
                near = copied(path, Path(folder if workspace is None else workspace.cache))
        yield near, ()


def _mistakes(dataset: _Dataset, roots: Sequence[Place], may_read: bool) -> Sequence[str]:
    signature, exact = _signature(dataset.path)
    with _LOCK:
        known, mistakes = _FOUND.get(dataset.key, (None, ()))
    if known == signature:
        return mistakes
    if not may_read:
        raise UnreadData
    # Imported here: only specs with data at hand pay for the import.
    from trainers.tasks.inspection import mistakes_in

    with at_hand(dataset.path, roots) as (near, within):
        found = () if near is None else mistakes_in(near, dataset.task, roots=within)
    mistakes = [mistake.replace(str(near), str(dataset.path)) for mistake in found]
    # A file that is fixed must be seen to be; one that breaks is found by the run.
    if exact or not mistakes:
        with _LOCK:
            _FOUND[dataset.key] = (signature, mistakes)
    return mistakes


def _datasets(tasks: Iterable[TaskConfig], roots: Sequence[Place]) -> Iterator[_Dataset]:
    """Yields each dataset that this process can see, once for each way of reading it."""
    distinct = {id(task): task for task in tasks}.values()
    seen: set[str] = set()
    for task in distinct:
        if not task.path or task.path.startswith(HUB):
            continue
        try:
            path = find(task.path, roots)
        except UnusablePath:
            continue
        key = f"{path}\n{task.model_dump_json()}"
        if key not in seen:
            seen.add(key)
            yield _Dataset(path, task, key)


def _signature(path: Place) -> tuple[Signature, bool]:
    """Returns what changes with a dataset, and whether every change of each of its files shows in it."""
    try:
        if not isinstance(path, Path):
            return tuple(sorted(path.files().items())), True
        states: list[object] = [_state(path.stat())]
        if not path.is_dir():
            return tuple(states), True
        exact = True
        with os.scandir(path) as entries:
            for number, entry in enumerate(sorted(entries, key=lambda entry: entry.name)):
                if number >= _FILES or entry.is_dir():
                    exact = False
                if number < _FILES:
                    states.append((entry.name, _state(entry.stat())))
        return tuple(states), exact
    except OSError:
        return (None,), False


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
