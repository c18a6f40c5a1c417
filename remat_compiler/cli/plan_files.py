"""Plan files as the command line is given them: one file, or the folder that ``REMAT_DUMP_DIR`` named."""

from __future__ import annotations

import os
from pathlib import Path

import click

from remat_passes.errors import PlanFileError
from remat_passes.plan import RematPlan, read_plan

SUFFIX = ".plan.json"


class WrongUse(click.ClickException):
    """The command was called with something that it cannot take. One sentence, exit code 2."""

    exit_code = 2


class Refused(click.ClickException):
    """remat refused: the text of a RematError, exit code 1."""

    exit_code = 1


def plan_paths(path: Path) -> tuple[Path, ...]:
    """The file itself, or the plan files of the folder by name.

    Raises:
        WrongUse: there is nothing at ``path``.
        PlanFileError: the folder holds no plan file.
    """
    if not os.path.exists(path):  # unlike Path.exists, no error for a folder that may not be read
        raise WrongUse(f"{path} does not exist: give a plan file (*{SUFFIX}) or the folder that holds them.")
    if not path.is_dir():
        return (path,)
    found = tuple(sorted(path.glob(f"*{SUFFIX}")))
    if not found:
        raise PlanFileError(
            f"{path} holds no plan files (*{SUFFIX}): train with REMAT_DUMP_DIR={path} set,"
            f" or with 'remat run --dump-dir {path} TRAIN.py', to write them."
        )
    return found


def read_plans(path: Path) -> tuple[RematPlan, ...]:
    """Every plan at ``path``, a file or a folder.

    Raises:
        WrongUse: there is nothing at ``path``.
        PlanFileError: the folder holds no plan file, or one is damaged.
    """
    return tuple(read_plan(found) for found in plan_paths(path))


def read_one_plan(path: Path) -> RematPlan:
    """The plan in a file; a folder is taken when it holds exactly one.

    Raises:
        WrongUse: there is nothing at ``path``, or a folder with several plans.
        PlanFileError: the folder holds no plan file, or the file is damaged.
    """
    found = plan_paths(path)
    if len(found) > 1:
        raise WrongUse(f"{path} holds {len(found)} plan files: name one of them, such as {found[0]}.")
    return read_plan(found[0])
