"""The search: the cheapest decision whose projected peak is within the budget.

The candidates do not depend on the budget: the hull of the cut and the points between its vertices, and the plans of
the chain (chain.py) for every amount of memory. A budget takes the fastest candidate that fits. So a smaller budget can
only take a slower candidate with a lower peak: the peak never rises when the budget falls.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .again import Unrolled, unroll
from .bound import lower_bound_ps
from .chain import UNREACHABLE, Chain, ChainPlan, Drop, Hold
from .cost import CostGraph
from .cut import (
    Cut,
    CutProblem,
    CutValue,
    Sweep,
    between,
    coarse_sweep,
    cut_of_saved,
    fastest_price,
    leaps,
    solve,
    without_dead_ends,
)
from .errors import BudgetInfeasibleError, CannotPartitionError
from .exact import MAX_DECIDABLE, best_cut, decidable
from .holds import boundaries, holds
from .joint import JointGraph, Side
from .legality import Permission
from .memory import MemoryModel, Projection
from .repair import ladder, repaired
from .units import format_bytes

# Bounds on the work of a search. The hull of a 12-layer GPT has about 20 vertices, and a vertex takes two solves; both
# figures from benchmarks/first.py. A sweep that is cut short is coarser, not wrong.
MAX_CUTS = 48
MAX_CUTS_BESIDE = 12  # where there is a chain, which is finer
MAX_CUTS_HELD = 8
MAX_POINTS = 256
MAX_LEAP = 4
MOST_VALUES_DRAWN = 6_000  # graphs up to so many values show the whole hull; more, and its replays take over a second
MORE_INSTANTS = 2  # of the chosen plan, that bound the time on such graphs; each takes 0.1 ms a value (bound.py)
MEMORY_STEPS = 512  # units of memory in the table of the chain
# How far the replayed peak of a plan is from the memory of its entry in the table: 0 to 4 % below and 1 % above on nine
# networks, a llama-style one of 96 layers among them.
TABLE_ERROR = 0.05
NUM_LAST = 8  # of the chain's plans in the least memory, of which the smallest is taken

# A walk of repair.py ends where the chain's plans are faster by this part of the step: it does not catch up again
# (docs/decisions/0008-repair-on-a-ladder.md).
REPAIR_MARGIN = 0.01

# Without a budget, plans whose projected steps differ by less than this count as equally fast and the lowest peak wins:
# the cost model does not resolve a difference as small (docs/decisions/0003-no-budget.md has the measurements).
TIME_RESOLUTION = 0.03


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decision and the memory that it is projected to need."""

    cut: Cut
    projection: Projection
    unrolled: Unrolled | None = None  # the graph with repetitions, where a value is computed more than once
    is_legal: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """What the search chose, and what it chose from."""

    chosen: Candidate
    inductor: Candidate  # plain Inductor's own decision
    frontier: tuple[Candidate, ...]  # by rising time, falling peak
    lower_bound_ps: int


def cut_problem(joint: JointGraph, permissions: Sequence[Permission], costs: CostGraph) -> CutProblem:
    """Prices and permissions as one problem; backward's own values take part as constants and cost nothing."""
    return tuple(
        CutValue(
            name=value.name,
            inputs=value.inputs,
            is_required=value.index in joint.required,
            bytes=cost.bytes,
            save_ps=None if permission.no_save else cost.save_ps,
            recompute_ps=None if permission.no_recompute else cost.recompute_ps,
            no_save=permission.no_save or "",
            no_recompute=permission.no_recompute or "",
            where=f"{value.op} at {value.source}" if value.source else value.op,
        )
        if value.side is not Side.BACKWARD
        else CutValue(value.name, (), False, 0, 0, None)
        for value, permission, cost in zip(joint.values, permissions, costs.values, strict=True)
    )


