"""What people send is read in a process of its own: files to inspect, texts for a run's model.

The process starts on demand and ends once it is idle. What takes too long, or too much memory, ends it and
nothing else. One job runs at a time.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from service.config.settings import Settings
from service.domain.records import ModelAnswer, ModelTrial
from service.output.model_archive import MANIFEST
from service.output.model_folder import open_model
from service.store import Store
from trainers.config import TaskConfig
from trainers.entrypoint import predict
from trainers.errors import BadDataError, TrainingError
from trainers.tasks import TASKS
from trainers.tasks.info import Trial

LONGEST_S = 60.0  # Of a job, from its start to its answer
WAIT_S = 20.0  # Longest wait for the job before
IDLE_S = 300.0
MOST_BYTES = 4 << 30  # Of the process's memory
MOST_FILES = 10_000  # Of a folder that is inspected
MOST_TEXTS, LONGEST_TEXT = 100, 20_000  # Of one request; characters of a text
_CODE = str(Path(__file__).parents[2])  # Of this process, wherever it was found
_KEPT = ("PATH", "HOME", "LANG", "STILLHOUSE_EXTENSIONS")  # No other variable: some are secret


class Unanswerable(Exception):
    """A job has no answer; the message is one line."""


class BoundedProcess:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end = threading.Timer(IDLE_S, self._stop)

    def ask(self, job: str, **arguments: Any) -> Any:
        """Returns the answer of a function of this module, in JSON's types; raises `Unanswerable`."""
        if not self._lock.acquire(timeout=WAIT_S):
            raise Unanswerable("others are being answered; try again in a minute")
        try:
            self._end.cancel()
            line = self._answer(json.dumps([job, arguments], default=str) + "\n")
        finally:
            self._end = threading.Timer(IDLE_S, self._stop)
            self._end.daemon = True
            self._end.start()
            self._lock.release()
        if not line:
            bounds = f"{LONGEST_S:g} s and {MOST_BYTES >> 30} GiB of memory"
            raise Unanswerable(f"this took more than the {bounds} that it may; send less of it")
        found = json.loads(line)
        if "refused" in found:
            raise Unanswerable(found["refused"])
        return found["answer"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._end.cancel()
        self._stop()

    def _answer(self, request: str) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._discard()
        process = self._process = self._process or _started()
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(LONGEST_S, process.kill)
        limit.start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        line = process.stdout.readline()
        limit.cancel()
        if not line:
            self._discard()
        return line

    def _stop(self) -> None:
        with self._lock:
            self._discard()

    def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


def _started() -> subprocess.Popen[str]:
    # Texts are few: a GPU is left to those who train.
    given = {"PYTHONPATH": os.pathsep.join([_CODE, *sys.path[1:]]), "CUDA_VISIBLE_DEVICES": ""}
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment = {**kept, **given, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-P", "-m", __name__], env=environment, **pipes)


def trial_of(store: Store, run_id: int) -> tuple[ModelTrial, Trial, dict[str, Any]]:
    """Returns what a run's model can be asked, and its section `task`."""
    task: dict[str, Any] = json.loads(store.runs.config(run_id))["task"]
    trial = TASKS[task["name"]].trial if task["name"] in TASKS else None
    if trial is None:
        raise Unanswerable(f"task {task['name']} makes its examples from several rows, so it answers none")
    known = (trial.each, trial.shared, trial.optional, trial.shown)
    return ModelTrial(*known, most_texts=MOST_TEXTS, longest_text=LONGEST_TEXT), trial, task


def ask_model(
    process: BoundedProcess,
    store: Store,
    settings: Settings,
    run_id: int,
    texts: Sequence[str],
    shared: Mapping[str, str],
) -> list[ModelAnswer]:
    """Returns the answers of a run's best checkpoint; raises `Unanswerable` or `NoModel`."""
    _, trial, task = trial_of(store, run_id)
    missing = [name for name in trial.shared if name not in trial.optional and not shared.get(name)]
    if missing or (unknown := shared.keys() - set(trial.shared)):
        why = f"{missing[0]} is missing" if missing else f"{min(unknown)} is not a field of the task"
        raise Unanswerable(f"{why}; give each line as text, and {', '.join(trial.shared) or 'nothing else'}")
    common = {name: text for name, text in shared.items() if text}
    rows = [{**common, trial.each: text.split() if trial.words else text} for text in texts]
    with TemporaryDirectory(prefix="stillhouse-model-") as folder:
        model = open_model(store, settings, run_id, "best")
        model.link(Path(folder))
        step = json.loads((Path(folder) / MANIFEST).read_bytes())["step"]
        carried = {}
        for name in (name for name, score in TASKS[task["name"]].scores.items() if score.tuned):
            at_step = store.series.sampled_points(run_id, [name], min_step=step, max_step=step)
            if name in at_step:
                carried[name] = at_step[name].points[-1].value
        found = process.ask("evaluate", folder=folder, task=task, rows=rows, carried=carried)
    return [ModelAnswer(**each) for each in found]


def inspect(path: str, roots: Sequence[str]) -> dict[str, Any]:
    """Returns what a file or folder holds, and a spec to start from."""
    from service.specs.first_draft import data_document, starting_spec
    from trainers.tasks.inspection import inspect as inspected

    data, within = Path(path), [Path(root).resolve() for root in roots]
    for file in (data, *itertools.islice(data.rglob("*"), MOST_FILES)):
        if not any(file.resolve().is_relative_to(root) for root in within):
            raise BadDataError(f"{file.name}: a link that leads out of the data roots; copy the file")
    contents = inspected(data)
    spec = starting_spec(contents, within)
    text = None if spec is None else yaml.safe_dump(spec, sort_keys=False, width=76, allow_unicode=True)
    return {**data_document(contents), "spec": text}


def evaluate(
    folder: str, task: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], carried: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Returns prediction and probabilities of each unit; `rows` have the task's own names of fields."""
    config = TaskConfig.model_validate(task).model_copy(update={"columns": {}})
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found = predict(Path(folder), config, file, carried=carried, report=lambda _: None)
    return [{"prediction": one.prediction, "probabilities": one.probabilities} for one in found.rows]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.nice(10)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What libraries print is not an answer.
    jobs = {function.__name__: function for function in (inspect, evaluate)}
    for line in sys.stdin:
        job, arguments = json.loads(line)
        found: dict[str, Any]
        try:
            found = {"answer": jobs[job](**arguments)}
        except (TrainingError, OSError) as error:
            found = {"refused": str(error)}
        answers.write(json.dumps(found, default=dataclasses.asdict) + "\n")
        answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
