"""``remat run``: a training script as ``python TRAIN.py`` would run it, and the plan table at its end.

The script runs in this process, because the plans live in it. It must not notice: ``__main__``, ``sys.argv`` and
``sys.path`` are what Python would have made them, and so are its traceback and its exit code. ``runpy.run_path`` comes
close, but gives ``sys.argv[0]`` and ``__file__`` one text (Python gives the path as typed and the absolute one), and
takes ``__main__`` away when the script ends, while its threads and exit handlers still run.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TextIO

from rich.text import Text

import remat_compiler
from remat_compiler.options import parse_budget, prepare_dump_dir
from remat_compiler.plan_log import measured_peaks
from remat_passes.errors import ConfigError
from remat_passes.plan import SCHEMA, RematPlan
from remat_passes.units import format_bytes

from .headline import count, summary
from .plan_files import WrongUse
from .tables import clean, heading, page_width, paragraph, print_parts, write

OWN_FOLDER = os.path.join(os.path.dirname(remat_compiler.__file__), "")
INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended: 128 + 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``remat run`` hands to the backend. ``None`` leaves the environment's own value alone."""

    budget: str | None
    num_microbatches: str | None
    dump_dir: str | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How the script ended."""

    exit_code: int
    raised: bool = False  # with an exception, whose traceback has been shown


def run_training(script: str, arguments: Sequence[str], settings: Settings, form: str) -> int:
    """Run the script, print the plans that it made, and return its exit code.

    With ``form`` "json" stdout has the plans only, and what the script prints goes to stderr.

    Raises:
        WrongUse: a setting is malformed, or there is no such script.
    """
    check_settings(settings)
    if not os.path.isfile(script):
        raise WrongUse(f"{script} is not a file: give the Python script that trains.")
    os.environ.update(environment(settings))
    stdout, stderr = sys.stdout, sys.stderr  # the script may replace them
    if form == "json":
        stdout = _stdout_for_json()
    ending = run_script(script, arguments)
    plans = remat_compiler.plans()
    fallbacks = remat_compiler.fallbacks()
    for reason in fallbacks:
        write(f"remat compiled a graph as plain Inductor would: {reason}\n", stderr)
    if not plans and not fallbacks and not ending.raised:
        write(_no_plan(script), stderr)
    measured = measured_peaks()[: len(plans)]  # a thread of the script may still compile
    verified = remat_compiler.verifications()
    if form == "json":
        write(plans_json(plans, measured, verified), stdout)
    stream = stderr if ending.exit_code else stdout
    if form == "text" and plans and not stream.closed:  # by the script
        print_parts(plan_table(plans, measured, verified, settings.dump_dir, page_width(stream)), stream)
    return ending.exit_code


def _stdout_for_json() -> TextIO:
    """What was stdout. From here on all that prints there, the script, its children and its exit handlers, prints to
    stderr, so that stdout holds one JSON document and nothing else."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # as it comes, between the lines of stderr
    return own


def check_settings(settings: Settings) -> None:
    """Refuse what the backend would refuse, before the script spends its first minute.

    Raises:
        WrongUse: the budget or the number of micro-batches is malformed.
    """
    try:
        if settings.budget is not None:
            parse_budget(settings.budget, "--budget")
        if settings.dump_dir is not None:
            prepare_dump_dir(Path(settings.dump_dir), "--dump-dir")
    except ConfigError as error:
        raise WrongUse(str(error)) from None
    num = settings.num_microbatches
    if num is not None and num != "auto" and not (num.isascii() and num.isdigit() and int(num) >= 1):
        raise WrongUse(
            f"--microbatches {num!r} is no number of micro-batches: write a whole number above zero, or auto."
        )


def environment(settings: Settings) -> dict[str, str]:
    """The environment variables that carry the settings to the backend."""
    folder = os.path.abspath(settings.dump_dir) if settings.dump_dir else None  # the script may change its folder
    variables = {
        "REMAT_MEMORY_BUDGET": settings.budget,
        "REMAT_NUM_MICROBATCHES": settings.num_microbatches,
        "REMAT_DUMP_DIR": folder,
    }
    return {name: text for name, text in variables.items() if text is not None}


