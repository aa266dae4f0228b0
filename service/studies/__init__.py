"""What follows when experiments end: later parts of studies, and notifications of ends without a winner.

Once the parts that a part needs have succeeded, it is submitted for its owner.

Several processes may do this at the same time, and one may die at any moment: a part leaves `waiting` in the
transaction that stores its experiment, and what is left to do is read from the database.
"""

import functools
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from service.config.document import Problem, SpecError, parse
from service.config.settings import Settings
from service.db.errors import NotFound
from service.domain.access import EVERYTHING, Action, Actor, Visibility
from service.domain.events import Topic
from service.domain.notifications import UNDECIDED
from service.domain.records import Experiment
from service.domain.shares import month_of
from service.domain.states import EXPERIMENT_STATES_WITH_RESULT, ExperimentState
from service.domain.studies import PartState, StudyPart
from service.planner.forecasting import budget_problems
from service.scheduling.admission import admit, read_spec
from service.specs.experiment import ExperimentSpec
from service.specs.project_limits import NO_LIMITS, ProjectLimits, refused_priority, spent_budget
from service.specs.study import parse_study, part_text
from service.store import NewExperiment, Store, StoreError
from service.store.base import until_stopped
from service.store.people import Refused
from service.store.studies import WaitingStudy

logger = logging.getLogger(__name__)

_SUBMITTED_EVERY_S = 2.0  # Between looks for parts whose turn has come
_JUDGED_EVERY_S = 5.0  # Between looks for experiments that have ended
_LOOK_BACK_S = 86_400.0  # Of experiments that ended while no scheduler was running


class NotPossible(Exception):
    """A part cannot be submitted; the message is one line."""


class StudyParts:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._catalogue = settings.catalogue()

    def run(self, stop: threading.Event) -> None:
        until_stopped(self.run_once, _SUBMITTED_EVERY_S, "parts of studies", stop)

    def run_once(self) -> None:
        """Submits the parts whose turn has come, and refuses those that never can be."""
        for waiting in self._store.studies.waiting():
            try:
                self._advance(waiting)
            except StoreError:
                raise
            except Exception:
                # A study with which something is wrong must not hold up all others.
                logger.exception("study %d: its parts could not be judged; trying again", waiting.study.id)

    def _advance(self, waiting: WaitingStudy) -> None:
        known = {part.name: part for part in waiting.study.parts}
        for part in waiting.study.parts:
            if part.state is not PartState.waiting:
                continue
            needed = [known[name] for name in part.needs]
            try:
                if reason := next(filter(None, map(_never_succeeds, needed)), None):
                    raise NotPossible(reason)
                if all(_succeeded(one) for one in needed):
                    self._submit(waiting, part, known)
            except NotPossible as error:
                self._store.studies.refuse_part(waiting.study.id, part.name, str(error))
                known[part.name] = replace(part, state=PartState.refused)
                logger.info("study %d: part %s is refused: %s", waiting.study.id, part.name, error)
            except OSError as error:
                logger.warning("study %d: part %s waits: %s", waiting.study.id, part.name, error)

    def _submit(self, waiting: WaitingStudy, part: StudyPart, known: Mapping[str, StudyPart]) -> None:
        from service.studies.best import written  # The statistics are large, and seldom needed.

        study = waiting.study
        try:
            specs = parse_study(parse(waiting.text.encode()), self._catalogue).parts
            document, chosen = written(self._store, specs, part.name, known)
            new = self._admitted(study.owner, part_text(study.name, part.name, document))
            experiment = self._store.studies.submit_part(study.id, part.name, new, chosen)
        except SpecError as error:
            raise NotPossible(str(error)) from None
        if experiment is not None:
            logger.info("study %d: part %s is experiment %d", study.id, part.name, experiment.id)

    def _admitted(self, owner: str, text: str) -> NewExperiment:
        spec = read_spec(text.encode(), self._catalogue)
        limits = self._store.projects.all_limits().get(spec.project) or NO_LIMITS
        visible = self._permitted(owner, spec, limits)
        if problems := budget_problems(spec, self._store, self._catalogue):
            raise SpecError(problems)
        # The cluster was judged when the study was submitted: a node that is away now does not end it.
        plans, reuse = admit(
            spec,
            self._settings,
            self._catalogue,
            None,
            now_s=self._store.clock(),
            find_run=functools.partial(self._store.runs.find, visible=visible),
            find_equal=functools.partial(self._store.runs.equal, visible=visible),
        )
        return NewExperiment(
            spec,
            plans,
            text,
            owner,
            reuse=reuse,
            actor=Actor(owner),
            most_queued=limits.queued_runs_per_user,
        )

    def _permitted(self, owner: str, spec: ExperimentSpec, limits: ProjectLimits) -> Visibility:
        """Checks what the owner may do today, and returns the projects that they see."""
        project = spec.project
        try:
            self._store.people.user(owner)
            principal = self._store.people.principal_of_user(owner)
        except NotFound:
            return EVERYTHING  # Let in by the first token or on loopback, without being a user.
        except Refused as refused:
            raise NotPossible(f"{owner}: {refused}") from None
        reason = principal.lacks(Action.submit, project, owner)
        if reason is None and not principal.administrator:
            reason = refused_priority(limits, project, principal.roles.get(project), spec.queue.priority)
        if reason is None and limits.budgets.limited():
            now = month_of(self._store.clock()).name
            reason = spent_budget(limits, project, self._store.projects.spent(project), now)
        if reason is not None:
            raise SpecError([Problem("invalid-value", "project", reason)])
        return principal.visibility


