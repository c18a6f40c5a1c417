"""The cut: which values to save and which to recompute, as one exact minimum s-t cut.

For each forward value v there are two booleans: ``need(v)``, v exists in backward, and ``redo(v)``, v is computed there
again. Redoing v needs its inputs. The cost is ``recompute(v)`` where v is redone and ``save(v)`` where v is needed and
not redone; both are submodular, so the optimum is a minimum cut with two flow nodes a value (docs/cut.md):

    (1) source -> need(v)       infinite      backward reads v
    (2) need(v) -> redo(v)      save(v)       infinite when v may not be saved
    (3) redo(v) -> sink         recompute(v)  infinite when v may not be recomputed
    (4) redo(v) -> need(u)      infinite      for each input u of v

torch/_functorch/partitioners.py builds the same pair of flow nodes without (3): recomputing has no price there and is
banned by rule instead. Capacities are integers, because a float flow can return a partition that is not the cut.

Kolmogorov, Zabih: What energy functions can be minimized via graph cuts? (PAMI 26(2), 2004).
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from .errors import CannotPartitionError


@dataclass(frozen=True, slots=True)
class CutValue:
    """One value of the problem. ``None`` as a price means: not allowed."""

    name: str
    inputs: tuple[int, ...]  # positions of the values that recomputing this one reads; all smaller than its own
    is_required: bool  # backward itself reads it
    bytes: int
    save_ps: int | None
    recompute_ps: int | None
    no_save: str = "it may not be saved"  # why not, for the error
    no_recompute: str = "it may not be recomputed"
    where: str = ""  # its op and source line, for the error


CutProblem = tuple[CutValue, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A decision for each value, and what it adds up to."""

    need: frozenset[int]
    redo: frozenset[int]
    saved_bytes: int
    time_ps: int  # of all saves and all recomputes

    @property
    def saved(self) -> frozenset[int]:
        return self.need - self.redo


@dataclass(frozen=True, slots=True)
class Price:
    """What a byte costs, as the exact fraction ``byte_weight / time_weight`` picoseconds a byte."""

    time_weight: int
    byte_weight: int


def fastest_price(problem: CutProblem) -> Price:
    """Time decides, bytes break ties."""
    return Price(time_weight=1 + sum(value.bytes for value in problem), byte_weight=1)


def smallest_price(problem: CutProblem) -> Price:
    """Bytes decide, time breaks ties."""
    return Price(time_weight=1, byte_weight=1 + _total_ps(problem))


def _total_ps(problem: CutProblem) -> int:
    return sum((value.save_ps or 0) + (value.recompute_ps or 0) for value in problem)


SOURCE, SINK = -1, -2


def solve(problem: CutProblem, price: Price) -> Cut:
    """The cheapest cut at one price; among equals the one that needs the fewest values, so it is unique.

    Raises:
        CannotPartitionError: a value that backward needs can be neither saved nor recomputed.
    """
    return Network(problem).solve(price)


# Tail, head, time_ps, bytes, whether it is infinite: a capacity of ``time_weight * time_ps + byte_weight * bytes``, or
# more than all of those together.
_Edge: TypeAlias = tuple[int, int, int, int, bool]