@dataclass(frozen=True)
class Search:
    """The search of one graph. What does not depend on the budget is found once, for all the limits that are asked.

    Args:
        joint: the graph.
        problem: its prices and permissions.
        model: replays decisions.
        inductor: plain Inductor's own decision.
        fixed_ps: the part of the step's time that no decision changes.
    """

    joint: JointGraph
    problem: CutProblem
    model: MemoryModel
    inductor: Candidate
    fixed_ps: int

    def choose(self, budget_bytes: int | None, limit_bytes: int | None = None) -> Choice:
        """The fastest decision within a budget; without one, the fastest that is no higher than need be.

        Args:
            budget_bytes: what the user gave, if anything.
            limit_bytes: the highest projected peak to accept, where it is not to be worked out from the budget.

        Raises:
            BudgetInfeasibleError: no candidate's projected peak is within the budget.
            CannotPartitionError: backward needs a value that can be neither saved nor recomputed.
        """
        found = self._searched(budget_bytes, limit_bytes)
        if isinstance(found, Choice):
            return found
        assert budget_bytes is not None
        smallest = found.smallest().projection
        raise refusal(budget_bytes, smallest.peak_bytes, smallest.peak_values, self.model.gradient_bytes)

    def within(self, limit_bytes: int) -> Choice | None:
        """The fastest decision whose projected peak is at most ``limit_bytes``; ``None`` where there is none.

        Raises:
            CannotPartitionError: backward needs a value that can be neither saved nor recomputed.
        """
        found = self._searched(limit_bytes, limit_bytes)
        return found if isinstance(found, Choice) else None

    @cached_property
    def fastest(self) -> Candidate:
        """The decision that no other is faster than, whatever it needs."""
        return self._projected(solve(self.problem, fastest_price(self.problem)))

    @cached_property
    def smallest(self) -> Candidate:
        """The decision with the lowest peak that the search knows."""
        found = self._searched(0, 0)
        return found.chosen if isinstance(found, Choice) else found.smallest()

    def _searched(self, budget_bytes: int | None, limit_bytes: int | None) -> Choice | _Considered:
        """The choice, or all that was considered where none of it is within the budget."""
        limit = _limit_bytes(self.inductor, budget_bytes) if limit_bytes is None else limit_bytes
        main, plans = self._hull, self._plans
        considered = _Considered(self.model, limit, self._projected, list(self._inductors_own))
        considered.add(plans.within(limit) if plans is not None else [])
        if len(self.joint.values) <= MOST_VALUES_DRAWN:
            considered.add([self._projected(cut) for cut in main.vertices])
        else:
            considered.add_lazily(main.vertices)
        considered.add_lazily(self._between)
        if self._projected(main.vertices[0]).projection.peak_bytes > limit:  # else no plan is faster
            considered.add(self._repaired)
        chosen = considered.best()
        if budget_bytes is not None and len(decidable(self.problem)) <= MAX_DECIDABLE:
            better = best_cut(self.problem, self.model, limit, chosen.cut if chosen is not None else None)
            considered.add([self._projected(better)] if better is not None else [])
            chosen = considered.best()
        if chosen is not None and budget_bytes is None:
            deadline_ps = chosen.cut.time_ps + _resolution_ps(chosen, self.fixed_ps)
            considered.add(plans.fast(deadline_ps) if plans is not None else [])
            chosen = considered.smallest_within(deadline_ps, self._between)
        if chosen is None:
            considered.add(plans.smallest() if plans is not None else [])
            chosen = considered.best()
        if chosen is None:
            if budget_bytes is not None:
                return considered
            chosen = considered.smallest()
        return Choice(chosen, self.inductor, considered.frontier(), self._bound_ps(limit, chosen))

    # -- what does not depend on the limit

    @cached_property
    def _known(self) -> dict[Cut, Candidate]:
        return {}

    def _projected(self, cut: Cut) -> Candidate:
        """The decision with its replay, which is made once."""
        if cut not in self._known:
            self._known[cut] = Candidate(cut, self.model.project(cut))
        return self._known[cut]

    @cached_property
    def _settled(self) -> CutProblem:
        return without_dead_ends(self.problem)

    @cached_property
    def _points(self) -> Sequence[int]:
        return boundaries(self.joint, self._settled)

    @cached_property
    def _hull(self) -> Sweep:
        """The hull of the cut; says what is not legal at all."""
        return coarse_sweep(self.problem, MAX_CUTS_BESIDE if self._points else MAX_CUTS)

    @cached_property
    def _plans(self) -> _ChainPlans | None:
        return _ChainPlans(self.joint, self._settled, self.model, self._points) if self._points else None

    @cached_property
    def _between(self) -> list[Cut]:
        return _between_all(self.problem, self._hull, MAX_LEAP if self._plans is None else 0)

    @cached_property
    def _inductors_own(self) -> list[Candidate]:
        return _inductors_own(self.problem, self.model, self.inductor)

    @cached_property
    def _repaired(self) -> list[Candidate]:
        """The plans of repair.py, from the chain's where those are clearly faster; none where the chain's are within
        the margin of the hull's bound at most limits of the ladder."""
        plans, fastest = self._plans, self._projected(self._hull.vertices[0])
        top_bytes = fastest.projection.peak_bytes
        margin_ps = round(REPAIR_MARGIN * (self.fixed_ps + fastest.cut.time_ps))

        def is_beaten(limit_bytes: int, time_ps: int) -> bool:
            return plans is not None and plans.expected_ps(limit_bytes) + margin_ps < time_ps

        def is_loose(limit_bytes: int) -> bool:
            bound_ps = self._hull.lower_bound_ps(limit_bytes - self.model.baseline_bytes)
            return plans is None or (bound_ps is not None and plans.expected_ps(limit_bytes) > bound_ps + margin_ps)

        limits = ladder(top_bytes, self.model.baseline_bytes)
        if 2 * sum(is_loose(limit_bytes) for limit_bytes in limits) < len(limits):
            return []
        other = plans.held_once_within if plans is not None else _no_other
        found = repaired(self.joint, self._settled, self.model, fastest.cut, top_bytes, is_beaten, other)
        return [Candidate(plan.cut, plan.projection) for plan in found]

    def _bound_ps(self, limit_bytes: int, chosen: Candidate) -> int:
        """The least time of any plan within the limit; that of the chosen one where nothing better is known."""
        replays = [chosen.projection, self._projected(self._hull.vertices[0]).projection]
        if len(self.joint.values) <= MOST_VALUES_DRAWN:
            replays += [chosen.projection] * MORE_INSTANTS
        room = max(0, limit_bytes - self.model.baseline_bytes)
        bounds = (
            self._hull.lower_bound_ps(room),  # all that is saved is alive between the sides
            lower_bound_ps(self.joint, self.problem, self.model, limit_bytes, replays),
        )
        own_ps = chosen.cut.time_ps
        return min(own_ps, max((bound for bound in bounds if bound is not None), default=own_ps))