def _succeeded(part: StudyPart) -> bool:
    return part.experiment is not None and part.experiment.state in EXPERIMENT_STATES_WITH_RESULT


def _never_succeeds(part: StudyPart) -> str | None:
    """Why a part that another needs has no result and will have none; None = it has, or may have."""
    if part.state in (PartState.refused, PartState.cancelled):
        return f"part {part.name} was {part.state}"
    if part.state is PartState.submitted and part.experiment is None:
        return f"the experiment of part {part.name} was deleted"
    if part.experiment and part.experiment.state in (ExperimentState.failed, ExperimentState.cancelled):
        ended = "failed" if part.experiment.state is ExperimentState.failed else "was cancelled"
        return f"part {part.name} {ended} (experiment {part.experiment.id})"
    return None


class UndecidedEnds:
    """Notifies of experiments that ended without a proven winner, once for each end."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._judged: set[tuple[int, int]] = set()  # Experiments with their attempts

    def run(self, stop: threading.Event) -> None:
        until_stopped(self.run_once, _JUDGED_EVERY_S, "ended experiments", stop)

    def run_once(self) -> None:
        notifications = self._store.notifications
        if not any(Topic.undecided in one.topics for one in notifications.subscriptions()):
            return
        since_s = self._store.clock() - _LOOK_BACK_S
        ended = self._store.experiments.page(filter=f"ended_s > {since_s}", order_by="ended_s desc").items
        for one in ended:
            if one.state not in EXPERIMENT_STATES_WITH_RESULT or (one.id, one.attempt) in self._judged:
                continue
            try:
                why = verdict(self._store, one)
            except StoreError:
                raise
            except Exception:
                # An experiment with which something is wrong must not hold up all others.
                logger.exception("experiment %d could not be judged", one.id)
                why = None
            if why is not None:
                named = {"id": one.id, "name": one.name, "owner": one.owner}
                key = f"undecided:{one.id}:{one.attempt}"
                notifications.notice(key, UNDECIDED, one.project, why, {"experiment": named})
            self._judged.add((one.id, one.attempt))


def verdict(store: Store, experiment: Experiment) -> str | None:
    """Says that the winner is not proven; None = it is, or there is only one configuration."""
    # Imported here: the statistics are large, and seldom needed.
    from service.analysis.answers import AnalysisError
    from service.analysis.question import Question
    from service.analysis.run_table import read_run_table

    with suppress(AnalysisError):
        answer = Question(read_run_table(store, [experiment.id])).recommend()
        claim = answer.over_runner_up
        if answer.runner_up is not None and (claim is None or claim.verdict == "undecided"):
            return f"undecided: {answer.text}"
    return None
