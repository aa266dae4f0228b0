"""Commands that take results out: export, export-model, trace, predictions, verify."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from service.cli.connection import OneRun, connected, experiment_id, run_id
from service.cli.experiments import Filter
from service.cli.terminal import ExitCode, Failure, Json, answer, note, print_json, say


def export(
    target: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="An experiment, such as 17; unset = all runs.")
    ] = None,
    format: Annotated[
        Literal["csv", "parquet", "jsonl"], typer.Option("--format", help="csv, jsonl or parquet.")
    ] = "csv",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; unset = standard output.")
    ] = None,
    filter: Filter = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE.zip",
            help="Pack one experiment with checksums: spec, runs, points, environment.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export everything about runs as a table; --json means --format jsonl."""
    if bundle is not None:
        if target is None or output is not None or filter is not None:
            raise Failure("--bundle takes one experiment and no other option", ExitCode.usage)
        _export_bundle(experiment_id(target), bundle, as_json=as_json)
        return
    form: Literal["csv", "parquet", "jsonl"] = "jsonl" if as_json else format
    number = experiment_id(target) if target is not None else None
    if output is None and form == "parquet" and sys.stdout.isatty():
        raise Failure("parquet is binary; give a file with -o, or pipe it", ExitCode.usage)
    with connected() as client:
        chunks = client.export_chunks(number, format=form, filter=filter)
        if output is None:
            for chunk in chunks:
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return
        try:
            with output.open("wb") as file:
                try:
                    for chunk in chunks:
                        file.write(chunk)
                except BaseException:
                    output.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    note(f"{output}: {output.stat().st_size:,} bytes")


def _export_bundle(number: int, path: Path, *, as_json: bool) -> None:
    from service.client.bundle import write_bundle

    with connected() as client:
        try:
            files = write_bundle(client, number, path)
        except OSError as error:
            raise Failure(f"{path}: {error.strerror or error}", ExitCode.usage) from None
    size = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "files": files, "bytes": size})
    else:
        note(f"{path}: {len(files)} files, {size:,} bytes")


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle written by `export --bundle`.")],
    as_json: Json = False,
) -> None:
    """Check a bundle against its checksums; prints one line if something differs."""
    from service.client.bundle import NotABundle, verify_bundle

    try:
        result = verify_bundle(bundle)
    except FileNotFoundError:
        raise Failure(f"{bundle}: no such file", ExitCode.not_found) from None
    except (NotABundle, OSError) as error:
        raise Failure(f"{bundle}: {error}", ExitCode.usage) from None
    if as_json:
        print_json(result)
    elif result.intact:
        say(f"{bundle}: intact, {result.files} files of experiment {result.experiment_id}")
    if not result.intact:
        raise Failure(f"{bundle}: {'; '.join(result.differences)}", ExitCode.not_succeeded)


def export_model(
    target: OneRun,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    checkpoint: Annotated[
        Literal["best", "last"], typer.Option(help="best (of the best evaluation) or last.")
    ] = "best",
    packed: Annotated[
        bool, typer.Option("--packed", help="One bit a weight: for trainers.models.binary.load_packed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run's model as a folder that transformers can load, with a model card of its figures."""
    from service.output.model_archive import BrokenModel, NotPackable, fetch_packed

    run = run_id(target)
    try:  # A full folder is refused before the download.
        if folder.exists() and (not folder.is_dir() or next(folder.iterdir(), None) is not None):
            raise Failure(f"{folder} is not an empty folder; give a new one", ExitCode.usage)
        with connected() as client:
            fetch = functools.partial(client.export_model, run, checkpoint=checkpoint)
            listing = fetch_packed(fetch, folder) if packed else fetch(folder)
    except NotPackable as error:
        raise Failure(f"run:{run}: {error}", ExitCode.usage) from None
    except BrokenModel as error:
        raise Failure(f"run:{run}: {error}", ExitCode.unreachable) from None
    except OSError as error:
        raise Failure(f"{folder}: {error.strerror or error}", ExitCode.usage) from None
    described = f"run:{run}, {listing['checkpoint']} checkpoint, step {listing['step']}"
    answer({"folder": str(folder), **listing}, as_json, f"{folder}: {described}")
    if not as_json:
        size = sum(file["size"] for file in listing["files"].values())
        note(f"{len(listing['files'])} files, {size:,} bytes, verified; README.md is the model card")


def trace(
    target: OneRun,
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
    run = run_id(target)
    with connected() as client:
        document = client.kernel_trace(run, rank) if kernels else client.trace(run)
    try:
        output.write_bytes(document)
    except OSError as error:
        raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    answer({"run": run, "file": str(output), "bytes": len(document)}, as_json, str(output))
    if not as_json:
        note(f"{len(document):,} bytes; opens in https://ui.perfetto.dev and chrome://tracing")


def predictions(
    target: OneRun,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A Parquet file, or JSON lines if it ends in .jsonl.")
    ] = Path("predictions.parquet"),
    as_json: Json = False,
) -> None:
    """Write a run's result for each unit of its test part: score, prediction and truth."""
    run = run_id(target)
    try:
        with connected() as client:
            size = client.predictions(run, output, format="jsonl" if output.suffix == ".jsonl" else "parquet")
    except OSError as error:
        raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    answer({"run": run, "file": str(output), "bytes": size}, as_json, str(output))
    if not as_json:
        note(f"{size:,} bytes; one row per unit: unit, score, prediction, truth")
