"""The command line ``remat``: run a training script under a budget, and read the plans that it made.

Nothing here imports torch: looking at a plan file must be immediate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from remat_compiler import __version__
from remat_passes.errors import RematError

from .diff import diff_plans
from .dump import dump_plans
from .explain import explain_value
from .frontier import show_frontiers
from .plan import plan_training, question
from .plan_files import Refused
from .run import Settings, run_training

Command = TypeVar("Command", bound=Callable[..., Any])

TEXT_OR_JSON = click.Choice(["text", "json"])


def picture_option(what: str) -> Callable[[Command], Command]:
    """The option ``--plot``."""
    return click.option(
        "--plot",
        "picture",
        metavar="OUT.svg",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"Draw {what} into this file as well: .svg, .pdf or .png. Needs matplotlib.",
    )


class RematGroup(click.Group):
    """The commands; what remat refuses is one sentence and exit code 1, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RematError as error:
            raise Refused(str(error)) from None


@click.group(cls=RematGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="remat")
def main() -> None:
    """Train within a memory budget, and see what was decided for it.

    remat is a backend of torch.compile. It decides which forward values are kept for backward and which are computed
    again there, so that a training step fits into the bytes you have.

    \b
    Example:
      remat run --budget 8GiB --dump-dir plans train.py
      remat dump plans
    """


@main.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--budget", metavar="SIZE", help="Peak memory of a step: 8GiB, 512MiB, 60% (of Inductor's) or auto.")
@click.option("--microbatches", metavar="N", help="Slices that the batch runs in, or auto: as many as suit the budget.")
@click.option("--dump-dir", metavar="DIR", help="Folder to write the plans to, for 'remat dump', 'explain' and 'diff'.")
@click.option("--format", "form", type=TEXT_OR_JSON, default="text", help="How to print the plans.  [default: text]")
@click.argument("script", metavar="TRAIN.py")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def run_command(
    budget: str | None,
    microbatches: str | None,
    dump_dir: str | None,
    form: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run TRAIN.py as python would, and print its plans at the end.

    The script compiles its model with torch.compile(model, backend="remat"). Options before TRAIN.py are for remat,
    what follows it is for the script. The exit code is the script's own.

    \b
    Example:
      remat run --budget 8GiB train.py --epochs 3
    """
    sys.exit(run_training(script, arguments, Settings(budget, microbatches, dump_dir), form))


@main.command("plan")
@click.option("--budget", metavar="SIZE", help="Peak memory of a step: 24GiB, 60% (of Inductor's) or auto.")
@click.option(
    "--device",
    "devices",
    metavar="NAME",
    multiple=True,
    help="Device to plan for: h200, rtx4090... or a JSON file. Without --budget, for all of its memory.",
)
@click.option("--microbatches", metavar="N", help="Slices that the batch runs in, or auto.")
@click.option("--sweep", is_flag=True, help="A table over budgets, or over devices where several are named.")
@click.option("--format", "form", type=TEXT_OR_JSON, default="text", help="How to print it.  [default: text]")
@click.argument("script", metavar="TRAIN.py[:step]")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def plan_command(
    budget: str | None,
    devices: tuple[str, ...],
    microbatches: str | None,
    sweep: bool,
    form: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Say whether a training step fits on a device, without the device and without a step.

    TRAIN.py runs on paper up to its first backward: its tensors have a shape and no contents, so a model of billions
    of parameters takes no memory here. With TRAIN.py:step the function step() is called, without arguments; it makes
    one training step, or returns what to compile and its arguments as a tuple. Options for the script stand behind
    --. Exit code 1 where it does not fit.

    \b
    Example:
      remat plan train.py --budget 24GiB --device rtx4090
      remat plan train.py --device rtx4090 --device h200 --sweep
      remat plan train.py:step --device h200 -- --batch 16
    """
    sys.exit(plan_training(question(script, arguments, budget, devices, microbatches, sweep), form))


@main.command("dump")
@click.argument("path", metavar="DIR|FILE", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "dot"]),
    default="text",
    help="text for people, json for programs, dot for graphviz.  [default: text]",
)
@click.option("--all", "every_value", is_flag=True, help="List the values that cost no memory, too (text only).")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file, not to stdout.")
@picture_option("memory over the step, with what is alive at the peak,")
def dump_command(path: Path, form: str, every_value: bool, output: Path | None, picture: Path | None) -> None:
    """Show what was chosen, by module.

    DIR is the folder that REMAT_DUMP_DIR or --dump-dir named; FILE is one plan file (*.plan.json) in it. Layers that
    were planned alike are shown once.

    \b
    Example:
      remat dump plans
      remat dump plans --format dot --output cut.dot
      remat dump plans --plot memory.svg
    """
    dump_plans(path, form, every_value, output, picture)


@main.command("frontier")
@click.argument("path", metavar="DIR|FILE", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "csv"]),
    default="text",
    help="text for people, json for programs, csv for spreadsheets.  [default: text]",
)
@picture_option("peak against step time")
def frontier_command(path: Path, form: str, picture: Path | None) -> None:
    """Show what a smaller peak costs in time.

    For each graph every plan that none of those considered beats in both peak and step time: its peak, its step, both
    beside plain Inductor's, and the time that each MiB gained costs. The plan that was chosen is marked. DIR and FILE
    are as for 'remat dump'.

    \b
    Example:
      remat frontier plans
      remat frontier plans --plot frontier.svg
      remat frontier plans --format csv
    """
    show_frontiers(path, form, picture)


@main.command("explain")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("value")
@click.option("--format", "form", type=TEXT_OR_JSON, default="text", help="How to print it.  [default: text]")
def explain_command(path: Path, value: str, form: str) -> None:
    """Say why one VALUE was saved or recomputed, and how it depends on the batch where that is split.

    VALUE is a name that 'remat dump FILE' shows. Of a step in micro-batches it may be any value.

    \b
    Example:
      remat explain plans/g00-1a2b3c4d.plan.json addmm_3
    """
    explain_value(path, value, form)


@main.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--format", "form", type=TEXT_OR_JSON, default="text", help="How to print it.  [default: text]")
def diff_command(a: Path, b: Path, form: str) -> None:
    """Compare two plans.

    A and B are two plan files, or two folders of them; plans of the same graph are compared with each other.

    \b
    Example:
      remat diff plans-8GiB plans-6GiB
    """
    diff_plans(a, b, form)
