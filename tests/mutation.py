"""Mutation testing: changes the code of a room in small ways, and counts which changes its tests notice.

`python -m tests.mutation service/domain` draws a sample of mutants by a seed (mutmut makes them), runs the
fast tests that reach each, and prints the survivors as diffs. The score is killed / (all - equivalent).
Equivalent mutants, which no test could notice, stand with their reasons in `equivalent_mutants.yaml`. A
mutant that was killed is not run again before its function changes. Settings that all rooms share are in
`pyproject.toml`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from mutmut.__main__ import _run
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name
from scipy.stats import binomtest

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
LINKED = (
    "api",
    "service",
    "trainers",
    "cuda_ext",
    "benchmarks",
    "examples",
    "docs",
    "tests",
    "pyproject.toml",
)
FAST = "not postgresql and not ray and not slow and not smoke"
KILLED = {"killed", "timeout", "suspicious", "segfault"}
LEAST = 0.9
"""Part of the mutants that the tests must kill."""


@dataclass(frozen=True)
class Room:
    """Code that is mutated together, and the tests that it answers to; `functions` are all, or these.

    `without` are tests that take too long for each mutant, or that list functions and so find mutants.
    """

    code: tuple[str, ...]
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


GENERATED = tuple(
    f"tests/service/analysis/test_{name}"
    for name in (
        "claims.py::test_a_family_of_equal_accuracies_is_claimed_about_as_rarely_as_promised",
        "claims.py::test_holm_agrees_with_statsmodels",
        "claims.py::test_pairs_of_which_some_are_equal_keep_the_rate_too",
        "effects.py::test_effects_that_are_none_are_claimed_as_rarely_as_promised",
        "one_answer.py",
        "references.py::test_a_family_is_never_surer_than_bonferroni_of_one_nor_less_sure_than_holm",
    )
)
ROOMS = {
    "service/domain": Room(
        ("service/domain/*.py",), ("tests/service/domain", "tests/service/search/test_grid.py")
    ),
    "service/fairness": Room(("service/fairness/*.py",), ("tests/service/fairness",)),
    "service/analysis, tables": Room(
        tuple(
            f"service/analysis/{name}.py"
            for name in (
                "cells", "comparison", "drift", "ranking", "rows",
            )
        ),
        ("tests/service/analysis",),
        without=GENERATED,
    ),
    "service/analysis, claims": Room(
        tuple(
            f"service/analysis/{name}.py"
            for name in (
                "answers", "claims", "effects", "question", "recommend", "run_table", "speedup",
                "uncertainty", "words",
            )
        ),
        ("tests/service/analysis",),
        without=GENERATED,
    ),
    "fences": Room(
        (
            "service/db/statements.py",
            "service/store/accounting.py",
            "service/store/attempts.py",
            "service/store/base.py",
            "service/store/drivers.py",
        ),
        ("tests/conformance/test_fences.py",),
        (
            "adopt_lapsed", "check_experiment_attempt", "clear_waiting", "close_placements", "end_attempt",
            "end_open_attempts", "lapsed", "move_experiment", "move_run", "move_runs", "open_attempt",
            "set_waiting", "settle_attempts", "withdraw_lapsed",
        ),
        ("tests/conformance/test_fences.py::test_no_update_of_an_attempt_or_a_lease_goes_untested",),
    ),
    "scaling": Room(
        ("trainers/update.py",),
        (
            "tests/trainers/test_loss_scale.py",
            "tests/trainers/loop/test_behind_host.py::test_underflow_is_counted_in_the_first_report_of_each_32_steps",
        ),
    ),
}  # fmt: skip


def enter(name: str) -> None:
    """Goes to a folder of the room's own, where mutmut finds the sources and keeps its mutants."""
    place = ROOT / "build" / "mutation" / name.replace("/", "-")
    place.mkdir(parents=True, exist_ok=True)
    for entry in LINKED:
        if not (place / entry).exists():
            (place / entry).symlink_to(ROOT / entry)
    os.chdir(place)
    config().only_mutate = list(ROOMS[name].code)
    room = ROOMS[name]
    left_out = [f"--deselect={test}" for test in room.without]
    config().pytest_add_cli_args_test_selection = [*room.tests, "-m", FAST, *left_out]


def mutants_of(room: Room) -> list[str]:
    """Returns the names of all mutants of a room, in order."""
    files = {path for pattern in room.code for path in Path().glob(pattern)}
    every = (
        get_mutant_name(path, mutant)
        for path in files
        for mutant in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
    )
    wanted = tuple(f".x_{function}__mutmut_" for function in room.functions)
    return sorted(name for name in every if not wanted or any(part in name for part in wanted))


def results() -> dict[str, str]:
    """Returns what became of each mutant that was run so far."""
    found: dict[str, str] = {}
    for meta in Path("mutants").rglob("*.py.meta"):
        data = SourceFileMutationData(path=meta.relative_to("mutants").with_suffix(""))
        data.load()
        found |= {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}
    return found


def change(diff: str) -> tuple[str, str]:
    """Returns the text that a mutant removes and the text that it adds."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    removed, added = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return " ".join(removed), " ".join(added)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=250, help="mutants to draw; 0 = all (default 250)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    enter(arguments.room)
    every = mutants_of(ROOMS[arguments.room])
    size = min(arguments.sample or len(every), len(every))
    sample = sorted(random.Random(arguments.seed).sample(every, size))
    before = results()
    wanted = [name for name in sample if before.get(name) not in KILLED]
    for _ in range(2):  # Once more for verdicts that mutmut forgot, because other tests are selected now.
        if wanted:
            _run(wanted, arguments.processes)
        outcome = results()
        wanted = [name for name in sample if outcome[name] == "not checked"]

    equivalent = {(entry["from"], entry["to"]) for entry in yaml.safe_load(EQUIVALENT.read_text("utf-8"))}
    counts: Counter[str] = Counter()
    for name in sample:
        status = outcome[name]
        if status in KILLED:
            counts["killed"] += 1
        elif change(diff := get_diff_for_mutant(name)) in equivalent:
            counts["equivalent"] += 1
        else:
            counts[status] += 1
            print(f"\n{name}: {status}\n{diff}")
    judged = size - counts["equivalent"]
    rate = counts["killed"] / judged
    interval = binomtest(counts["killed"], judged).proportion_ci(method="wilson")
    print(
        f"{arguments.room}: {size} of {len(every)} mutants, {dict(counts)}; killed {rate:.1%} "
        f"(95% interval {interval.low:.1%} to {interval.high:.1%})"
    )
    return 0 if rate >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
