"""Which runs stop for a run that finds too few free devices.

The rules, and why no two runs can preempt each other in turn, are in the docstring of `allowances`.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.fairness.lanes import Lanes, LaneState, Mode, UserLane, Yielder
from service.fairness.rules import ROUNDING, permitted
from service.fairness.state import Claimant, Preemption


class Preemptions:
    """The preemptions of one pass.

    Args:
        lanes: where devices are taken; they are counted as given back there.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._noted: dict[tuple[int, str, int], Preemption] = {}

    def reclaim(
        self, state: LaneState, user: UserLane, priority: int, claimant: Claimant, devices: float, mode: Mode
    ) -> bool:
        """Takes devices of preemptible runs for one run; False = it may not take enough."""
        usable = max(0.0, state.free)
        taken = self._take(state, user, priority, claimant, devices, mode)
        freed = usable + state.pending + sum(each.demand.devices for each, _ in taken)
        if freed + ROUNDING < devices:
            self._put_back(state, taken)
            return False
        for each, _ in taken:
            self._note(each, state.hardware, claimant.id)
        # What is free is kept for this run as well; what is not free yet can be promised, but not given.
        state.free -= usable
        state.pending = freed - devices
        return True

    def _take(
        self,
        state: LaneState,
        user: UserLane,
        priority: int,
        claimant: Claimant,
        devices: float,
        mode: Mode,
    ) -> list[tuple[Yielder, bool]]:
        """Takes runs one by one until there are enough devices, or none is left that it may take.

        Returns:
            Whose runs, and whether each had worked for a useful time.
        """
        rate = devices * state.price
        own, own_user = user.project.score(rate), user.score(rate)
        if mode is Mode.large:
            own, own_user = user.project.score(), user.score()
        base = priority
        if mode is not Mode.large:
            base = min(priority, permitted(claimant.priority, user.project.terms))
        # Newcomers and guarantees wait for one checkpoint, not for the end of a useful time.
        at_once = mode is Mode.guaranteed or (mode is Mode.share and user.held <= ROUNDING)

        def is_able(each: Yielder) -> bool:
            smaller = mode is Mode.large and each.demand.devices < devices
            return each.left > 0 or (each.early > 0 and (at_once or smaller))

        taken: list[tuple[Yielder, bool]] = []
        freed = max(0.0, state.free) + state.pending
        while freed + ROUNDING < devices:
            best: Yielder | None = None
            least: tuple[float, ...] = ()
            for name, yielders in state.yielders.items():
                if name == user.project.name:
                    able = [
                        each
                        for each in yielders
                        if is_able(each) and self._user_yields(each, user, base, own_user, mode)
                    ]
                elif state.may_yield(name, base, own, mode):
                    able = [
                        each
                        for each in yielders
                        if is_able(each) and self._project_yields(each, user, base, own, mode, state.hardware)
                    ]
                else:
                    continue
                for each in able:
                    order = each.order
                    if best is None or order < least:
                        best, least = each, order
            if best is None:
                break
            taken.append((best, best.left > 0))
            self._move(state, best, -1, is_early=not best.left)
            freed += best.demand.devices
        return taken

    def _put_back(self, state: LaneState, taken: Sequence[tuple[Yielder, bool]]) -> None:
        for each, was_useful in taken:
            self._move(state, each, +1, is_early=not was_useful)

    @staticmethod
    def _user_yields(each: Yielder, user: UserLane, base: int, own: float, mode: Mode) -> bool:
        """Returns whether a run of the same project may be taken for a user's."""
        if each.priority != base or mode is Mode.guaranteed:
            return each.priority < base
        if each.user is user:
            return False
        left = each.user.score(-each.rate)
        return left > own or (left == own and (mode is Mode.share or each.user.name > user.name))

    @staticmethod
    def _project_yields(
        each: Yielder, user: UserLane, base: int, own: float, mode: Mode, hardware: str
    ) -> bool:
        """Returns whether a run of another project may be taken."""
        other = each.user.project
        if other.held[hardware] - each.demand.devices < other.guaranteed(hardware) - ROUNDING:
            return False
        if mode is Mode.guaranteed or each.priority < base:
            return True
        if each.priority != base:
            return False
        left = other.score(-each.rate)
        return left > own or (left == own and (mode is Mode.share or other.name > user.project.name))

    def _move(self, state: LaneState, each: Yielder, runs: int, *, is_early: bool) -> None:
        """Counts a run as taken (-1), or as held again (+1)."""
        if is_early:
            each.early += runs
        else:
            each.left += runs
        self._lanes.change(each.user, state, runs * each.demand.devices, runs)
        self._lanes.given[each.claimant.id][state.hardware] += runs * each.demand.devices

    def _note(self, each: Yielder, hardware: str, for_id: int) -> None:
        key = (each.claimant.id, hardware, for_id)
        before = self._noted.get(key)
        self._noted[key] = Preemption(
            each.claimant.id,
            hardware,
            1 + (before.runs if before else 0),
            each.demand.devices + (before.devices if before else 0.0),
            each.demand.next_checkpoint_s,
            for_id,
        )

    def decided(self) -> tuple[Preemption, ...]:
        """Returns the preemptions so far, by whose runs stop, hardware, and for whom."""
        return tuple(self._noted[key] for key in sorted(self._noted))