def _no_other(_limit_bytes: int) -> Cut | None:
    """The plan of a chain that is none."""
    return None


def _inductors_own(problem: CutProblem, model: MemoryModel, inductor: Candidate) -> list[Candidate]:
    """Plain Inductor's plan, where it breaks no rule; without what costs more to save than to compute again (casts of
    weights) if that takes no more memory."""
    if not inductor.is_legal:
        return []
    dear = {i for i in inductor.cut.saved if (problem[i].save_ps or 0) > (problem[i].recompute_ps or 0)}
    fallible = {i for i in dear if problem[i].recompute_ps is not None}
    if not fallible:
        return [inductor]
    try:
        cut = cut_of_saved(problem, inductor.cut.saved - fallible)
    except CannotPartitionError:  # one of them comes from what may not be recomputed
        return [inductor]
    cheaper = Candidate(cut, model.project(cut))
    return [cheaper if cheaper.projection.peak_bytes <= inductor.projection.peak_bytes else inductor]


def _limit_bytes(inductor: Candidate, budget_bytes: int | None) -> int:
    """The highest projected peak that is accepted: what the budget leaves, and never more than plain Inductor needs."""
    most = inductor.projection.peak_bytes
    if budget_bytes is None or (inductor.is_legal and budget_bytes >= most):
        return most
    return budget_bytes