class Network:
    """The flow network of one problem: built once, solved at many prices.

    Only values that backward can come to need take part. A value that may not be saved takes one flow node for both of
    its booleans, and one that only a single recomputation reads takes the node of that one. What infinite edges lead to
    from the source is on its side in any case; the rest falls apart into components that share no edge, and equal
    components, as identical layers make them, are solved once. No cut changes.
    """

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.need: dict[int, int] = {}
        self.redo: dict[int, int] = {}  # absent: may not be recomputed
        self._name_flow_nodes()
        edges = list(self._edges())
        self.settled = _infinitely_far(edges)
        self.always = frozenset(index for index, node in self.need.items() if node in self.settled)
        self.always_redo = frozenset(index for index, node in self.redo.items() if node in self.settled)
        open_edges, constant = _opened(edges, self.settled)
        self.constant_ps, self.constant_bytes = (sum(edge[2] for edge in constant), sum(edge[3] for edge in constant))
        self.kinds: list[_Kind] = []  # of components
        self.parts = self._parts(open_edges)

    @property
    def num_flows(self) -> int:
        """How many flows were computed so far."""
        return sum(kind.num_flows for kind in self.kinds)

    def solve(self, price: Price) -> Cut:
        """The cheapest cut at one price (see ``solve``)."""
        if SINK in self.settled:
            raise CannotPartitionError(_conflict(self.problem))
        need, redo = [self.always], [self.always_redo]
        time_ps, saved_bytes = self.constant_ps, self.constant_bytes
        answers = [kind.solve(price) for kind in self.kinds]
        for part in self.parts:
            answer = answers[part.kind]
            need.append(frozenset([part.needs[slot] for slot in answer.needs]))
            redo.append(frozenset([part.redoes[slot] for slot in answer.redoes]))
            time_ps += answer.time_ps
            saved_bytes += answer.bytes
        return Cut(frozenset().union(*need), frozenset().union(*redo), saved_bytes, time_ps)

    def _parts(self, edges: Sequence[_Edge]) -> list[_Part]:
        """The components, in the order of their first values."""
        root = _components_of(edges)
        edges_of: dict[int, list[_Edge]] = {}
        for edge in edges:
            edges_of.setdefault(root[edge[1] if edge[0] == SOURCE else edge[0]], []).append(edge)
        fed = {root[edge[1]] for edge in edges if edge[0] == SOURCE}  # nothing else can be on the source's side
        needs: dict[int, list[tuple[int, int]]] = {place: [] for place in fed}
        redoes: dict[int, list[tuple[int, int]]] = {place: [] for place in fed}
        for found, nodes in ((needs, self.need), (redoes, self.redo)):
            for index, node in sorted(nodes.items()):
                if root.get(node) in fed:
                    found[root[node]].append((index, node))
        numbers: dict[Hashable, int] = {}
        parts = []
        for place in sorted(fed):
            key = _relative(edges_of[place], needs[place], redoes[place])
            number = numbers.setdefault(key, len(numbers))
            if number == len(self.kinds):
                self.kinds.append(_Kind(*key))
            parts.append(_Part(number, tuple(i for i, _ in needs[place]), tuple(i for i, _ in redoes[place])))
        return parts

    def _name_flow_nodes(self) -> None:
        reached = reachable(self.problem)
        readers = self._single_readers(reached)
        for index in sorted(reached, reverse=True):
            if index in readers:
                self.need[index] = self.redo[readers[index]]
            elif index not in self.need:
                self.need[index] = 2 * index
            value = self.problem[index]
            if value.recompute_ps is not None:
                self.redo[index] = self.need[index] if value.save_ps is None else 2 * index + 1

    def _single_readers(self, reached: set[int]) -> dict[int, int]:
        """Values that backward itself does not read and that exactly one recomputation does, with that one."""
        readers: dict[int, int] = {}
        several: set[int] = set()
        for index in reached:
            for source in self.problem[index].inputs if self.problem[index].recompute_ps is not None else ():
                if readers.setdefault(source, index) != index:
                    several.add(source)
        return {
            source: reader
            for source, reader in readers.items()
            if source not in several and not self.problem[source].is_required
        }

    def _edges(self) -> Iterator[_Edge]:
        for index, need in sorted(self.need.items()):
            value, redo = self.problem[index], self.redo.get(index, SINK)
            if value.is_required:
                yield SOURCE, need, 0, 0, True
            if need != redo:
                yield need, redo, value.save_ps or 0, value.bytes, value.save_ps is None
            if redo != SINK:
                yield redo, SINK, value.recompute_ps or 0, 0, False
                for source in value.inputs:
                    if self.need[source] != redo:
                        yield redo, self.need[source], 0, 0, True


