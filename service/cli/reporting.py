"""Commands that hand results on: report, bundles and their verification."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from service.analysis.answers import Selection
from service.cli.asking import Filter, Targets, Undisturbed, WithOverhead, asking, experiments
from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, note, print_json, say
from service.cli.references import experiment_reference


def report(
    targets: Targets,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Output file; .html or .md sets the format.")
    ] = Path("report.html"),
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Write one file with question, answer, plots, verdicts, caveats and reproduction steps."""
    formats: dict[str, Literal["html", "md"]] = {".html": "html", ".htm": "html", ".md": "md"}
    form = formats.get(output.suffix.lower())
    if form is None:
        raise Failure(f"{output}: the name of a report ends in .html or .md", ExitCode.usage)
    selection = Selection(filter, undisturbed, with_overhead)
    with asking() as client:
        content = client.report(experiments(targets), format=form, selection=selection)
    try:
        output.write_bytes(content)
    except OSError as error:
        raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    if as_json:
        print_json({"path": str(output), "format": form, "bytes": len(content)})
    else:
        say(f"{output}: {len(content):,} bytes")


def export_bundle(target: str, path: Path, *, as_json: bool) -> None:
    """Write the bundle of an experiment."""
    from service.client.bundle import write_bundle

    with connected() as client:
        try:
            written = write_bundle(client, experiment_reference(target), path)
        except OSError as error:
            raise Failure(f"{path}: {error.strerror or error}", ExitCode.usage) from None
    if as_json:
        print_json({"path": str(path), "files": written, "bytes": path.stat().st_size})
    else:
        note(f"{path}: {len(written)} files, {path.stat().st_size:,} bytes")


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
