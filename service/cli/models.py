"""Commands that use the model of a run, or train it again: predict, evaluate, continue, retrain."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from service.cli.connection import Client, OneRun, writing
from service.cli.terminal import Answer, ExitCode, Failure, argument, note, option, print_table

if TYPE_CHECKING:
    from service.domain.records import ExperimentStatus
    from trainers.checkpoints.predictions import Prediction
    from trainers.loop.prediction import Predicted

Checkpoint = Annotated[Literal["best", "last"], typer.Option(help="best (of the best evaluation) or last.")]
_FORMATS = (".jsonl", ".csv", ".parquet")


def predict(
    client: Client,
    run: OneRun,
    data: Path = argument(..., "Rows like those of the run, with or without labels.", metavar="FILE"),
    output: Path = option(Path("predictions.jsonl"), "A .jsonl, .csv or .parquet file.", "--output", "-o"),
    id_column: str = option("id", "Column that names rows.", "--id"),
    checkpoint: Checkpoint = "best",
) -> Answer:
    """Predict the rows of a file with a run's model, on this machine: label, probabilities, source row."""
    found = _predicted(client, run, data, checkpoint, id_column, output)
    with writing(output):
        _write(output, found.rows, labelled=bool(found.scores))
    return Answer(
        {"run": run, "file": str(output), "rows": len(found.rows), **_about(found)},
        f"{output}: {len(found.rows)} predictions of {found.examples} rows",
        *_left_out(found),
    )


def evaluate(
    client: Client,
    run: OneRun,
    on: Path = option(..., "Rows with labels: a file, or a folder, of which the test part counts.", "--on"),
    output: Path | None = option(None, "Also write each prediction; a .jsonl, .csv or .parquet file.", "-o"),
    checkpoint: Checkpoint = "best",
) -> Answer:
    """Score a run's model on other data, on this machine; `compare` and other answers do not see it."""
    found = _predicted(client, run, on, checkpoint, "id", output)
    if not found.scores:
        raise Failure(
            f"{on}: {found.without_truth} of {found.examples} rows have no label, so nothing is scored; "
            "label them, or use `stillhouse predict`"
        )
    if output is not None:
        with writing(output):
            _write(output, found.rows, labelled=True)
    rows = [(name, f"{value:.6g}") for name, value in found.scores.items()]
    return Answer(
        {"run": run, "scores": found.scores, **_about(found)},
        partial(print_table, ("score", "value"), rows, ("value",)),
        partial(note, f"{found.examples} rows, {found.part} part of {on}"),
        *_left_out(found),
    )


def continue_run(
    client: Client,
    run: OneRun,
    epochs: float | None = option(None, "Epochs to train on.", min=0.0),
    steps: int | None = option(None, "Instead, optimizer updates.", min=1),
) -> Answer:
    """Train a run's best checkpoint further, as an experiment of its own with a fresh schedule."""
    if (epochs is None) == (steps is None):
        raise Failure("give --epochs or --steps, such as --epochs 2")
    length = {"epochs": epochs} if steps is None else {"steps": steps}
    return _submitted(client.continue_run(run, **length), f"continues run:{run} from its best checkpoint")


def retrain(
    client: Client,
    run: OneRun,
    on: Literal["all"] = option(..., "all = training and validation data; the test part stays."),
) -> Answer:
    """Train a chosen run's settings on validation data too; its last step is the model."""
    return _submitted(client.retrain_run(run, on), f"run:{run} on its training and validation data")


def _submitted(experiment: ExperimentStatus, about: str) -> Answer:
    line = f"submitted experiment {experiment.id}: {about}"
    return Answer(experiment, line, f"to watch it: stillhouse watch {experiment.id}")


def _about(found: Predicted) -> dict[str, Any]:
    return {"examples": found.examples, "part": found.part, "left_out": found.left_out}


def _left_out(found: Predicted) -> list[partial[None]]:
    return [partial(note, f"{found.left_out} rows left out, as in training")] if found.left_out else []


def _predicted(
    client: Client,
    run: int,
    data: Path,
    checkpoint: Literal["best", "last"],
    id_column: str,
    output: Path | None,
) -> Predicted:
    from pydantic import ValidationError

    from service.output.model_archive import BrokenModel
    from trainers.config import TaskConfig
    from trainers.entrypoint import predict as predicted
    from trainers.errors import TrainingError

    if not data.exists():
        raise Failure(f"{data}: no such file", ExitCode.not_found)
    if output is not None and output.suffix not in _FORMATS:
        raise Failure(f"{output}: unknown format; end it in {', '.join(_FORMATS)}")
    try:
        task = TaskConfig.model_validate(json.loads(client.run_config(run))["task"])
    except ValidationError as error:  # A task or metric that is not enabled on this machine
        raise Failure(f"run:{run}: {error.errors()[0]['msg']}") from None
    with TemporaryDirectory(prefix="stillhouse-model-") as scratch:
        try:
            listing = client.export_model(run, Path(scratch) / "model", checkpoint=checkpoint)
            carried: dict[str, float] = {}
            for name in (name for name, score in task.info.scores.items() if score.tuned):
                at_step = {"min_step": listing["step"], "max_step": listing["step"]}
                for series in client.points(run, name=[name], **at_step).values():
                    carried[name] = float(series.values[-1])
            found: Predicted = predicted(
                Path(scratch) / "model", task, data, carried=carried, id_column=id_column, report=note
            )
        except BrokenModel as error:
            raise Failure(f"run:{run}: {error}", ExitCode.unreachable) from None
        except TrainingError as error:
            raise Failure(str(error)) from None
    return found


def _write(file: Path, rows: list[Prediction], *, labelled: bool) -> None:
    from trainers.checkpoints import predictions

    if file.suffix == ".parquet":
        predictions.write_table(file, rows)
        return
    without = () if labelled else ("score", "truth")
    names = [name for name in predictions.COLUMNS if name not in without]
    with file.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        if file.suffix == ".csv":
            table.writerow(names)
        for row in rows:
            values = {name: getattr(row, name) for name in names}
            if file.suffix == ".csv":
                table.writerow(_cell(value) for value in values.values())
            else:
                stream.write(json.dumps(values, ensure_ascii=False) + "\n")


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