class Residual(nx.DiGraph):  # type: ignore[misc]  # networkx has no types
    """A residual network as networkx's flows take it, with plain dictionaries for edges: to read them through
    networkx's views takes as long as the flow itself."""

    def __getitem__(self, node: Hashable) -> Any:
        return self._succ[node]

    @property
    def succ(self) -> Any:
        return self._succ

    @property
    def pred(self) -> Any:
        return self._pred


class _Kind:
    """Equal components of a network. Flow nodes are numbered from 0; ``needs[slot]`` is the node of the slot's value.

    The cost of a cut is a line over the price of a byte, and the cheapest one is the lower envelope of those lines. So
    where one cut is the answer at two prices, it is the answer at all prices between them.
    """

    def __init__(self, edges: tuple[_Edge, ...], needs: tuple[int, ...], redoes: tuple[int, ...]) -> None:
        self.edges, self.needs, self.redoes = edges, needs, redoes
        self.known: list[tuple[Fraction, _Answer]] = []  # by rising price of a byte
        self.num_flows = 0
        self.network = Residual()
        self.network.add_nodes_from((SOURCE, SINK))
        for tail, head, *_ in edges:
            self.network.add_edges_from(((tail, head), (head, tail)))

    def solve(self, price: Price) -> _Answer:
        """The cheapest cut at one price; among equals the smallest source side."""
        byte_price = Fraction(price.byte_weight, price.time_weight)
        at = bisect.bisect_left(self.known, byte_price, key=lambda known: known[0])
        if at < len(self.known) and (self.known[at][0] == byte_price or self._is_answer_before(at)):
            return self.known[at][1]
        answer = self._flow(price)
        self.known.insert(at, (byte_price, answer))
        return answer

    def _is_answer_before(self, at: int) -> bool:
        return at > 0 and self.known[at - 1][1] == self.known[at][1]

    def _flow(self, price: Price) -> _Answer:
        self.num_flows += 1
        self._set_capacities(price)
        boykov_kolmogorov(self.network, SOURCE, SINK, residual=self.network)
        side = _source_side(self.network)
        cut = [edge for edge in self.edges if edge[0] in side and edge[1] not in side]
        answer = _Answer(
            needs=tuple(slot for slot, node in enumerate(self.needs) if node in side),
            redoes=tuple(slot for slot, node in enumerate(self.redoes) if node in side),
            time_ps=sum(edge[2] for edge in cut),
            bytes=sum(edge[3] for edge in cut),
        )
        cost, flow = _cost(answer.time_ps, answer.bytes, price), self.network.graph["flow_value"]
        if cost != flow or any(edge[4] for edge in cut):
            raise AssertionError(f"the partition costs {cost}, the flow is {flow}")
        return answer

    def _set_capacities(self, price: Price) -> None:
        finite = sum([_cost(time_ps, num_bytes, price) for _, _, time_ps, num_bytes, _ in self.edges])
        network = self.network
        network.graph["inf"] = (1 + finite) * (1 + len(self.edges))  # networkx stops there; no flow is as large
        for tail, head, *_ in self.edges:
            network.succ[tail][head]["capacity"] = network.succ[head][tail]["capacity"] = 0
        for tail, head, time_ps, num_bytes, is_infinite in self.edges:
            network.succ[tail][head]["capacity"] += 1 + finite if is_infinite else _cost(time_ps, num_bytes, price)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Which slots of a component are on the source's side, and what the cut through it adds up to."""

    needs: tuple[int, ...]
    redoes: tuple[int, ...]
    time_ps: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A component: the number of its kind, and the value in each slot."""

    kind: int
    needs: tuple[int, ...]
    redoes: tuple[int, ...]


def _infinitely_far(edges: Sequence[_Edge]) -> frozenset[int]:
    """The flow nodes that infinite edges lead to from the source, the source among them."""
    heads: dict[int, list[int]] = {}
    for tail, head, _, _, is_infinite in edges:
        if is_infinite:
            heads.setdefault(tail, []).append(head)
    found, stack = {SOURCE}, [SOURCE]
    while stack:
        for head in heads.get(stack.pop(), ()):
            if head not in found:
                found.add(head)
                stack.append(head)
    return frozenset(found)


def _opened(edges: Sequence[_Edge], settled: frozenset[int]) -> tuple[list[_Edge], list[_Edge]]:
    """The edges that are still open, with the source for all that is on its side in any case, and those that are always
    cut. Edges that never cost anything are left out: they tie nothing together."""
    opened: list[_Edge] = []
    cut: list[_Edge] = []
    for edge in edges:
        tail, head, time_ps, num_bytes, is_infinite = edge
        if head in settled or not (is_infinite or time_ps or num_bytes):
            continue
        if tail not in settled:
            opened.append(edge)
        elif head == SINK:
            cut.append(edge)
        else:
            opened.append((SOURCE, head, time_ps, num_bytes, is_infinite))
    return opened, cut


def _components_of(edges: Sequence[_Edge]) -> dict[int, int]:
    """The smallest flow node of the component of each flow node."""
    ends = SOURCE, SINK
    return _roots((head if tail in ends else tail, tail if head in ends else head) for tail, head, _, _, _ in edges)


def _roots(ties: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The smallest of all numbers that each number is tied to, itself among them."""
    root: dict[int, int] = {}

    def find(number: int) -> int:
        while (above := root.setdefault(number, number)) != number:
            root[number] = root[above]
            number = root[number]
        return number

    for one, other in ties:
        a, b = find(one), find(other)
        if a != b:
            root[max(a, b)] = min(a, b)
    return {number: find(number) for number in list(root)}


