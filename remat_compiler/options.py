"""Options: what the user asked for, read once.

This is the only module that knows the names of environment variables. Everything behind it takes plain arguments, so no
stage can change its mind because the environment did. A misspelt option is refused, not passed over: a budget that is
silently not obeyed is found hours later, as an out-of-memory error.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeVar, get_args

from remat_passes.errors import ConfigError, nearest
from remat_passes.units import format_bytes, parse_bytes

BatchNorm = Literal["refuse", "per_microbatch"]
CostModel = Literal["analytic", "measured"]  # or the path of an exported table
AccumulateDtype = Literal["same", "float32", "float64"]
Lowering = Literal["inductor", "eager"]
Fallback = Literal["error", "inductor"]

PREFIX = "REMAT_"


@dataclass(frozen=True, slots=True)
class Option:
    """One option as the documentation shows it."""

    name: str
    environment: str
    accepted: str
    default: str


OPTIONS = (
    Option(
        "memory_budget",
        "REMAT_MEMORY_BUDGET",
        'bytes (int), "8GiB", "512MiB", "8GB" (10^9), "60%", "auto"',
        "none: the fastest plan",
    ),
    Option(
        "reserve",
        "REMAT_RESERVE",
        'bytes (int), "2GiB": what of the budget is kept free for what comes later, as the optimizer\'s state',
        "none",
    ),
    Option("num_microbatches", "REMAT_NUM_MICROBATCHES", 'an int >= 1, or "auto"', '"auto" with a budget, else 1'),
    Option("batch_norm", "REMAT_BATCH_NORM", '"refuse", "per_microbatch"', '"refuse"'),
    Option(
        "batch_axes",
        "REMAT_BATCH_AXES",
        'the axis of each input that carries the batch: {"x": 0, "y": 0}, or "x=0, y=0"',
        "found by itself",
    ),
    Option(
        "accumulate_dtype",
        "REMAT_ACCUMULATE_DTYPE",
        '"float32" (sums over micro-batches of what is narrower), "float64" (of all), "same" (as they are)',
        '"float32"',
    ),
    Option("verify", "REMAT_VERIFY", "a bool: run the first step unsplit as well, and compare every gradient", "False"),
    Option("cost_model", "REMAT_COST_MODEL", '"analytic", "measured", or an exported table (*.json)', '"analytic"'),
    Option(
        "device_spec",
        "REMAT_DEVICE_SPEC",
        'a name ("h200", "a100-80g", "rtx4090", "cpu"...) or a JSON file',
        "the device at hand",
    ),
    Option(
        "dump_dir",
        "REMAT_DUMP_DIR",
        "a folder; one <graph>.plan.json a captured graph, and its graphs as text",
        "none",
    ),
    Option("lowering", "REMAT_LOWERING", '"inductor", "eager" (run the FX graphs as they are)', '"inductor"'),
    Option("fallback", "REMAT_FALLBACK", '"error", "inductor" (warn, then compile as plain Inductor would)', '"error"'),
)

_BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
_BY_ENVIRONMENT: Mapping[str, Option] = {option.environment: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget as it was written: its bytes are known once the step is (``resolve_budget``)."""

    kind: Literal["bytes", "percent", "auto"]
    amount: float | int  # bytes, or percent of plain Inductor's projected peak; 0 for "auto"
    text: str  # what the user wrote


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that can be set, with the defaults of an empty configuration."""

    memory_budget: Budget | None = None
    reserve_bytes: int = 0  # of the budget, kept free for what comes after the first step
    num_microbatches: int = 1
    num_microbatches_auto: bool = False  # the planner may choose another number
    batch_norm: BatchNorm = "refuse"
    batch_axes: tuple[tuple[str, int], ...] = ()  # by the name of the input; empty: found by itself
    accumulate_dtype: AccumulateDtype = "float32"
    verify: bool = False
    cost_model: str = "analytic"  # a ``CostModel``, or the absolute path of an exported table
    device_spec: str | None = None
    dump_dir: Path | None = None
    lowering: Lowering = "inductor"
    fallback: Fallback = "error"
    inductor: Mapping[str, object] = field(default_factory=dict, hash=False)  # passes through, sorted by name

    def identity(self) -> str:
        """A text that is the same, in every process, exactly when the options mean the same: part of a cache key.

        ``dump_dir`` is in it although it changes no plan, because a compile served from a cache writes no plan file. Of
        ``device_spec`` and ``cost_model`` only the name or path is in it: the figures behind it belong into the key too
        (``DeviceSpec.to_json``, ``CostTable.content_hash``).
        """
        budget = self.memory_budget
        record = {
            "memory_budget": None if budget is None else f"{budget.kind} {budget.amount!r}",
            "reserve_bytes": self.reserve_bytes,
            "num_microbatches": self.num_microbatches,
            "num_microbatches_auto": self.num_microbatches_auto,
            "batch_norm": self.batch_norm,
            "batch_axes": list(self.batch_axes),
            "accumulate_dtype": self.accumulate_dtype,
            "verify": self.verify,
            "cost_model": self.cost_model,
            "device_spec": self.device_spec,
            "dump_dir": None if self.dump_dir is None else str(self.dump_dir),
            "lowering": self.lowering,
            "fallback": self.fallback,
            "inductor": {name: _stable_text(value) for name, value in self.inductor.items()},
        }
        return json.dumps(record, sort_keys=True)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value with where it was written."""

    name: str
    value: object
    environment: str | None = None

    def where(self) -> str:
        return f"Option {self.name}" + (f" (from {self.environment})" if self.environment else "")

    def malformed(self, why: str, hint: str = "") -> ConfigError:
        return _malformed(self.where(), self.value, why, _BY_NAME[self.name].accepted, hint)


