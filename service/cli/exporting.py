"""The commands that take a run's files out: `export-model`, `trace` and `predictions`."""

from __future__ import annotations

import functools
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, note, print_json, say
from service.cli.references import RunRef, reference


class Checkpoint(StrEnum):
    """Which of a run's checkpoints."""

    best = "best"
    last = "last"


def export_model(
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run, such as run:42.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    checkpoint: Annotated[
        Checkpoint, typer.Option(help="best (of the best evaluation) or last.")
    ] = Checkpoint.best,
    packed: Annotated[
        bool, typer.Option("--packed", help="One bit a weight: for trainers.models.binary.load_packed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run's model as a folder that transformers can load, with a model card of its figures."""
    from service.output.model_archive import BrokenModel, NotPackable, fetch_packed

    found = reference(target)
    if not isinstance(found, RunRef):
        raise Failure(f"'{target}' is an experiment; give a run, such as run:42", ExitCode.usage)
    _refuse_full(folder)
    with connected() as client:
        try:
            fetch = functools.partial(client.export_model, found.id, checkpoint=checkpoint.value)
            listing = fetch_packed(fetch, folder) if packed else fetch(folder)
        except NotPackable as error:
            raise Failure(f"{found}: {error}", ExitCode.usage) from None
        except BrokenModel as error:
            raise Failure(f"{found}: {error}", ExitCode.unreachable) from None
        except OSError as error:
            raise Failure(f"{folder}: {error.strerror or error}", ExitCode.usage) from None
    if as_json:
        print_json({"folder": str(folder), **listing})
        return
    size = sum(file["size"] for file in listing["files"].values())
    say(f"{folder}: {found}, {listing['checkpoint']} checkpoint, step {listing['step']}")
    note(f"{len(listing['files'])} files, {size:,} bytes, verified; README.md is the model card")


def trace(
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run, such as run:42.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A file for Perfetto (ui.perfetto.dev) or chrome://tracing."),
    ] = Path("trace.json"),
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Instead, operators and kernels of the profiled steps.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="With --kernels: rank of the worker.")] = 0,
    as_json: Json = False,
) -> None:
    """Write the timeline of a run's traced steps: where each worker spent them."""
    found = reference(target)
    if not isinstance(found, RunRef):
        raise Failure(f"'{target}' is an experiment; give a run, such as run:42", ExitCode.usage)
    with connected() as client:
        document = client.kernel_trace(found.id, rank) if kernels else client.trace(found.id)
    try:
        output.write_bytes(document)
    except OSError as error:
        raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    if as_json:
        print_json({"run": found.id, "file": str(output), "bytes": len(document)})
        return
    say(str(output))
    note(f"{len(document):,} bytes; opens in https://ui.perfetto.dev and chrome://tracing")


def predictions(
    target: Annotated[str, typer.Argument(metavar="RUN", help="A run, such as run:42.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A Parquet file, or JSON lines if it ends in .jsonl.")
    ] = Path("predictions.parquet"),
    as_json: Json = False,
) -> None:
    """Write a run's result for each unit of its test part: score, prediction and truth."""
    found = reference(target)
    if not isinstance(found, RunRef):
        raise Failure(f"'{target}' is an experiment; give a run, such as run:42", ExitCode.usage)
    with connected() as client:
        try:
            size = client.predictions(
                found.id, output, format="jsonl" if output.suffix == ".jsonl" else "parquet"
            )
        except OSError as error:
            raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    if as_json:
        print_json({"run": found.id, "file": str(output), "bytes": size})
        return
    say(str(output))
    note(f"{size:,} bytes; one row per unit: unit, score, prediction, truth")


def _refuse_full(folder: Path) -> None:
    """Say at once what would be said after the download."""
    try:
        full = folder.exists() and (not folder.is_dir() or next(folder.iterdir(), None) is not None)
    except OSError as error:
        raise Failure(f"{folder}: {error.strerror or error}", ExitCode.usage) from None
    if full:
        raise Failure(f"{folder} is not an empty folder; give a new one", ExitCode.usage)