def _relative(
    edges: Sequence[_Edge], needs: Sequence[tuple[int, int]], redoes: Sequence[tuple[int, int]]
) -> tuple[tuple[_Edge, ...], tuple[int, ...], tuple[int, ...]]:
    """A component with its flow nodes numbered in their order, so that equal ones are equal."""
    nodes = {tail for tail, _, _, _, _ in edges} | {head for _, head, _, _, _ in edges}
    number = {node: place for place, node in enumerate(sorted(nodes - {SOURCE, SINK}))}
    number.update({SOURCE: SOURCE, SINK: SINK})
    return (
        tuple((number[tail], number[head], ps, num_bytes, inf) for tail, head, ps, num_bytes, inf in edges),
        tuple(number[node] for _, node in needs),
        tuple(number[node] for _, node in redoes),
    )


def reachable(problem: CutProblem) -> set[int]:
    """The values that backward can come to need at all."""
    found: set[int] = set()
    stack = [index for index, value in enumerate(problem) if value.is_required]
    while stack:
        index = stack.pop()
        if index not in found:
            found.add(index)
            stack.extend(problem[index].inputs if problem[index].recompute_ps is not None else ())
    return found


def _source_side(residual: Residual) -> set[int]:
    side, stack = {SOURCE}, [SOURCE]
    while stack:
        for head, edge in residual[stack.pop()].items():
            if head not in side and edge["capacity"] > edge["flow"]:
                side.add(head)
                stack.append(head)
    return side


def cut_of(problem: CutProblem, need: frozenset[int], redo: frozenset[int]) -> Cut:
    """Add up what decisions cost."""
    return Cut(need, redo, *_added(problem, need | redo, need, redo))


def cut_of_saved(problem: CutProblem, saved: frozenset[int]) -> Cut:
    """The cut in which exactly the needed values of ``saved`` are saved and all else that is needed is recomputed.

    Raises:
        CannotPartitionError: a value outside ``saved`` is needed and may not be recomputed, and is not an input either.
    """
    need: set[int] = set()
    redo: set[int] = set()
    stack = [index for index, value in enumerate(problem) if value.is_required]
    while stack:
        index = stack.pop()
        if index in need:
            continue
        need.add(index)
        value = problem[index]
        if index in saved or value.recompute_ps is None:
            if value.save_ps is None:
                raise CannotPartitionError(_sentence(value))
            continue
        redo.add(index)
        stack.extend(value.inputs)
    return cut_of(problem, frozenset(need), frozenset(redo))