def run_script(script: str, arguments: Sequence[str]) -> Ending:
    """Run the script as ``__main__``; what ends it is shown as Python shows it."""
    try:
        execute(script, arguments)
    except SystemExit as request:
        return Ending(_exit_code(request.code))
    except BaseException as error:
        show(error)
        return Ending(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, raised=True)
    return Ending(0)


def execute(script: str, arguments: Sequence[str]) -> None:
    """Run the script as ``__main__``; whatever ends it comes through."""
    module = _main_module(os.path.abspath(script))
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # python -P, from 3.11 on
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.modules["__main__"] = module
    with io.open_code(str(module.__file__)) as source:
        code = compile(source.read(), str(module.__file__), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _main_module(path: str) -> ModuleType:
    """An empty ``__main__`` with the attributes that Python gives to a script's."""
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__spec__ = None
    module.__dict__["__cached__"] = None
    return module


def _exit_code(code: object) -> int:
    """What ``sys.exit(code)`` means: nothing is 0, a text is printed and means 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    print(code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """Print the traceback from the script's first line on, through the hook that the script may have set."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
        inner = inner.tb_next
    sys.excepthook(type(error), error.with_traceback(inner), inner)


def plans_json(plans: Sequence[RematPlan], measured: Sequence[int | None], verified: Sequence[str]) -> str:
    """The plans as an array of what plan files hold, each with the measured peak of its first step, and what came of
    running that step unsplit as well."""
    records = [
        {"schema": SCHEMA, "measured_peak_bytes": peak, "verification": _verified(plan, verified), **asdict(plan)}
        for plan, peak in zip(plans, measured, strict=True)
    ]
    return json.dumps(records, sort_keys=True, indent=1) + "\n"


def _verified(plan: RematPlan, verified: Sequence[str]) -> str | None:
    """The sentence about this plan; each begins with the name of its graph."""
    return next((text for text in verified if text.startswith(f"{plan.graph_id}:")), None)


def plan_table(
    plans: Sequence[RematPlan],
    measured: Sequence[int | None],
    verified: Sequence[str],
    dump_dir: str | None,
    width: int,
) -> list[Text]:
    """What was planned, what the first steps took, and where to read more."""
    first = plans[0]
    title = f"remat planned {count(len(plans), 'graph')} for {first.device}"
    more = (
        f"'remat dump {dump_dir}' shows every decision and its reason."
        if dump_dir
        else "'remat run --dump-dir DIR' keeps the plans, and 'remat dump DIR' shows every decision and its reason."
    )
    lines = [_measured(plan, peak) for plan, peak in zip(plans, measured, strict=True) if peak is not None]
    lines += verified
    return [
        heading(title, width),
        Text(),
        *summary(plans, width),
        *(paragraph(Text(clean(line)), width, indent=2) for line in lines),
        paragraph(Text(more, "dim"), width, indent=2),
    ]


def _measured(plan: RematPlan, peak_bytes: int) -> str:
    from remat_compiler.first_step import is_over_budget  # needs torch, which whoever has measured has loaded

    projected = plan.projected_peak_bytes
    off = 100 * (peak_bytes / max(projected, 1) - 1)
    within = ", over the budget" if is_over_budget(plan, peak_bytes) else ", within the budget"
    verdict = "" if plan.budget_bytes is None else within
    return (
        f"{plan.graph_id} took {format_bytes(peak_bytes)} in its first step,"
        f" projected were {format_bytes(projected)} ({off:+.1f}%){verdict}"
    )


def _no_plan(script: str) -> str:
    return (
        f"remat made no plan, because {Path(script).name} trained nothing that was compiled with it:"
        ' write torch.compile(model, backend="remat") and call the result in a training step, with gradients enabled.\n'
    )