def parse_options(
    options: Mapping[str, object] | None, environ: Mapping[str, str], inductor_option_names: Collection[str]
) -> Options:
    """The options of one compile: ``options`` win over ``environ``, which wins over the defaults.

    ``None`` in ``options`` and an empty text in ``environ`` count as not set. ``dump_dir`` is created.

    Raises:
        ConfigError: a name is unknown, a value is malformed, or ``dump_dir`` cannot be written.
    """
    given, inductor = _from_options(options, inductor_option_names)
    settings = _from_environment(environ) | given
    budget = _parsed(settings, "memory_budget", _parse_budget_setting, None)
    reserve_bytes = _parsed(settings, "reserve", _parse_reserve, 0)
    if reserve_bytes and budget is None:
        raise ConfigError(
            f"{settings['reserve'].where()} is {settings['reserve'].value!r} and there is no memory_budget that it"
            " could be kept free of. Set memory_budget too, as 'auto', '8GiB' or '60%', or leave reserve out."
        )
    num_microbatches = _parsed(settings, "num_microbatches", _parse_num_microbatches, "auto" if budget else 1)
    return Options(
        memory_budget=budget,
        reserve_bytes=reserve_bytes,
        num_microbatches=num_microbatches if isinstance(num_microbatches, int) else 1,
        num_microbatches_auto=num_microbatches == "auto",
        batch_norm=_parsed(settings, "batch_norm", lambda setting: _one_of(setting, get_args(BatchNorm)), "refuse"),
        batch_axes=_parsed(settings, "batch_axes", _parse_batch_axes, ()),
        accumulate_dtype=_parsed(settings, "accumulate_dtype", _parse_accumulate_dtype, "float32"),
        verify=_parsed(settings, "verify", _parse_bool, False),
        cost_model=_parsed(settings, "cost_model", _parse_cost_model, "analytic"),
        device_spec=_parsed(settings, "device_spec", _parse_device_spec, None),
        lowering=_parsed(settings, "lowering", lambda setting: _one_of(setting, get_args(Lowering)), "inductor"),
        fallback=_parsed(settings, "fallback", lambda setting: _one_of(setting, get_args(Fallback)), "error"),
        dump_dir=_parsed(settings, "dump_dir", _parse_dump_dir, None),  # last: no folder for options that are refused
        inductor=inductor,
    )