def without_saved(problem: CutProblem, cut: Cut, saved: frozenset[int], dropped: int) -> Cut:
    """``cut_of_saved`` of ``saved`` without ``dropped``, from the cut of ``saved``, which saves it: little changes.

    Raises:
        CannotPartitionError: a value that comes to be needed may be neither saved nor recomputed.
    """
    time_ps, num_bytes = cut.time_ps - (problem[dropped].save_ps or 0), cut.saved_bytes - problem[dropped].bytes
    need: set[int] = set()
    redo, stack = {dropped}, [dropped]
    while stack:
        reader = problem[stack.pop()]
        time_ps += reader.recompute_ps or 0
        for index in reader.inputs:
            if index in cut.need or index in need:
                continue
            need.add(index)
            value = problem[index]
            if index not in saved and value.recompute_ps is not None:
                redo.add(index)
                stack.append(index)
                continue
            if value.save_ps is None:
                raise CannotPartitionError(_sentence(value))
            time_ps, num_bytes = time_ps + value.save_ps, num_bytes + value.bytes
    return Cut(cut.need | need, cut.redo | redo, num_bytes, time_ps)


def num_readers(problem: CutProblem, cut: Cut) -> Counter[int]:
    """How many recomputations read each value."""
    return Counter(source for index in cut.redo for source in problem[index].inputs)


def with_saved(problem: CutProblem, cut: Cut, readers: Mapping[int, int], added: int) -> Cut:
    """``cut_of_saved`` of what may be saved in ``cut`` and of ``added``, which may be saved: little changes.

    Args:
        problem: the prices.
        cut: of what is saved so far.
        readers: its ``num_readers``.
        added: the value to save.
    """
    if added not in cut.redo:
        return cut
    time_ps, num_bytes = cut.time_ps + (problem[added].save_ps or 0), cut.saved_bytes + problem[added].bytes
    left: dict[int, int] = {}
    unneeded: set[int] = set()
    stack = [added]
    while stack:
        reader = problem[stack.pop()]
        time_ps -= reader.recompute_ps or 0
        for index in reader.inputs:
            value = problem[index]
            left[index] = left.get(index, readers[index]) - 1
            if left[index] or value.is_required:
                continue
            unneeded.add(index)
            if index in cut.redo:
                stack.append(index)
            else:
                time_ps, num_bytes = time_ps - (value.save_ps or 0), num_bytes - value.bytes
    return Cut(cut.need - unneeded, cut.redo - unneeded - {added}, num_bytes, time_ps)


def without_dead_ends(problem: CutProblem) -> CutProblem:
    """The problem in which what cannot be had again, because something it is computed from can be neither saved nor
    recomputed, is marked as not to be recomputed itself."""
    settled: list[CutValue] = []
    for value in problem:
        if value.recompute_ps is not None and any(_is_lost(settled[i]) for i in value.inputs):
            value = replace(value, recompute_ps=None, no_recompute="what it is computed from is gone")
        settled.append(value)
    return tuple(settled)


def _is_lost(value: CutValue) -> bool:
    return value.save_ps is None and value.recompute_ps is None


def _conflict(problem: CutProblem) -> str:
    """Follow what may not be saved back to something that may not be recomputed, and say so."""
    parent: dict[int, int | None] = {i: None for i, value in enumerate(problem) if value.is_required}
    queue = sorted(parent)
    while queue:
        index = heapq.heappop(queue)
        value = problem[index]
        if value.save_ps is not None:
            continue
        if value.recompute_ps is None:
            return _sentence(value) + _readers(problem, parent, index)
        for source in value.inputs:
            if source not in parent:
                parent[source] = index
                heapq.heappush(queue, source)
    raise AssertionError("the flow is infinite, yet no value is both unsavable and not recomputable")


def _sentence(value: CutValue) -> str:
    where = f" ({value.where})" if value.where else ""
    return (
        f"Backward needs {value.name}{where}, which can be neither saved ({value.no_save}) nor recomputed"
        f" ({value.no_recompute}). Change the annotation or the operation, or compile with fallback='inductor'."
    )


