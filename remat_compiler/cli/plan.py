"""``remat plan``: what a training step needs on a device, worked out without the device and without a step.

The script is captured once (on_paper.py) and planned as often as there are rows to show. Nothing here imports torch
until there is something to capture: wrong usage is answered at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from remat_compiler.options import Options
from remat_passes.device import BUILT_IN, DeviceSpec
from remat_passes.errors import BudgetInfeasibleError, RematError, nearest
from remat_passes.plan import SCHEMA, RematPlan
from remat_passes.units import format_bytes

from .headline import headline, percent, ratio, time_text
from .plan_files import Refused, WrongUse
from .run import Settings as RunSettings
from .run import check_settings, execute, show
from .tables import BOLD, Column, Row, clean, fitted_table, heading, labelled, page_width, paragraph, print_parts, write

if TYPE_CHECKING:
    from remat_compiler.on_paper import CapturedGraph, CapturedStep, Limits

NUM_BUDGETS = 8  # rows of a sweep over budgets


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asked."""

    script: str
    step: str | None  # the function in it that makes a training step; None: the script itself does
    arguments: tuple[str, ...]
    budget: str | None
    devices: tuple[str, ...]
    num_microbatches: str | None
    sweep: bool

    @property
    def name(self) -> str:
        """What the output calls the step."""
        file = os.path.basename(self.script)
        return f"{file}:{self.step}" if self.step else file

    @property
    def settings(self) -> dict[str, object]:
        """The options that win over the script's own."""
        given = {"memory_budget": self.budget, "num_microbatches": self.num_microbatches}
        wanted = {name: value for name, value in given.items() if value is not None}
        return {**wanted, "lowering": "inductor", "fallback": "error", "verify": False}