def parse_budget(value: object, where: str) -> Budget:
    """A memory budget out of what the user wrote; ``where`` names the option in errors.

    Raises:
        ConfigError: ``value`` is none of the accepted forms, or not above 0.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return Budget("bytes", _above_zero(int(value), value, where), str(value))
    if not isinstance(value, str):
        raise _malformed_budget(where, value, f"a budget is not a {type(value).__name__}")
    text = value.strip()
    if text == "auto":
        return Budget("auto", 0, value)
    if text.endswith("%"):
        return Budget("percent", _percent(value, where), value)
    if text.startswith("-"):
        raise _malformed_budget(where, value, "it is negative")
    if _FRACTION_OF_A_BYTE.fullmatch(text):
        raise _malformed_budget(where, value, "bytes come in whole numbers")
    try:
        num_bytes = parse_bytes(text)
    except (ConfigError, ValueError, OverflowError):  # the last two: more digits than Python converts
        raise _malformed_budget(where, value, "it is not a size", nearest(text.lower(), ("auto",))) from None
    return Budget("bytes", _above_zero(num_bytes, value, where), value)


def resolve_budget(
    budget: Budget | None,
    *,
    device_kind: str,
    inductor_peak_bytes: int,
    free_bytes: int | None,
    baseline_bytes: int,
    reserve_bytes: int = 0,
) -> int | None:
    """The budget in bytes for one graph, less what is to be kept free of it; None when there is no budget.

    A budget counts what is already allocated (``baseline_bytes``), so "auto" is that and what is free beside it.
    ``reserve_bytes`` are taken off whatever the budget comes to: of "60%" with a reserve there is less than 60 % left.

    Raises:
        ConfigError: the budget is "auto" and the device cannot say how much memory is free, or the reserve leaves
            nothing of the budget.
    """
    if budget is None:
        return None
    whole = _whole_budget(budget, device_kind, inductor_peak_bytes, free_bytes, baseline_bytes)
    if reserve_bytes and whole <= reserve_bytes:
        raise ConfigError(
            f"Option reserve is {format_bytes(reserve_bytes)} and memory_budget ({budget.text!r}) comes to"
            f" {format_bytes(whole)}: nothing is left for the step. Raise memory_budget, which counts all that is"
            " allocated, the reserve included, or lower reserve."
        )
    return whole - reserve_bytes


def _whole_budget(
    budget: Budget, device_kind: str, inductor_peak_bytes: int, free_bytes: int | None, baseline_bytes: int
) -> int:
    """What the budget comes to, with the reserve in it."""
    if budget.kind == "bytes":
        return int(budget.amount)
    if budget.kind == "percent":
        return int(inductor_peak_bytes * Fraction(str(budget.amount)) / 100)  # exact: a float would round up at times
    if device_kind == "cpu" or free_bytes is None:
        why = "a CPU has no fixed amount of memory" if device_kind == "cpu" else "its free memory is not known"
        raise ConfigError(
            f"Option memory_budget is 'auto' and the device is {device_kind}: {why}."
            " Name a number instead, such as '8GiB' or '60%'."
        )
    return free_bytes + baseline_bytes


def prepare_dump_dir(path: Path, where: str = "Option dump_dir") -> Path:
    """Create the folder ``path`` and check that files can be written there; ``where`` names the option in errors.

    Raises:
        ConfigError: it cannot be created or written, with the system's reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ConfigError(
            f"{where} is {str(path)!r}: the folder cannot be created ({_reason(error)})."
            " Name a folder that exists or can be created."
        ) from None
    try:
        # Asking for permissions is not enough: they do not bind root, and a read-only file system has its own.
        with tempfile.NamedTemporaryFile(dir=path, prefix=".remat-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{where} is {str(path)!r}: no file can be written there ({_reason(error)})."
            " Name a folder that can be written."
        ) from None
    return path


# From names to settings.


