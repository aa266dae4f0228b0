"""Which tests `make quick` runs, in one case each: as their code shows, they start, draw and compute nothing.

Folders of `NO_ROOM` are left out, and so is a file that, itself or through what it imports of ours, imports
one of `LARGE`: neither is imported. A test is left out by its marks, where Hypothesis generates its input,
where it is among `LONG`, and where it, its fixtures or what they use in `tests` name one of `STARTS`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

TESTS = Path(__file__).parent
LARGE = {"torch", "transformers", "ray", "safetensors.torch"}
"""They take seconds to import, and tests with them compute."""
NO_ROOM = ("benchmarks", "browser", "extending", "faults", "gpu")
MARKS = ("slow", "ray", "smoke", "postgresql", "image")
STARTS = {
    "subprocess",
    "multiprocessing",
    "runpy",
    "uvicorn",
    "sync_playwright",
    "train",
    "train_in",
    "spawn",
}
"""Processes, servers, browsers, training."""
LONG = {
    "test_a_crash_loop_ends_as_failed_with_the_reason",
    "test_a_driver_that_starts_anew_suggests_what_the_first_would_have",
    "test_a_family_of_equal_accuracies_is_claimed_about_as_rarely_as_promised",
    "test_a_job_whose_driver_never_speaks_is_replaced",
    "test_a_line_without_end_is_not_decompressed",
    "test_a_mail_arrives_encrypted_after_a_login",
    "test_a_new_follower_of_a_long_run_gets_a_thinned_history",
    "test_a_program_with_one_expired_token_is_not_guessing",
    "test_a_public_class_name_has_one_meaning",
    "test_a_report_is_a_page_that_may_load_nothing",
    "test_a_sample_says_how_wide_its_buckets_are",
    "test_a_search_suggests_linked_and_other_values",
    "test_a_suggestion_that_cannot_be_trained_fails_and_the_next_is_asked_for",
    "test_a_suggestion_that_cannot_be_trained_fails_when_answers_are_lost",
    "test_a_worker_that_died_explains_why_the_others_have_no_group",
    "test_access_delivered",
    "test_access_matrix",
    "test_as_many_values_as_allowed_are_read",
    "test_cli_without_service",
    "test_concurrent_claimers_claim_each_once",
    "test_document_is_valid",
    "test_effects_that_are_none_are_claimed_as_rarely_as_promised",
    "test_equal_configurations_tried_unequally_often_rarely_get_a_false_claim",
    "test_every_operation_is_one_of_the_api",
    "test_every_operation_with_data_needs_the_token",
    "test_guessing_tokens_is_refused_and_the_right_one_is_not",
    "test_half_an_hour_without_an_agent_uses_up_no_attempt",
    "test_it_is_drawn_to_where_the_metric_is_good",
    "test_kernels_of_profiled_runs_stand_beside_each_row",
    "test_labels_are_those_that_ray_gives_nodes",
    "test_labels_without_a_matrix_have_their_figures",
    "test_many_series_share_the_points_of_one_answer",
    "test_models_of_few_bits_have_a_section_of_their_own",
    "test_ninety_in_a_hundred_runs_end_within_the_interval",
    "test_no_interleaving_strands_a_run",
    "test_one_answer",
    "test_one_has_no_more_views_than_the_limit",
    "test_pairs_of_which_some_are_equal_keep_the_rate_too",
    "test_positions_are_those_of_the_order_of_claims",
    "test_process",
    "test_ray_accepts_the_slice_that_a_worker_group_asks_for",
    "test_real_reviews_have_both_labels",
    "test_squad_rules",
    "test_ten_minutes_without_ray_relaunch_nothing",
    "test_the_confusion_matrix_of_the_recommended_configuration_is_added_up_over_seeds",
    "test_the_dev_part_of_squad_halves_by_title",
    "test_the_interval_holds_the_truth_as_often_as_it_says",
    "test_the_page_gets_the_figures_of_the_report",
    "test_the_spool_of_a_hung_recorder_is_delivered_at_once_and_removed_when_it_ends",
    "test_thinning_keeps_ends_extremes_and_nan",
    "test_thinning_of_a_long_resumed_series_shows_no_hidden_point",
    "test_too_many_values_are_too_large",
    "test_verify_bundle",
    "test_what_cannot_be_built_is_said",
    "test_where_seeds_spread_it_is_the_paired_t_test_of_scipy",
}
"""Files and functions that take 0.3 s of a CPU or more; `pytest --quick --durations=30` finds others."""


def left_out(path: Path) -> bool:
    """Whether nothing in a test file, or in a folder of tests, is quick."""
    if TESTS not in path.parents:
        return False
    if path.relative_to(TESTS).parts[0] in NO_ROOM:
        return True
    source = path / "conftest.py" if path.is_dir() else path
    return source.name.startswith(("test_", "conftest")) and source.is_file() and _computes(source)


def _computes(path: Path) -> bool:
    """Whether importing this file imports one of `LARGE`, as far as the first columns of its lines show."""
    seen, open_ = set[Path](), [path]
    while open_:
        current = open_.pop()
        if current not in seen:
            seen.add(current)
            modules = _imports(current)
            if any({module, module.partition(".")[0]} & LARGE for module in modules):
                return True
            open_ += (found for module in modules if (found := _file(module)))
    return False


_IMPORT = re.compile(r"^(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)


@cache
def _imports(path: Path) -> list[str]:
    """Modules that a file imports, their packages included, and names that may be modules of a package."""
    found = set[str]()
    for package, names, module in _IMPORT.findall(path.read_text(encoding="utf-8")):
        parts = (package or module).split(".")
        found.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
        found.update(f"{package}.{name}" for name in re.findall(r"\w+", names))
    return sorted(found)


@cache
def _file(module: str) -> Path | None:
    path = TESTS.parent / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the selection, in the order of `items`."""
    first = dict[str, pytest.Item]()
    for item in items:
        if _is_quick(item):
            first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def _is_quick(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    if any(item.get_closest_marker(mark) for mark in MARKS) or hasattr(item.obj, "hypothesis"):
        return False
    if LONG & {item.path.stem, item.originalname}:
        return False
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    return not any(_starts(function) for function in (item.obj, *fixtures))


def _starts(function: Any) -> bool:
    function = inspect.unwrap(getattr(function, "__func__", function))
    return isinstance(function, FunctionType) and _reaches(function)


@cache
def _reaches(function: FunctionType) -> bool:
    """Whether a function of ours names one of `STARTS`, or uses one that does."""
    seen, open_ = set[FunctionType](), [function]
    while open_:
        current = open_.pop()
        if current in seen:
            continue
        seen.add(current)
        names = set(_names(current.__code__))
        if names & STARTS:
            return True
        for name in names:
            open_ += _ours(current.__globals__.get(name))
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _ours(value: Any) -> list[FunctionType]:
    """Functions of ours behind a name: itself, or those of a class."""
    if not getattr(value, "__module__", "").startswith("tests"):
        return []
    if isinstance(value, type):
        return [method for method in vars(value).values() if isinstance(method, FunctionType)]
    value = getattr(value, "__wrapped__", value)
    return [value] if isinstance(value, FunctionType) else []
