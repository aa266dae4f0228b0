"""Commands that take results out: export, export-model, trace, predictions, verify."""

import sys
from functools import partial
from pathlib import Path
from typing import Literal

from service.cli.connection import Client, OneRun, experiment_id, writing
from service.cli.experiments import Filter
from service.cli.terminal import Answer, ExitCode, Failure, Json, argument, note, option


def export(
    client: Client,
    target: str | None = argument(None, "An experiment, such as 17; unset = all runs.", metavar="[ID]"),
    format: Literal["csv", "parquet", "jsonl"] = option("csv", "csv, jsonl or parquet."),
    output: Path | None = option(None, "File; unset = standard output.", "--output", "-o"),
    filter: Filter = None,
    bundle: Path | None = option(
        None, "Pack one experiment with checksums: spec, runs, points, environment.", metavar="FILE.zip"
    ),
    as_json: Json = False,
) -> None:
    """Export everything about runs as a table; --json means --format jsonl."""
    if bundle is not None:
        if target is None or output is not None or filter is not None:
            raise Failure("--bundle takes one experiment and no other option")
        from service.client.bundle import write_bundle

        with writing(bundle):
            files = write_bundle(client, experiment_id(target), bundle)
        size = bundle.stat().st_size
        line = partial(note, f"{bundle}: {len(files)} files, {size:,} bytes")
        Answer({"path": str(bundle), "files": files, "bytes": size}, line).print(as_json=as_json)
        return
    form: Literal["csv", "parquet", "jsonl"] = "jsonl" if as_json else format
    number = experiment_id(target) if target is not None else None
    if output is None and form == "parquet" and sys.stdout.isatty():
        raise Failure("parquet is binary; give a file with -o, or pipe it")
    chunks = client.export_chunks(number, format=form, filter=filter)
    if output is None:
        sys.stdout.buffer.writelines(chunks)
        sys.stdout.buffer.flush()
        return
    with writing(output), output.open("wb") as file:
        try:
            file.writelines(chunks)
        except BaseException:
            output.unlink(missing_ok=True)
            raise
    note(f"{output}: {output.stat().st_size:,} bytes")


def verify(
    bundle: Path = argument(..., "A bundle written by `export --bundle`.", metavar="BUNDLE"),
    as_json: Json = False,
) -> None:
    """Check a bundle against its checksums; prints one line if something differs."""
    from service.client.bundle import NotABundle, verify_bundle

    try:
        result = verify_bundle(bundle)
    except FileNotFoundError:
        raise Failure(f"{bundle}: no such file", ExitCode.not_found) from None
    except (NotABundle, OSError) as error:
        raise Failure(f"{bundle}: {error}") from None
    line = [f"{bundle}: intact, {result.files} files of experiment {result.experiment_id}"]
    Answer(result, *(line if result.intact else [])).print(as_json=as_json)
    if not result.intact:
        raise Failure(f"{bundle}: {'; '.join(result.differences)}", ExitCode.not_succeeded)


def export_model(
    client: Client,
    run: OneRun,
    folder: Path = argument(..., "A new or empty folder.", metavar="DIR"),
    checkpoint: Literal["best", "last"] = option("best", "best (of the best evaluation) or last."),
    packed: bool = option(False, "One bit a weight: for trainers.models.binary.load_packed."),
    onnx: bool = option(False, "Also model.onnx, if ONNX Runtime's outputs are torch's."),
) -> Answer:
    """Write a run's model as a folder that transformers can load, with a model card of its figures."""
    from service.output.model_archive import BrokenModel, NotPackable, fetch_onnx, fetch_packed

    if packed and onnx:
        raise Failure("--packed and --onnx are two forms of a model; give one")
    convert = fetch_onnx if onnx else fetch_packed if packed else None
    try:
        with writing(folder):
            # A full folder is refused before the download.
            if folder.exists() and (not folder.is_dir() or next(folder.iterdir(), None) is not None):
                raise Failure(f"{folder} is not an empty folder; give a new one")
            fetch = partial(client.export_model, run, checkpoint=checkpoint)
            listing = fetch(folder) if convert is None else convert(fetch, folder)
    except NotPackable as error:
        raise Failure(f"run:{run}: {error}") from None
    except BrokenModel as error:
        raise Failure(f"run:{run}: {error}", ExitCode.unreachable) from None
    described = f"run:{run}, {listing['checkpoint']} checkpoint, step {listing['step']}"
    files = listing["files"].values()
    size = sum(file["size"] for file in files)
    about = "verified; README.md is the model card"
    if onnx:
        about += (
            f"; outputs of model.onnx differ from torch's by {listing['onnx_max_difference']:.0e} at most"
        )
    return Answer(
        {"folder": str(folder), **listing},
        f"{folder}: {described}",
        partial(note, f"{len(files)} files, {size:,} bytes, {about}"),
    )


def trace(
    client: Client,
    run: OneRun,
    output: Path = option(
        Path("trace.json"), "A file for Perfetto (ui.perfetto.dev) or chrome://tracing.", "--output", "-o"
    ),
    kernels: bool = option(False, "Instead, operators and kernels of the profiled steps."),
    rank: int = option(0, "With --kernels: rank of the worker.", min=0),
) -> Answer:
    """Write the timeline of a run's traced steps: where each worker spent them."""
    document = client.kernel_trace(run, rank) if kernels else client.trace(run)
    with writing(output):
        size = output.write_bytes(document)
    return _written(run, output, size, "opens in https://ui.perfetto.dev and chrome://tracing")


def predictions(
    client: Client,
    run: OneRun,
    output: Path = option(
        Path("predictions.parquet"), "A Parquet file, or JSON lines if it ends in .jsonl.", "--output", "-o"
    ),
) -> Answer:
    """Write a run's result for each unit of its test part: score, prediction and truth."""
    with writing(output):
        size = client.predictions(run, output, format="jsonl" if output.suffix == ".jsonl" else "parquet")
    return _written(run, output, size, "one row per unit: unit, score, prediction, truth")


def _written(run: int, file: Path, size: int, about: str) -> Answer:
    return Answer(
        {"run": run, "file": str(file), "bytes": size},
        str(file),
        partial(note, f"{size:,} bytes; {about}"),
    )