def _from_options(
    options: Mapping[str, object] | None, inductor_option_names: Collection[str]
) -> tuple[dict[str, _Setting], dict[str, object]]:
    """remat's own settings, and what passes through to Inductor."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is {options!r}: it must be a dict from option names to values.")
    own: dict[str, _Setting] = {}
    inductor: dict[str, object] = {}
    for name, value in (options or {}).items():
        inductor_name = str(name).replace("-", "_")  # as torch.compile itself reads Inductor's options
        if name in _BY_NAME:
            if value is not None:
                own[name] = _Setting(name, value)
        elif inductor_name in inductor_option_names:
            inductor[inductor_name] = value
        else:
            raise _unknown_option(name, value, inductor_option_names)
    return own, dict(sorted(inductor.items()))


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Setting]:
    settings = {}
    for variable in sorted(environ):
        value = environ[variable]
        if not variable.startswith(PREFIX) or value == "":
            continue
        if variable not in _BY_ENVIRONMENT:
            raise ConfigError(
                f"Unknown environment variable {variable} (value {value!r}).{nearest(variable, _BY_ENVIRONMENT)}"
                f" remat reads {', '.join(_BY_ENVIRONMENT)}."
            )
        name = _BY_ENVIRONMENT[variable].name
        settings[name] = _Setting(name, value, variable)
    return settings


def _unknown_option(name: object, value: object, inductor_option_names: Collection[str]) -> ConfigError:
    return ConfigError(
        f"Unknown option {name!r} (value {value!r}).{_nearest_option(str(name), inductor_option_names)}"
        f" remat accepts {', '.join(_BY_NAME)}, and every option of Inductor."
    )


def _nearest_option(name: str, inductor_option_names: Collection[str]) -> str:
    """A hint: remat's nearest option, else Inductor's; both when Inductor's is the nearer one."""
    own = difflib.get_close_matches(name.lower(), list(_BY_NAME), n=1)
    inductor = difflib.get_close_matches(name, sorted(inductor_option_names), n=1)
    if not own or not inductor:
        return f" Did you mean {(own or inductor)[0]!r}?" if own or inductor else ""
    nearer = difflib.get_close_matches(name, [own[0], inductor[0]], n=1)
    return f" Did you mean {own[0]!r}" + (f", or Inductor's {inductor[0]!r}?" if nearer == inductor else "?")


# From settings to values.

_T = TypeVar("_T")
_S = TypeVar("_S", bound=str)


def _parsed(settings: Mapping[str, _Setting], name: str, parse: Callable[[_Setting], _T], default: _T) -> _T:
    return parse(settings[name]) if name in settings else default


def _parse_budget_setting(setting: _Setting) -> Budget | None:
    return parse_budget(setting.value, setting.where())


def _parse_reserve(setting: _Setting) -> int:
    """Bytes; 0 keeps nothing free."""
    value = setting.value
    if isinstance(value, Integral) and not isinstance(value, bool):
        num_bytes = int(value)
    elif isinstance(value, str):
        text = value.strip()
        if text == "auto" or text.endswith("%"):
            why = (
                "a reserve is a number of bytes; remat_compiler.optimizer_state_bytes(optimizer) gives the optimizer's"
            )
            raise setting.malformed(why)
        if _FRACTION_OF_A_BYTE.fullmatch(text):
            raise setting.malformed("bytes come in whole numbers")
        try:
            num_bytes = -1 if text.startswith("-") else parse_bytes(text)
        except (ConfigError, ValueError, OverflowError):  # the last two: more digits than Python converts
            raise setting.malformed("it is not a size") from None
    else:
        raise setting.malformed(f"a reserve is not a {type(value).__name__}")
    if num_bytes < 0:
        raise setting.malformed("it is negative")
    return num_bytes


def _parse_num_microbatches(setting: _Setting) -> int | Literal["auto"]:
    value = setting.value
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):  # the environment has only texts
        value = int(value)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise setting.malformed("it is not an int", nearest(value.lower(), ("auto",)) if isinstance(value, str) else "")
    num_microbatches = int(value)
    if num_microbatches < 1:
        raise setting.malformed("a step has at least one micro-batch")
    return num_microbatches