def _resolution_ps(candidate: Candidate, fixed_ps: int) -> int:
    """The difference in time that the cost model does not resolve, for a step as long as this candidate's."""
    return round(TIME_RESOLUTION * (fixed_ps + candidate.cut.time_ps))


class _Considered:
    """The candidates seen so far, each projected at most once and only when it could win."""

    def __init__(
        self, model: MemoryModel, limit_bytes: int, project: Callable[[Cut], Candidate], projected: list[Candidate]
    ) -> None:
        self.model, self.limit_bytes, self.project, self.projected = model, limit_bytes, project, projected
        self.unprojected: list[Cut] = []

    def add(self, candidates: list[Candidate]) -> None:
        self.projected.extend(candidates)

    def add_lazily(self, cuts: Iterable[Cut]) -> None:
        """Project the cuts in the order of their time, until one fits or is no faster than the best so far."""
        fastest_first = sorted(cuts, key=lambda cut: (cut.time_ps, cut.saved_bytes))
        best = self.best()
        for position, cut in enumerate(fastest_first):
            if best is not None and cut.time_ps >= best.cut.time_ps:
                self.unprojected.extend(fastest_first[position:])
                return
            if self.model.baseline_bytes + cut.saved_bytes > self.limit_bytes:
                self.unprojected.append(cut)  # what is saved alone is more than the limit
                continue
            self.projected.append(self.project(cut))
            if self.projected[-1].projection.peak_bytes <= self.limit_bytes:
                self.unprojected.extend(fastest_first[position + 1 :])
                return

    def best(self) -> Candidate | None:
        """The fastest candidate that fits; among equals the one that was considered first."""
        fitting = [c for c in self.projected if c.projection.peak_bytes <= self.limit_bytes]
        return min(fitting, key=lambda c: (c.cut.time_ps, c.cut.saved_bytes), default=None)

    def smallest_within(self, deadline_ps: int, cuts: Iterable[Cut]) -> Candidate | None:
        """The lowest peak of all that is no slower than ``deadline_ps``, ``cuts`` among them; those that cannot have it
        are not projected, because all that is saved is alive when backward starts."""
        lowest = self._lowest([c for c in self.projected if c.cut.time_ps <= deadline_ps])
        for cut in sorted(cuts, key=lambda cut: cut.saved_bytes):
            floor_bytes = self.model.baseline_bytes + cut.saved_bytes
            if cut.time_ps <= deadline_ps and (lowest is None or floor_bytes < lowest.projection.peak_bytes):
                self.projected.append(self.project(cut))
                lowest = self._lowest([self.projected[-1], *([lowest] if lowest else [])])
        return lowest

    def _lowest(self, candidates: Iterable[Candidate]) -> Candidate | None:
        fitting = [c for c in candidates if c.projection.peak_bytes <= self.limit_bytes]
        return min(fitting, key=lambda c: (c.projection.peak_bytes, c.cut.time_ps), default=None)

    def smallest(self) -> Candidate:
        """The candidate with the lowest peak of all."""
        self.projected.extend(map(self.project, self.unprojected))
        self.unprojected.clear()
        return min(self.projected, key=lambda c: (c.projection.peak_bytes, c.cut.time_ps))

    def frontier(self) -> tuple[Candidate, ...]:
        """The projected candidates that no other beats in both time and peak."""
        kept: list[Candidate] = []
        for candidate in sorted(self.projected, key=lambda c: (c.cut.time_ps, c.projection.peak_bytes)):
            if not kept or candidate.projection.peak_bytes < kept[-1].projection.peak_bytes:
                kept.append(candidate)
        return tuple(kept)


