"""Pictures: what all of them share, and the way into a file.

They are made to be read at 80 mm, a column of a paper: the figure is 133 mm wide and its smallest letters have 8
points, which leaves 4.8. matplotlib is optional and takes half a second to import, so nothing here imports it before
something is to be drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat_passes.plan import RematPlan
from remat_passes.units import format_bytes

from .plan_files import WrongUse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
WIDTH_INCHES = 5.25
MAX_PANELS = 12  # a graph takes one, and with more of them a picture no longer fits a page on paper
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}  # the same plan, the same bytes
SETTINGS: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a dollar sign in a name is no formula
    "svg.fonttype": "none",  # text stays text, so that it can be searched and copied
    "svg.hashsalt": "remat",
}

# Colours that people with any colour vision tell apart: Okabe and Ito, "Color Universal Design", 2008.
ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, LIGHT_GREY, DARK = "#999999", "#DDDDDD", "#333333"

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
TIME_UNITS = (("s", 1e6), ("ms", 1e3), ("us", 1.0))


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn before anything else is done.

    Raises:
        WrongUse: the name's end stands for no format, or matplotlib is missing.
    """
    if _form(path) not in NO_DATE:
        raise WrongUse(f"{path} cannot be drawn: its name must end in .svg, .pdf or .png.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WrongUse("--plot needs matplotlib, which is not installed: run 'pip install matplotlib'.") from None


def _form(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")


def write_picture(draw: Callable[[Sequence[RematPlan]], Figure], plans: Sequence[RematPlan], path: Path) -> None:
    """Draw the plans under each other into one file, which is written whole or not at all.

    Raises:
        WrongUse: there are too many plans for one picture, or the file cannot be written.
    """
    if len(plans) > MAX_PANELS:
        raise WrongUse(
            f"{len(plans)} plans are too many for one picture, which shows {MAX_PANELS} at most: name one plan file."
        )
    picture = _rendered(draw, plans, _form(path))
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise WrongUse(f"{path} cannot be written: {error.strerror}.") from None


def _rendered(draw: Callable[[Sequence[RematPlan]], Figure], plans: Sequence[RematPlan], form: str) -> bytes:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user's own matplotlibrc says
        matplotlib.rcParams.update(SETTINGS)
        picture = io.BytesIO()
        draw(plans).savefig(picture, format=form, dpi=DPI, metadata=NO_DATE[form])
    return picture.getvalue()


def byte_unit(largest: float) -> tuple[str, int]:
    """The unit in which a byte axis up to ``largest`` reads best, and its bytes."""
    return next((unit for unit in UNITS if largest >= unit[1]), UNITS[-1])


def time_unit(largest_us: float) -> tuple[str, float]:
    """The same for a time axis, in microseconds."""
    return next((unit for unit in TIME_UNITS if largest_us >= unit[1]), TIME_UNITS[-1])


def draw_budget(axes: Axes, budget_bytes: int, unit_bytes: int, *, inside: bool) -> None:
    """A line at the budget; one that is not ``inside`` the picture is only named, because it would flatten the rest."""
    text = f"budget {format_bytes(budget_bytes)}"
    if inside:
        axes.axhline(budget_bytes / unit_bytes, color="black", linestyle="--", linewidth=1.2, label=text)
    else:
        axes.plot([], [], color="black", linestyle="--", linewidth=1.2, label=f"{text} (above the picture)")


def shortened(text: str, most: int) -> str:
    """The end of ``text``, at most ``most`` letters: a module is known by the last names of its path."""
    return text if len(text) <= most else f"\u2026{text[1 - most :]}"


def spread(wanted: Sequence[float], gap: float, highest: float) -> list[float]:
    """Rising places for labels, each as near as possible to where it is wanted, ``gap`` apart and within the axis."""
    places: list[float] = []
    for want in wanted:
        places.append(max(want, places[-1] + gap) if places else want)
    top = highest
    for at in range(len(places) - 1, -1, -1):
        places[at] = min(places[at], top)
        top = places[at] - gap
    return places