def _parse_batch_axes(setting: _Setting) -> tuple[tuple[str, int], ...]:
    value = setting.value
    if isinstance(value, str):
        parts = [part.split("=") for part in value.split(",") if part.strip()]
        if not all(len(part) == 2 and re.fullmatch(r"\s*-?[0-9]{1,3}\s*", part[1]) for part in parts):
            raise setting.malformed("it is not a list of name=axis")
        twice = next((name for name, count in Counter(name.strip() for name, _ in parts).items() if count > 1), None)
        if twice is not None:
            raise setting.malformed(f"it names {twice!r} twice")
        value = {name.strip(): int(axis) for name, axis in parts}
    if not isinstance(value, Mapping):
        raise setting.malformed("it does not say which axis of which input")
    for name, axis in value.items():
        if not isinstance(name, str) or not isinstance(axis, Integral) or isinstance(axis, bool):
            raise setting.malformed(f"{name!r}: {axis!r} is not the name of an input and an axis")
    return tuple(sorted((name, int(axis)) for name, axis in value.items()))


def _parse_accumulate_dtype(setting: _Setting) -> AccumulateDtype:
    named = _Setting(setting.name, str(setting.value).removeprefix("torch."), setting.environment)
    choices: tuple[AccumulateDtype, ...] = get_args(AccumulateDtype)
    return _one_of(named, choices)


def _parse_bool(setting: _Setting) -> bool:
    value = setting.value
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if not isinstance(value, (str, int)) or str(value).strip().lower() not in known:
        raise setting.malformed("it is neither true nor false")
    return known[str(value).strip().lower()]


def _parse_cost_model(setting: _Setting) -> str:
    if isinstance(setting.value, os.PathLike) or str(setting.value).endswith(".json"):
        # Absolute, because the file is meant that this name has now, not after a chdir.
        return os.path.abspath(os.path.expanduser(_path_text(setting, "it is not a path")))
    cost_model: CostModel = _one_of(setting, get_args(CostModel))
    return cost_model


def _parse_device_spec(setting: _Setting) -> str | None:
    return _path_text(setting, "it is neither a name nor a path")


def _parse_dump_dir(setting: _Setting) -> Path | None:
    text = os.path.expanduser(_path_text(setting, "it is not a path"))
    # Absolute, because the folder is meant that this name has now, not after a chdir.
    return prepare_dump_dir(Path(os.path.abspath(text)), setting.where())


def _path_text(setting: _Setting, why: str) -> str:
    value = setting.value
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise setting.malformed(why)
    if not text.strip():
        raise setting.malformed("it is empty")
    return text


def _one_of(setting: _Setting, choices: tuple[_S, ...]) -> _S:
    value = setting.value
    if not isinstance(value, str):
        raise setting.malformed("there is no such choice")
    for choice in choices:
        if value == choice:
            return choice
    raise setting.malformed("there is no such choice", nearest(value.lower(), choices))


_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_FRACTION_OF_A_BYTE = re.compile(r"[0-9]+\.[0-9]+\s*[bB]?")


def _percent(value: str, where: str) -> float:
    match = _PERCENT.fullmatch(value.strip())
    if match is None:
        raise _malformed_budget(where, value, "it is not a percentage")
    percent = float(match.group(1))
    if not 0 < percent <= 100:
        raise _malformed_budget(where, value, "a percentage is above 0 and at most 100")
    return percent


def _above_zero(num_bytes: int, value: object, where: str) -> int:
    if num_bytes > 0:
        return num_bytes
    raise _malformed_budget(where, value, "it is negative" if num_bytes < 0 else "nothing fits into 0 bytes")


def _malformed_budget(where: str, value: object, why: str, hint: str = "") -> ConfigError:
    return _malformed(where, value, why, _BY_NAME["memory_budget"].accepted, hint)


def _malformed(where: str, value: object, why: str, accepted: str, hint: str) -> ConfigError:
    return ConfigError(f"{where} is {value!r}: {why}. Accepted: {accepted}.{hint}")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _stable_text(value: object) -> str:
    """``value`` as a text that does not depend on addresses, hash seeds or the order of a dict.

    Two objects of one class may get the same text. Inductor hashes its own options into its own key as well.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_stable_text(key)}: {_stable_text(value[key])}" for key in value)) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_stable_text, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_stable_text, value)) + "]"
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    uuid = getattr(value, "uuid", None)
    if callable(uuid):  # Inductor's custom passes
        return f"{type(value).__qualname__} {_stable_text(uuid())}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