@dataclass(frozen=True, slots=True)
class Answer:
    """The plans of a step for one device and one budget, a plan a graph.

    Where the budget is too small they are those of the smallest peak that can be reached; where it is below what no
    plan changes there are none, because the search for them would take longer than all else.
    """

    device: DeviceSpec
    budget_bytes: int | None  # the whole of it, what is kept free included
    baseline_bytes: int  # parameters, buffers and inputs
    gradient_bytes: int
    reserve_bytes: int
    plans: tuple[RematPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether it stays within the budget and the device; without a budget there is no limit."""
        limit_bytes = self.budget_bytes
        return limit_bytes is None or self.peak_bytes <= min(limit_bytes, self.device.memory_bytes)

    @property
    def fixed_bytes(self) -> int:
        """What no plan changes."""
        return self.baseline_bytes + self.gradient_bytes + self.reserve_bytes

    @property
    def peak_bytes(self) -> int:
        """Of the step, and of what is kept free beside it; without plans, what it is above."""
        return max([self.fixed_bytes, *(plan.projected_peak_bytes + self.reserve_bytes for plan in self.plans)])

    @property
    def inductor_peak_bytes(self) -> int:
        """The same under plain Inductor's plan; 0 where that is not known."""
        return max([0, *(plan.inductor_peak_bytes + self.reserve_bytes for plan in self.plans)])

    @property
    def step_us(self) -> float:
        """Of all graphs together."""
        return sum(plan.step_us for plan in self.plans)

    @property
    def inductor_step_us(self) -> float:
        """The same under plain Inductor's plan."""
        return sum(plan.inductor_step_us for plan in self.plans)

    @property
    def num_microbatches(self) -> int:
        """Slices of the graph that runs in the most."""
        return max([1, *(plan.num_microbatches for plan in self.plans)])


def question(
    target: str,
    arguments: Sequence[str],
    budget: str | None,
    devices: Sequence[str],
    num_microbatches: str | None,
    sweep: bool,
) -> Question:
    """The question as it was typed.

    Raises:
        WrongUse: there is no such script or device, a size is malformed, or the options do not go together.
    """
    check_settings(RunSettings(budget, num_microbatches, None))
    script, step = _script_and_step(target)
    if len(set(devices)) > 1 and not sweep:
        raise WrongUse("Several devices were named: --sweep compares them in one table, else name one.")
    if sweep and budget is not None and len(devices) < 2:
        raise WrongUse("--sweep goes over budgets, so it takes no --budget; with several --device it goes over those.")
    return Question(script, step, tuple(arguments), budget, tuple(dict.fromkeys(devices)), num_microbatches, sweep)


def _script_and_step(target: str) -> tuple[str, str | None]:
    if os.path.isfile(target):
        return target, None
    script, colon, step = target.rpartition(":")
    if colon and os.path.isfile(script) and step.isidentifier():
        return script, step
    raise WrongUse(f"{target} is not a file: give the Python script that trains, or TRAIN.py:step.")


def plan_training(asked: Question, form: str) -> int:
    """Answer the question on stdout, and return the exit code: 0 where it fits, else 1.

    Raises:
        WrongUse: there is no such device.
        Refused: the script ended with an exception.
        RematError: the script reaches no training step, or remat refuses its options or the step.
    """
    specs = _specs(asked.devices)  # before the script spends its first second
    step = _captured(asked, for_gpu=bool(specs) and all(spec.kind == "cuda" for spec in specs))
    options = step.graphs[0].options(asked.settings)
    reserve_bytes, optimizers = _kept_free(step, options)
    specs = specs or _specs((options.device_spec or "cpu",))
    answers = [
        answer
        for spec in specs
        for answer in (_over_budgets if asked.sweep and len(specs) == 1 else _one)(step, asked, spec, reserve_bytes)
    ]
    from remat_compiler.on_paper import limits

    found = {spec.name: [limits(graph, spec) for graph in step.graphs] for spec in specs}
    report = Report(asked, step.graphs, optimizers, answers, found)
    if form == "json":
        write(json.dumps(report.record(), sort_keys=True, indent=1) + "\n", sys.stdout)
    else:
        print_parts(report.text(page_width(sys.stdout)), sys.stdout)
    return 0 if any(answer.fits for answer in answers) else 1


def _specs(names: Sequence[str]) -> list[DeviceSpec]:
    from remat_compiler.calibrate import default_cache_dir
    from remat_compiler.device_at_hand import device_spec

    try:
        return [device_spec(name, "cpu", None, None, default_cache_dir(os.environ)) for name in names]
    except RematError as error:
        raise WrongUse(str(error)) from None


def _captured(asked: Question, *, for_gpu: bool) -> CapturedStep:
    from remat_compiler.on_paper import capture_step

    def run() -> None:
        if asked.step:
            _call(asked)
        else:
            execute(asked.script, asked.arguments)

    with contextlib.redirect_stdout(sys.stderr):
        try:
            return capture_step(run, asked.name, asked.settings, for_gpu=for_gpu)
        except (RematError, WrongUse):
            raise
        except Exception as error:
            show(error)
            raise Refused(f"{asked.name} ended with an exception before its first training step.") from None


def _call(asked: Question) -> None:
    """Load the script as a module and call its function."""
    from remat_compiler.on_paper import call_step

    assert asked.step is not None
    folder = os.path.dirname(os.path.realpath(asked.script))
    sys.argv, sys.path[0] = [asked.script, *asked.arguments], folder
    name = os.path.splitext(os.path.basename(asked.script))[0]
    found = importlib.util.spec_from_file_location(name, asked.script)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    step = getattr(module, asked.step, None)
    if not callable(step):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise WrongUse(f"{asked.script} has no function {asked.step!r}.{nearest(asked.step, functions)}")
    call_step(step)


def _kept_free(step: CapturedStep, options: Options) -> tuple[int, list[tuple[str, int]]]:
    """The bytes of the optimizers' states, and which optimizers those are; what option reserve says instead of them."""
    from remat_compiler.optimizer_state import optimizer_state_bytes

    if options.reserve_bytes:
        return options.reserve_bytes, []
    found = [(type(optimizer).__name__, optimizer_state_bytes(optimizer)) for optimizer in step.optimizers]
    return sum(num_bytes for _, num_bytes in found), found


# -- planning


def _one(step: CapturedStep, asked: Question, spec: DeviceSpec, reserve_bytes: int) -> list[Answer]:
    """The plans for the budget that was asked for, else for all of the device's memory."""
    budget = step.graphs[0].options(asked.settings).memory_budget
    if budget is not None and budget.kind == "bytes" and budget.amount > spec.memory_bytes:
        raise WrongUse(
            f"The budget of {budget.text} is more than {spec.name} has, which is {format_bytes(spec.memory_bytes)}:"
            " leave --budget out for all of it, or name a larger device."
        )
    if budget is not None and budget.kind == "percent":  # of the step: what is kept free lies beside it
        return [_answer(step, asked, spec, budget.text, reserve_bytes)]
    if budget is not None and budget.kind == "bytes":
        return [_answer(step, asked, spec, int(budget.amount) - reserve_bytes, reserve_bytes)]
    wants_all = bool(asked.devices) or budget is not None
    return [_answer(step, asked, spec, spec.memory_bytes - reserve_bytes if wants_all else None, reserve_bytes)]


def _over_budgets(step: CapturedStep, asked: Question, spec: DeviceSpec, reserve_bytes: int) -> list[Answer]:
    """Equal steps from plain Inductor's peak down to the smallest that can be reached."""
    from remat_compiler.on_paper import held_bytes

    least = max(sum(held_bytes(graph, spec)) for graph in step.graphs)
    smallest = _answer(step, asked, spec, least, 0)
    highest, lowest = smallest.inductor_peak_bytes, smallest.peak_bytes
    rows = NUM_BUDGETS - 1
    budgets = dict.fromkeys(highest - (highest - lowest) * row // rows for row in range(NUM_BUDGETS))
    return [_answer(step, asked, spec, budget, reserve_bytes) for budget in budgets]


def _answer(step: CapturedStep, asked: Question, spec: DeviceSpec, budget: int | str | None, reserve: int) -> Answer:
    """The answer for a budget of the step alone, in bytes or as a percentage."""
    from remat_compiler.on_paper import held_bytes

    baseline_bytes, gradient_bytes = max((held_bytes(graph, spec) for graph in step.graphs), key=sum)
    if isinstance(budget, int) and budget < baseline_bytes + gradient_bytes:
        return Answer(spec, budget + reserve, baseline_bytes, gradient_bytes, reserve, ())
    plans, budgets = zip(*(_fastest(graph, asked, spec, budget) for graph in step.graphs), strict=True)
    whole = None if budget is None else max(budgets) + reserve
    return Answer(spec, whole, baseline_bytes, gradient_bytes, reserve, plans)


def _fastest(
    graph: CapturedGraph, asked: Question, spec: DeviceSpec, budget: int | str | None
) -> tuple[RematPlan, int]:
    """The fastest plan within the budget, else the smallest one, and the budget in bytes."""
    try:
        plan = _plan(graph, asked, spec, budget)
        return plan, budget if isinstance(budget, int) else plan.budget_bytes or 0
    except BudgetInfeasibleError as refused:
        smallest = _plan(graph, asked, spec, refused.smallest_bytes)
        return smallest, budget if isinstance(budget, int) else refused.budget_bytes


def _plan(graph: CapturedGraph, asked: Question, spec: DeviceSpec, budget: int | str | None) -> RematPlan:
    from remat_compiler.on_paper import plan_graph

    settings = asked.settings if budget is None else {**asked.settings, "memory_budget": budget}
    return plan_graph(graph, spec, replace(graph.options(settings), reserve_bytes=0))


# -- the report


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is shown, once it is known."""

    asked: Question
    graphs: Sequence[CapturedGraph]
    optimizers: Sequence[tuple[str, int]]
    answers: Sequence[Answer]
    limits: Mapping[str, Sequence[Limits]]  # by device, one a graph

    @property
    def num_parameters(self) -> int:
        """What is trained; a parameter of two graphs counts twice."""
        return sum(graph.num_parameters for graph in self.graphs)

    def limited_by(self, answer: Answer) -> str:
        """What the step would gain most from having more of."""
        arithmetic, traffic, launches = self._parts_us(answer)
        parts = {"arithmetic": arithmetic, "memory traffic": traffic, "kernel launches": launches}
        return max(parts, key=lambda name: parts[name])

    def _parts_us(self, answer: Answer) -> tuple[float, float, float]:
        """Arithmetic, memory traffic and launches; kernels are launched anew for each micro-batch."""
        found = self.limits[answer.device.name]
        arithmetic, traffic = sum(part.arithmetic_us for part in found), sum(part.traffic_us for part in found)
        return arithmetic, traffic, sum(part.launch_us for part in found) * answer.num_microbatches

    def larger_devices(self, answer: Answer) -> list[DeviceSpec]:
        """The known devices with memory for the smallest plan, or else for what no plan changes, the smallest first."""
        fitting = (spec for spec in BUILT_IN.values() if spec.memory_bytes >= answer.peak_bytes)
        return sorted(fitting, key=lambda spec: spec.memory_bytes)

    # text

    def text(self, width: int) -> list[Text]:
        """The report for people."""
        if self.asked.sweep:
            return self._sweep(width)
        (answer,) = self.answers
        parts = [heading(f"{self.asked.name} on {answer.device.name}, on paper: nothing was run", width), Text()]
        parts += [
            paragraph(Text(line, BOLD if not place else ""), width) for place, line in enumerate(self._verdict(answer))
        ]
        parts += [Text(), labelled(self._rows(answer), width)]
        for plan in answer.plans:
            parts += [Text(), *headline(plan, width)]
        return parts

    def _verdict(self, answer: Answer) -> list[str]:
        peak, reserve = format_bytes(answer.peak_bytes), format_bytes(answer.reserve_bytes)
        beside = f", {reserve} of optimizer state included" if answer.reserve_bytes else ""
        if answer.fits:
            room = "" if answer.budget_bytes is None else f" of {format_bytes(answer.budget_bytes)}"
            verdict = "It fits" if room else "It needs"
            verb = ": " if room else " "
            return [
                f"{verdict}{verb}{peak}{room}{beside}, {_batches(answer)}, {time_text(answer.step_us)} a step"
                f" ({ratio(answer.step_us, answer.inductor_step_us)} plain Inductor, which needs"
                f" {format_bytes(answer.inductor_peak_bytes)})."
            ]
        budget = format_bytes(answer.budget_bytes or 0)
        state = f" and {reserve} of optimizer state" if answer.reserve_bytes else ""
        fixed = (
            f"{format_bytes(answer.baseline_bytes)} of parameters, buffers and inputs,"
            f" {format_bytes(answer.gradient_bytes)} of gradients{state}"
        )
        if not answer.plans:
            lines = [
                f"It does not fit into {budget}, and no plan can change that: {fixed} alone are"
                f" {format_bytes(answer.fixed_bytes, round_up=True)}."
            ]
        else:
            lines = [
                f"It does not fit into {budget}: the smallest peak is {format_bytes(answer.peak_bytes, round_up=True)},"
                f" with {_batches(answer)}.",
                f"{fixed} are in any plan. A smaller batch or shorter sequences would help.",
            ]
        if any(graph.has_batch_norm for graph in self.graphs) and answer.num_microbatches == 1:
            lines.append(
                "Micro-batches were not weighed, because batch norm in training takes the batch together: with"
                " REMAT_BATCH_NORM=per_microbatch, --microbatches N takes each by itself, as an accumulation loop does."
            )
        larger = ", ".join(
            f"{spec.name} ({format_bytes(spec.memory_bytes)})" for spec in self.larger_devices(answer)[:3]
        )
        said = "It would fit into" if answer.plans else "More than that have"
        lines.append(f"{said}: {larger}." if larger else "None of the known devices has as much memory.")
        return lines

    def _rows(self, answer: Answer) -> list[Row]:
        arithmetic, traffic, launches = self._parts_us(answer)
        how = ", which overlap" if answer.device.overlaps else ""
        rows = [
            ("limited by", self.limited_by(answer), f"the longest of these three{how}"),
            ("  arithmetic", time_text(arithmetic), f"at {answer.device.name}'s reachable rates"),
            ("  memory traffic", time_text(traffic), "through the device's memory"),
            ("  launches", time_text(launches), "of kernels"),
            ("parameters", _quantity(self.num_parameters), "that are trained"),
        ]
        if answer.reserve_bytes:
            names = ", ".join(dict.fromkeys(name for name, _ in self.optimizers)) or "option reserve"
            rows.append(("kept free", format_bytes(answer.reserve_bytes), f"for the optimizer's state ({names})"))
        return [(label, Text(figure, BOLD), meaning) for label, figure, meaning in rows]

    def _sweep(self, width: int) -> list[Text]:
        devices = len({answer.device.name for answer in self.answers}) > 1
        over = "devices" if devices else f"budgets on {self.answers[0].device.name}"
        columns = [
            Column("device" if devices else "budget", "left" if devices else "right"),
            *([Column("budget", "right")] if devices else []),
            Column("fits"),
            Column("peak", "right"),
            Column("of\nplain", "right"),
            Column("step", "right"),
            Column("of\nplain", "right"),
            Column("micro-\nbatches", "right"),
            Column("limited by", flexible=True),
        ]
        rows = [self._sweep_row(answer, devices) for answer in self.answers]
        meaning = (
            "of plain: compared with what plain Inductor is projected to need; where a step does not fit, the smallest"
            " plan is shown, and > where parameters and gradients alone are more"
        )
        parts = [
            heading(f"{self.asked.name} over {over}, on paper: nothing was run", width),
            Text(),
            fitted_table(columns, rows, width),
            paragraph(Text(meaning, "dim"), width, indent=2),
        ]
        state = sum(num_bytes for _, num_bytes in self.optimizers)
        if state:
            note = f"budgets and peaks include {format_bytes(state)} that are kept free for the optimizer's state"
            parts.append(paragraph(Text(note, "dim"), width, indent=2))
        return parts

    def _sweep_row(self, answer: Answer, devices: bool) -> Row:
        budget = "none" if answer.budget_bytes is None else format_bytes(answer.budget_bytes)
        return (
            *((clean(answer.device.name), budget) if devices else (budget,)),
            "yes" if answer.fits else "no",
            f"{'' if answer.plans else '> '}{format_bytes(answer.peak_bytes, round_up=True)}",
            percent(answer.peak_bytes, answer.inductor_peak_bytes),
            time_text(answer.step_us) if answer.plans else "-",
            ratio(answer.step_us, answer.inductor_step_us),
            str(answer.num_microbatches) if answer.plans else "-",
            self.limited_by(answer),
        )

    # json

    def record(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "script": self.asked.name,
            "num_parameters": self.num_parameters,
            "optimizers": [{"name": name, "state_bytes": num_bytes} for name, num_bytes in self.optimizers],
            "answers": [self._answer_record(answer) for answer in self.answers],
        }

    def _answer_record(self, answer: Answer) -> dict[str, Any]:
        arithmetic, traffic, launches = self._parts_us(answer)
        return {
            "device": answer.device.name,
            "device_memory_bytes": answer.device.memory_bytes,
            "budget_bytes": answer.budget_bytes,
            "reserve_bytes": answer.reserve_bytes,
            "fits": answer.fits,
            "peak_bytes": answer.peak_bytes if answer.plans else None,
            "fixed_bytes": answer.fixed_bytes,  # what no plan changes
            "inductor_peak_bytes": answer.inductor_peak_bytes if answer.plans else None,
            "step_us": answer.step_us if answer.plans else None,
            "inductor_step_us": answer.inductor_step_us if answer.plans else None,
            "num_microbatches": answer.num_microbatches if answer.plans else None,
            "limited_by": self.limited_by(answer),
            "arithmetic_us": arithmetic,
            "traffic_us": traffic,
            "launch_us": launches,
            "fitting_devices": [spec.name for spec in self.larger_devices(answer)],
            "plans": [{"schema": SCHEMA, **asdict(plan)} for plan in answer.plans],
        }


def _batches(answer: Answer) -> str:
    return "the batch whole" if answer.num_microbatches == 1 else f"{answer.num_microbatches} micro-batches"


def _quantity(num: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if num >= unit:
            return f"{num / unit:.2f} {name}"
    return str(num)