def _readers(problem: CutProblem, parent: dict[int, int | None], index: int) -> str:
    chain = []
    reader = parent[index]
    while reader is not None:
        place = f", {problem[reader].where}" if problem[reader].where else ""
        chain.append(f"{problem[reader].name} ({problem[reader].no_save}{place})")
        reader = parent[reader]
    return f" It is needed by {', which is needed by '.join(chain)}." if chain else ""


# -- the sweep over prices
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep over prices found.

    ``vertices`` lie on the lower convex hull of (saved bytes, time), from the fastest cut to the smallest. ``duals``
    holds, for each price asked, the optimal value: no decision whatever lies below these lines.
    """

    vertices: tuple[Cut, ...]
    duals: tuple[tuple[Price, int], ...]

    def lower_bound_ps(self, saved_bytes: int) -> int | None:
        """The least time of any decision that saves at most ``saved_bytes``; ``None`` when none saves so little."""
        if saved_bytes < self.vertices[-1].saved_bytes:
            return None
        used = min(saved_bytes, self.vertices[0].saved_bytes)  # more bytes than the fastest cut uses do not help
        return max((value - price.byte_weight * used) // price.time_weight for price, value in self.duals)


def sweep(problem: CutProblem, max_cuts: int, coarseness_bytes: int = 0) -> Sweep:
    """The hull of (saved bytes, time).

    Each solve either finds a new vertex or proves an edge, the widest gap first, so ``max_cuts`` (at least 2) bounds
    the work, and gaps of at most ``coarseness_bytes`` are left alone. A sweep that is cut short still consists of
    optimal cuts, and its bound still holds.
    """
    network = Network(problem)
    fast, small = network.solve(fastest_price(problem)), network.solve(smallest_price(problem))
    duals = [
        (price, _value(cut, price)) for price, cut in ((fastest_price(problem), fast), (smallest_price(problem), small))
    ]
    vertices = [fast, small] if fast.saved_bytes > small.saved_bytes else [fast]
    gaps = [_gap(fast, small)] if len(vertices) == 2 else []
    for _ in range(max_cuts - 2):
        if not gaps or gaps[0][3].saved_bytes + coarseness_bytes >= gaps[0][2].saved_bytes:
            break
        _, _, left, right = heapq.heappop(gaps)
        price = _slope(left, right)
        middle = network.solve(price)
        duals.append((price, _value(middle, price)))
        if _value(middle, price) < _value(left, price):
            vertices.append(middle)
            heapq.heappush(gaps, _gap(left, middle))
            heapq.heappush(gaps, _gap(middle, right))
    return Sweep(tuple(sorted(vertices, key=lambda cut: cut.time_ps)), tuple(duals))


# The part of all bytes below which a gap of the hull is not looked into: 0.1 %, far less than a peak is known by.
BYTE_STEPS = 1000


def coarse_sweep(problem: CutProblem, max_cuts: int) -> Sweep:
    """The hull without its finest steps (see ``BYTE_STEPS``)."""
    return sweep(problem, max_cuts, sum(value.bytes for value in problem) // BYTE_STEPS)


def _gap(left: Cut, right: Cut) -> tuple[int, int, Cut, Cut]:
    return (right.saved_bytes - left.saved_bytes, left.time_ps, left, right)


def _slope(left: Cut, right: Cut) -> Price:
    """The price at which both cuts cost the same."""
    return Price(time_weight=left.saved_bytes - right.saved_bytes, byte_weight=right.time_ps - left.time_ps)


def _value(cut: Cut, price: Price) -> int:
    return _cost(cut.time_ps, cut.saved_bytes, price)


def _cost(time_ps: int, num_bytes: int, price: Price) -> int:
    return price.time_weight * time_ps + price.byte_weight * num_bytes


def between(problem: CutProblem, fast: Cut, small: Cut, most: int | None = None) -> tuple[Cut, ...]:
    """The cuts between two neighbours of the hull, at most ``most`` of them where it is given, evenly spaced.

    Where the neighbours differ, the difference falls apart into components that share no finite edge, so each can be
    taken from either side (identical layers are such components). The first layers of forward switch first: their
    values are recomputed at the end of backward, when little else is alive.
    """
    points = []
    need, redo = set(fast.need | _free(problem, fast, small)), set(fast.redo)
    num_bytes, time_ps = _added(problem, need | redo, need, redo)
    components = _components(problem, fast, small)[:-1]
    every = -(-len(components) // most) if components and most else 1
    for number, component in enumerate(components, start=1):
        members = component.need | component.redo
        bytes_before, ps_before = _added(problem, members, need, redo)
        need ^= component.need  # in a component are the values that the two cuts decide differently
        redo ^= component.redo
        bytes_after, ps_after = _added(problem, members, need, redo)
        num_bytes, time_ps = num_bytes + bytes_after - bytes_before, time_ps + ps_after - ps_before
        if number % every == 0:
            points.append(Cut(frozenset(need), frozenset(redo), num_bytes, time_ps))
    return tuple(points)


def _added(
    problem: CutProblem, members: Iterable[int], need: AbstractSet[int], redo: AbstractSet[int]
) -> tuple[int, int]:
    """The bytes and the time that a decision takes for some of the values."""
    saved = [problem[i] for i in members if i in need and i not in redo]
    time_ps = sum([value.save_ps or 0 for value in saved])
    time_ps += sum([problem[i].recompute_ps or 0 for i in members if i in redo])
    return sum([value.bytes for value in saved]), time_ps


def _free(problem: CutProblem, fast: Cut, small: Cut) -> frozenset[int]:
    """What only one of two cuts needs, neither recomputes, and costs nothing to keep, such as an input or a table."""
    differ = (fast.need ^ small.need) - fast.redo - small.redo
    return frozenset(i for i in differ if problem[i].save_ps == 0 and not problem[i].bytes)


def leaps(problem: CutProblem, start: Cut, fast: Cut, small: Cut) -> tuple[Cut, ...]:
    """``start`` with one component of the step from ``fast`` to ``small`` taken before its turn.

    The GEMMs of a network have nearly the same time for a byte, so their order on the hull says little, and taking one
    of them early fills a gap. Such cuts lie on the hull's edge or close above it.
    """
    found = []
    for part in _components(problem, fast, small):
        dropped = frozenset(i for i in part.need | part.redo if i in fast.saved and i not in small.saved)
        added = frozenset(i for i in part.need | part.redo if i in small.saved and i not in fast.saved)
        found.append(cut_of_saved(problem, (start.saved - dropped) | added))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Component:
    need: frozenset[int]
    redo: frozenset[int]


def _components(problem: CutProblem, fast: Cut, small: Cut) -> list[_Component]:
    need = (fast.need ^ small.need) - _free(problem, fast, small)  # what is free ties nothing together
    redo = fast.redo ^ small.redo
    ties = [(2 * i, 2 * i) for i in need] + [(2 * i + 1, 2 * i + 1) for i in redo]  # of need(i), and of redo(i)
    ties += [(2 * i + 1, 2 * source) for i in redo for source in (i, *problem[i].inputs) if source in need]
    members: dict[int, tuple[set[int], set[int]]] = {}
    for state, root in _roots(ties).items():
        members.setdefault(root, (set(), set()))[state % 2].add(state // 2)
    components = [_Component(frozenset(needs), frozenset(redoes)) for needs, redoes in members.values()]
    return sorted(components, key=lambda part: min(part.need | part.redo))


def keeping(problem: CutProblem, kept: Iterable[int]) -> CutProblem:
    """The problem in which the values ``kept`` are saved whenever they are needed."""
    forced = frozenset(kept)
    return tuple(
        replace(value, recompute_ps=None, no_recompute="it is kept as a boundary") if i in forced else value
        for i, value in enumerate(problem)
    )
