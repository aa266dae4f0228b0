"""The demo: from nothing to a comparison of eight small runs, and nothing left running.

It writes a text set that it generates, starts the whole service on free ports in a temporary
folder (the same code as `stillhouse up`), submits `examples/demo.yaml`, follows it, prints the
comparison, and stops everything. The folder stays, so that the results can be looked at.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from service.cli.connection import client_errors
from service.cli.exits import ExitCode, Failure
from service.cli.following import follow_experiment
from service.cli.output import console, note, print_json, say
from service.cli.rendering import print_comparison
from service.cli.stop_requests import StopRequests
from service.client import Client
from service.config.examples import examples_folder
from service.config.settings import Settings
from service.domain.states import RunState
from service.local.local_service import LocalService, ServiceStartError

SPEC = "demo.yaml"
TRAIN_TEXTS = 800
TEST_TEXTS = 400
TEXTS_SEED = 0


def write_texts(folder: Path) -> None:
    """Write the generated text set: sentences with a label that can be learned."""
    from trainers.data.synthetic import write_corpus

    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder, train=TRAIN_TEXTS, test=TEST_TEXTS, seed=TEXTS_SEED)


def demo_settings(folder: Path) -> Settings:
    """Settings of an installation that shares nothing with the user's own."""
    return Settings(
        data_dir=folder,
        database_url=f"sqlite:///{folder / 'stillhouse.db'}",
        data_roots=str(folder),
        model_roots=str(folder),
        host="127.0.0.1",
        port=0,
        token=None,
        offline=True,
    )


def run(stop: StopRequests, *, as_json: bool = False) -> bool:
    """Run the demo; True when every run succeeded.

    Raises:
        Failure: when a part cannot be started, or the spec is not there.
        KeyboardInterrupt: on Ctrl-C, after everything was stopped.
    """
    started = time.monotonic()
    folder_of_examples = examples_folder()
    if folder_of_examples is None or not (spec := folder_of_examples / SPEC).is_file():
        raise Failure(f"examples/{SPEC}: not found; install the package again", ExitCode.not_found)
    folder = Path(tempfile.mkdtemp(prefix="stillhouse-demo-")).resolve()
    os.environ.pop("RAY_ADDRESS", None)  # A cluster elsewhere could not read the temporary folder.
    note(f"demo in {folder}")
    write_texts(folder / "demo-texts")
    note(f"generated {TRAIN_TEXTS} training and {TEST_TEXTS} test texts")
    service = LocalService(demo_settings(folder), report=note)
    try:
        addresses = service.start()
        note(f"service ready at {addresses.api_url}, Ray dashboard at {addresses.ray_dashboard_url}")
        succeeded, planned = _experiment(addresses.api_url, spec, folder, as_json=as_json)
    except ServiceStartError as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None
    finally:
        stop.interrupts = False  # From here on a first Ctrl-C does not break the stopping.
        note("stopping ...")
        service.stop()
    line = f"demo: {succeeded} of {planned} runs succeeded in {time.monotonic() - started:.0f} s"
    if as_json:
        note(line)
    else:
        say(line)
    return succeeded == planned


def _experiment(url: str, spec: Path, folder: Path, *, as_json: bool) -> tuple[int, int]:
    """Submit, follow and compare; how many runs succeeded, and of how many."""
    with client_errors(), Client(url) as client:
        experiment = client.submit(spec.read_bytes())
        note(f"submitted experiment {experiment.id}: {experiment.name}, {experiment.run_count} runs")
        if as_json:
            client.wait(experiment.id)
        else:
            follow_experiment(client, experiment.id)
        runs = list(client.all_runs(experiment_id=experiment.id))
        comparison = client.compare([experiment.id])
    if as_json:
        print_json({"folder": folder, "comparison": comparison, "runs": runs})
    else:
        screen = console()
        screen.print()
        print_comparison(comparison, screen)
        say("")
        say(f"results     {folder} (database, logs, checkpoints), kept until you delete it")
        say(f"inspect     STILLHOUSE_DATA_DIR={folder} stillhouse up")
    for run in runs:
        if run.failure_message:
            note(f"run:{run.id} {run.failure_class}: {run.failure_message}")
    return sum(run.state is RunState.succeeded for run in runs), len(runs)
