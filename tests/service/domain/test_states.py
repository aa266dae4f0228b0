"""The state machines: every state is placed, terminal states end only by a retry."""

from __future__ import annotations

from service.domain.states import (
    EXPERIMENT_TRANSITIONS,
    RUN_TRANSITIONS,
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    ExperimentState,
    RunState,
)


def test_every_state_has_its_transitions() -> None:
    assert set(EXPERIMENT_TRANSITIONS) == set(ExperimentState)
    assert set(RUN_TRANSITIONS) == set(RunState)


def test_a_terminal_state_moves_only_to_queued() -> None:
    for experiment in TERMINAL_EXPERIMENT_STATES:
        assert EXPERIMENT_TRANSITIONS[experiment] == {ExperimentState.queued}
    for run in TERMINAL_RUN_STATES:
        assert RUN_TRANSITIONS[run] <= {RunState.queued}


def test_every_state_can_be_reached_and_can_end() -> None:
    for transitions, terminal, first in (
        (EXPERIMENT_TRANSITIONS, TERMINAL_EXPERIMENT_STATES, ExperimentState.queued),
        (RUN_TRANSITIONS, TERMINAL_RUN_STATES, RunState.queued),
    ):
        for start in transitions:
            reached = {start}
            while True:
                further = set().union(*(transitions[state] for state in reached)) | reached  # type: ignore[index]
                if further == reached:
                    break
                reached = further
            assert reached & terminal
            assert start is not first or reached == set(transitions)