class _ChainPlans:
    """The plans of a chain, by falling memory and rising time; each is unrolled and replayed when it is asked for."""

    def __init__(self, joint: JointGraph, problem: CutProblem, model: MemoryModel, points: Sequence[int]) -> None:
        self.joint, self.problem, self.model = joint, problem, model
        self.held = holds(joint, problem, model, points, MAX_CUTS_HELD)
        self.chain = Chain(self.held.blocks, MEMORY_STEPS, -(-self.held.largest_bytes // MEMORY_STEPS) or 1)
        self.units = self.chain.breakpoints()
        self.known: dict[int, Candidate] = {}
        self.asked: dict[int, Candidate] = {}  # since the last limit: what is chosen does not depend on earlier ones

    def at(self, position: int) -> Candidate:
        """The plan for one amount of memory."""
        if position not in self.known:
            self.known[position] = self._replayed(self.chain.plan(self.units[position]))
        self.asked[position] = self.known[position]
        return self.known[position]

    def _replayed(self, plan: ChainPlan) -> Candidate:
        if not any(isinstance(step, Drop) for step in plan.steps):
            cut = self._held_once(plan)
            return Candidate(cut, self.model.project(cut))
        graph = unroll(self.joint, self.problem, self.held.chain, self.held.always_saved, plan)
        cut = cut_of_saved(_unrolled_problem(self.problem, graph), graph.saved)
        projection = replace(self.model, joint=graph.joint).project(cut)
        repeats = len(graph.origin) > len(self.joint.values)
        return Candidate(cut, projection, graph if repeats else None)

    def _held_once(self, plan: ChainPlan) -> Cut:
        """The decision of a plan that drops no block: it computes nothing twice, its graph is the graph itself."""
        held = (step.option.held for step in plan.steps if isinstance(step, Hold))
        return cut_of_saved(self.problem, self.held.always_saved.union(*held))

    def _units_within(self, limit_bytes: int) -> int:
        units = (limit_bytes - self.model.baseline_bytes) // self.chain.unit_bytes
        return max(0, min(units, self.chain.num_units))

    def expected_ps(self, limit_bytes: int) -> int:
        """The time of the fastest plan within a limit, as the table tells it without a replay."""
        return self.chain.extra_ps(self._units_within(limit_bytes))

    def held_once_within(self, limit_bytes: int) -> Cut | None:
        """The decision of the fastest plan within a limit, as the table tells it; ``None`` where there is none that
        computes nothing twice."""
        if self.expected_ps(limit_bytes) >= UNREACHABLE:
            return None
        plan = self.chain.plan(self._units_within(limit_bytes))
        return None if any(isinstance(step, Drop) for step in plan.steps) else self._held_once(plan)

    def within(self, limit_bytes: int) -> list[Candidate]:
        """The fastest plan that fits, and what was replayed to find it."""
        positions = range(len(self.units))
        self.asked = {}
        fits = self._fits if len(self.problem) <= MOST_VALUES_DRAWN else self._seems_to_fit
        position = bisect.bisect_left(positions, True, key=lambda i: fits(i, limit_bytes))
        if position < len(positions) and not self._fits(position, limit_bytes):
            position = bisect.bisect_left(positions, True, key=lambda i: self._fits(i, limit_bytes))
        if position == len(positions):
            self.smallest()
        return list(self.asked.values())

    def _fits(self, position: int, limit_bytes: int) -> bool:
        return self.at(position).projection.peak_bytes <= limit_bytes

    def _seems_to_fit(self, position: int, limit_bytes: int) -> bool:
        """Whether the plan fits, by the table's own memory where that is far from the limit, else by replay. The same
        positions are asked for every limit, so a lower limit never ends before a higher one."""
        most_bytes = self.model.baseline_bytes + self.units[position] * self.chain.unit_bytes
        if abs(most_bytes - limit_bytes) > TABLE_ERROR * limit_bytes:
            return most_bytes <= limit_bytes
        return self._fits(position, limit_bytes)

    def fast(self, deadline_ps: int) -> list[Candidate]:
        """The plan in the least memory that is no slower than ``deadline_ps``."""
        position = bisect.bisect_right(range(len(self.units)), deadline_ps, key=lambda i: self.at(i).cut.time_ps)
        return [self.at(position - 1)] if position else []

    def smallest(self) -> list[Candidate]:
        """The last plans: what the table cannot see decides among them, and the very last need not be the smallest."""
        return [self.at(position) for position in range(max(0, len(self.units) - NUM_LAST), len(self.units))]


def _unrolled_problem(problem: CutProblem, graph: Unrolled) -> CutProblem:
    """The problem of a graph with repetitions: prices are those of the values that are repeated."""
    required = graph.joint.required
    return tuple(
        CutValue(value.name, value.inputs, i in required, old.bytes, old.save_ps, old.recompute_ps)
        if value.side is not Side.BACKWARD
        else old
        for i, (value, old) in enumerate(
            (value, problem[origin]) for value, origin in zip(graph.joint.values, graph.origin, strict=True)
        )
    )


def inductor_candidate(
    joint: JointGraph, problem: CutProblem, model: MemoryModel, saved_names: frozenset[str]
) -> Candidate:
    """Plain Inductor's decision: what 100 % means, and a candidate where it breaks none of our rules."""
    saved = frozenset(value.base for value in joint.values if value.name in saved_names)
    try:
        cut = cut_of_saved(problem, saved)
        return Candidate(cut, model.project(cut))
    except CannotPartitionError:
        cut = cut_of_saved(tuple(_lenient(value) for value in problem), saved)
        return Candidate(cut, model.project(cut), is_legal=False)


def _lenient(value: CutValue) -> CutValue:
    """The value with all that Inductor allows itself: whatever it does not save, it recomputes."""
    recompute = 0 if value.inputs and value.recompute_ps is None else value.recompute_ps
    return CutValue(value.name, value.inputs, value.is_required, value.bytes, value.save_ps or 0, recompute)


def _between_all(problem: CutProblem, found: Sweep, max_leap: int) -> list[Cut]:
    """Cuts between the vertices of the hull, and from each vertex one part of a step that is not its turn yet."""
    steps = list(zip(found.vertices, found.vertices[1:], strict=False))
    most = MAX_POINTS if len(problem) <= MOST_VALUES_DRAWN else -(-MAX_POINTS // max(1, len(steps)))
    cuts = [cut for fast, small in steps for cut in between(problem, fast, small, most)]
    for position, start in enumerate(found.vertices):
        for fast, small in steps[position + 1 : position + 1 + max_leap]:
            cuts.extend(leaps(problem, start, fast, small))
    distinct = {(cut.need, cut.redo): cut for cut in cuts}.values()
    return _thinned(sorted(distinct, key=lambda cut: (cut.time_ps, cut.saved_bytes)), MAX_POINTS)


def _thinned(cuts: list[Cut], most: int) -> list[Cut]:
    """At most ``most`` of them, evenly spaced."""
    step = -(-len(cuts) // most) or 1
    return cuts[::step]


def refusal(
    budget_bytes: int, smallest_bytes: int, peak_values: Sequence[tuple[str, int]], gradient_bytes: int
) -> BudgetInfeasibleError:
    """The error for a budget that no plan meets, the smallest of which has this peak, made of these values."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak_values[:4])
    rest = " and smaller values" if len(peak_values) > 4 else ""
    return BudgetInfeasibleError(
        f"The memory budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) cannot be met: the smallest peak"
        f" that can be reached is {format_bytes(smallest_bytes, round_up=True)} ({smallest_bytes} bytes). It is made of"
        f" {parts}{rest}; {format_bytes(gradient_bytes)} of gradients stay until the end of the step. A smaller"
        " batch, shorter sequences or a lower-precision dtype would help; fallback='inductor' (REMAT_FALLBACK=inductor)"
        " compiles as plain Inductor does, without a budget.",
        budget_bytes,
        smallest_bytes,
    )
