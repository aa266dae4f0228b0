"""Commands about the nodes of a pool: the `pool` group."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import typer

from service.cli.connection import CommandGroup, checked_settings
from service.cli.terminal import Answer, ExitCode, Failure, argument, option

pool = CommandGroup(no_args_is_help=True, help="Add nodes of Slurm to a pool, and drain nodes.")

_LIMIT = re.compile(r"((?P<days>\d+)-)?(?P<a>\d+)(:(?P<b>\d+))?(:(?P<c>\d+))?")
_LEAST_DRAIN_S = 30
_MARGIN_S = 15  # Between the deadline of a drain and the time limit


def _address(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+:\d{1,5}", text):
        raise typer.BadParameter(
            f"{text!r} is not HOST:PORT; Ray's head prints its own, such as 10.0.0.1:6379"
        )
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:@/+=%-]+", text):  # It becomes a line of a script.
        raise typer.BadParameter(f"{text!r} has characters that options of sbatch do not have; remove them")
    return text


def _label(text: str) -> str:
    if not re.fullmatch(r"[\w./-]+=[\w.-]+", text):
        raise typer.BadParameter(f"{text!r} is not a label; use NAME=VALUE, such as kind=a100")
    return text


def _limit_s(text: str) -> int:
    """Returns the seconds of a time limit in one of Slurm's forms: 90, 90:00, 4:00:00, 1-12, 1-12:30:00."""
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise Failure(
            f"--time {text}: not a time limit; use hours:minutes:seconds, such as 4:00:00, or days-hours"
        )
    days, a, b, c = (int(found[name] or 0) for name in ("days", "a", "b", "c"))
    if found["days"] or found["c"]:
        return 86400 * days + 3600 * a + 60 * b + c
    return 60 * a + b


@pool.command()
def slurm(
    head: str = option(..., "Head of the pool's Ray cluster.", metavar="HOST:PORT", parser=_address),
    hardware: str = option(..., "What its nodes have: an entry of the catalogue or a short name."),
    time: str = option(..., "Time limit, in Slurm's form: 4:00:00.", metavar="TIME"),
    nodes: int = option(1, "Nodes of the allocation.", min=1),
    gpus: int | None = option(None, "GPUs of each node.", "--gpus-per-node", min=1),
    cpus: int | None = option(None, "CPUs of each node; unset = whole nodes.", "--cpus-per-node", min=1),
    partition: str | None = option(None, "Slurm's partition; unset = its default.", parser=_word),
    drain: int = option(
        300, "Seconds that runs have to leave before the limit.", metavar="SECONDS", min=_LEAST_DRAIN_S
    ),
    label: list[str] | None = option(None, "Further Ray labels.", metavar="NAME=VALUE", parser=_label),
    name: str | None = option(None, "Pool, as its schedulers call it; unset = STILLHOUSE_POOL.", "--pool"),
    shown: bool = option(False, "Print the script, and submit nothing.", "--print"),
    options: list[str] | None = argument(
        None, "Further options of sbatch, after --: -- --account=nlp --qos=long", parser=_word
    ),
) -> Answer:
    """Submit an allocation of Slurm whose nodes join a pool, and drain before its time limit.

    Run it on a host with sbatch. Nodes need this environment at the same path, and Ray's token.
    """
    from service.config.hardware import lookup
    from service.manifests import slurm_script

    settings = checked_settings(pool=name)
    try:
        device = lookup(hardware, settings.catalogue())
    except ValueError as error:
        raise Failure(f"--hardware: {error}") from None
    if device.kind.counted_in_cpus != (gpus is None):
        has = "needs --gpus-per-node" if gpus is None else "has no GPUs; leave out --gpus-per-node"
        raise Failure(f"--hardware {hardware}: {has}")
    if drain >= _limit_s(time):
        raise Failure(f"--drain {drain}: not less than --time {time}; change one of them")
    labels = {
        **device.labels,
        "stillhouse-pool": settings.pool,
        **dict(each.split("=") for each in label or ()),
    }
    script = slurm_script(
        head=head,
        pool=settings.pool,
        nodes=nodes,
        cpus=cpus,
        gpus=gpus,
        partition=partition,
        time=time,
        drain_s=drain,
        margin_s=_MARGIN_S,
        options=options or [],
        labels=",".join(map("=".join, labels.items())),
        resource=device.resource,
    )
    if shown:
        return Answer({"script": script}, script.rstrip())
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not (
        os.environ.get("RAY_AUTH_TOKEN") or Path(path).exists()
    ):
        raise Failure(
            f"Ray's token is missing: set RAY_AUTH_TOKEN, or write it to {path}, which nodes must see"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise Failure(
            "sbatch is not on PATH; run this on a login node of Slurm, or give --print", ExitCode.not_found
        ) from None
    if done.returncode:
        raise Failure(f"Slurm refuses: {' '.join(done.stderr.split())}", ExitCode.not_succeeded)
    job = done.stdout.strip().partition(";")[0]
    return Answer(
        {"job": job, "script": script},
        f"submitted job {job}: {nodes} node{'' if nodes == 1 else 's'} for pool {settings.pool}; "
        f"end it with: scancel --batch --signal=USR1 {job}",
    )


@pool.command()
def drain(
    head: str = option(..., "Head of the pool's Ray cluster.", metavar="HOST:PORT", parser=_address),
    label: list[str] = option(..., "Labels that the nodes have.", metavar="NAME=VALUE", parser=_label),
    within: int = option(300, "Seconds until they go.", metavar="SECONDS", min=1),
) -> Answer:
    """Announce that nodes go: their runs leave with a checkpoint, and nothing starts there."""
    from ray.exceptions import RayError

    from service.workers import ray_cluster

    labels = dict(each.split("=") for each in label)
    try:
        names = ray_cluster.drain(head, labels, within, "stillhouse pool drain")
    except OSError as error:
        raise Failure(f"cannot reach Ray at {head}: {error}", ExitCode.unreachable) from None
    except (RuntimeError, RayError) as error:
        raise Failure(f"Ray at {head}: {' '.join(str(error).split())}", ExitCode.not_succeeded) from None
    if not names:
        raise Failure(f"no node has the labels {', '.join(label)}", ExitCode.not_found)
    return Answer({"draining": names}, f"draining {', '.join(names)}")
