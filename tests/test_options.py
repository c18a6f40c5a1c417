"""Configuration: what is accepted, what is refused and in which words, and what wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from remat_compiler.options import (
    OPTIONS,
    Budget,
    Options,
    parse_budget,
    parse_options,
    prepare_dump_dir,
    resolve_budget,
)
from remat_passes.errors import ConfigError

INDUCTOR_NAMES = ("max_autotune", "triton.cudagraphs", "memory_pool", "fallback_random", "epilogue_fusion")
BUDGETS = 'Accepted: bytes (int), "8GiB", "512MiB", "8GB" (10^9), "60%", "auto".'
NUMS = 'Accepted: an int >= 1, or "auto".'
NAMES = (
    "memory_budget, reserve, num_microbatches, batch_norm, batch_axes, accumulate_dtype, verify, cost_model,"
    " device_spec, dump_dir, lowering, fallback"
)
AXES = 'Accepted: the axis of each input that carries the batch: {"x": 0, "y": 0}, or "x=0, y=0".'
DTYPES = 'Accepted: "float32" (sums over micro-batches of what is narrower), "float64" (of all), "same" (as they are).'
BOOL = "Accepted: a bool: run the first step unsplit as well, and compare every gradient."


def parse(options: dict[str, object] | None = None, **environ: str) -> Options:
    return parse_options(options, environ, INDUCTOR_NAMES)


def refusal(options: dict[str, object] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(options, **environ)
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    assert parse() == parse({}) == Options()
    assert Options() == Options(
        memory_budget=None,
        reserve_bytes=0,
        num_microbatches=1,
        num_microbatches_auto=False,
        batch_norm="refuse",
        batch_axes=(),
        accumulate_dtype="float32",
        verify=False,
        cost_model="analytic",
        device_spec=None,
        dump_dir=None,
        lowering="inductor",
        fallback="error",
        inductor={},
    )


@pytest.mark.parametrize(
    ("value", "kind", "amount"),
    [
        (1, "bytes", 1),
        (8589934592, "bytes", 8 * 2**30),
        (np.int64(5), "bytes", 5),
        ("8GiB", "bytes", 8 * 2**30),
        (" 512 MiB ", "bytes", 512 * 2**20),
        ("8GB", "bytes", 8 * 10**9),
        ("1.5GiB", "bytes", 3 * 2**29),
        ("1000", "bytes", 1000),
        ("60%", "percent", 60.0),
        (" 12.5 % ", "percent", 12.5),
        ("100%", "percent", 100.0),
        ("auto", "auto", 0),
    ],
)
def test_budgets(value: object, kind: str, amount: float) -> None:
    assert parse_budget(value, "Option memory_budget") == Budget(kind, amount, str(value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0, "nothing fits into 0 bytes"),
        ("0", "nothing fits into 0 bytes"),
        ("0GiB", "nothing fits into 0 bytes"),
        (-1, "it is negative"),
        ("-8GiB", "it is negative"),
        ("8 gigs", "it is not a size"),
        ("", "it is not a size"),
        ("eight", "it is not a size"),
        ("9" * 5000, "it is not a size"),
        ("9" * 400 + ".5GiB", "it is not a size"),
        ("120%", "a percentage is above 0 and at most 100"),
        ("0%", "a percentage is above 0 and at most 100"),
        ("-5%", "it is not a percentage"),
        ("%", "it is not a percentage"),
        (True, "a budget is not a bool"),
        (8e9, "a budget is not a float"),
        ("8.5", "bytes come in whole numbers"),
        ("1.5B", "bytes come in whole numbers"),
        ([1], "a budget is not a list"),
    ],
)
def test_malformed_budgets(value: object, why: str) -> None:
    assert refusal({"memory_budget": value}) == f"Option memory_budget is {value!r}: {why}. {BUDGETS}"


def test_a_misspelt_auto_is_recognised() -> None:
    assert refusal({"memory_budget": "Auto"}).endswith("Did you mean 'auto'?")
    assert refusal({"num_microbatches": "atuo"}).endswith("Did you mean 'auto'?")


def test_an_error_names_the_variable_that_the_value_came_from() -> None:
    assert refusal(REMAT_MEMORY_BUDGET="8 gigs") == (
        f"Option memory_budget (from REMAT_MEMORY_BUDGET) is '8 gigs': it is not a size. {BUDGETS}"
    )
    assert refusal(REMAT_NUM_MICROBATCHES="two") == (
        f"Option num_microbatches (from REMAT_NUM_MICROBATCHES) is 'two': it is not an int. {NUMS}"
    )
    assert refusal(REMAT_LOWERING="egaer") == (
        "Option lowering (from REMAT_LOWERING) is 'egaer': there is no such choice."
        ' Accepted: "inductor", "eager" (run the FX graphs as they are). Did you mean \'eager\'?'
    )


@pytest.mark.parametrize(
    ("options", "num_microbatches", "auto"),
    [
        ({}, 1, False),
        ({"memory_budget": "1GiB"}, 1, True),
        ({"num_microbatches": "auto"}, 1, True),
        ({"num_microbatches": 1}, 1, False),
        ({"num_microbatches": 16}, 16, False),
        ({"num_microbatches": " 16 "}, 16, False),
        ({"num_microbatches": np.int64(3)}, 3, False),
        ({"num_microbatches": 4, "memory_budget": "1GiB"}, 4, False),
        ({"num_microbatches": 1, "memory_budget": "1GiB"}, 1, False),
        ({"num_microbatches": None, "memory_budget": "1GiB"}, 1, True),
    ],
)
def test_num_microbatches(options: dict[str, object], num_microbatches: int, auto: bool) -> None:
    parsed = parse(options)
    assert (parsed.num_microbatches, parsed.num_microbatches_auto) == (num_microbatches, auto)
    from_environment = parse(REMAT_NUM_MICROBATCHES="8", REMAT_MEMORY_BUDGET="1GiB")
    assert (from_environment.num_microbatches, from_environment.num_microbatches_auto) == (8, False)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0, "a step has at least one micro-batch"),
        (-2, "a step has at least one micro-batch"),
        ("0", "a step has at least one micro-batch"),
        (1.0, "it is not an int"),
        (True, "it is not an int"),
        ("1.0", "it is not an int"),
        ("", "it is not an int"),
        ([1], "it is not an int"),
    ],
)
def test_malformed_num_microbatches(value: object, why: str) -> None:
    assert refusal({"num_microbatches": value}) == f"Option num_microbatches is {value!r}: {why}. {NUMS}"


@pytest.mark.parametrize(
    ("value", "axes"),
    [
        ({"tokens": 0, "labels": 1}, (("labels", 1), ("tokens", 0))),
        ({"batch['mask']": -1}, (("batch['mask']", -1),)),
        ({"x": np.int64(2)}, (("x", 2),)),
        ("tokens=0, labels=1", (("labels", 1), ("tokens", 0))),
        (" x = -2 ,", (("x", -2),)),
        ("batch['mask']=1", (("batch['mask']", 1),)),
        ({}, ()),
    ],
)
def test_batch_axes(value: object, axes: tuple[tuple[str, int], ...]) -> None:
    assert parse({"batch_axes": value}).batch_axes == axes


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("tokens", "it is not a list of name=axis"),
        ("tokens=first", "it is not a list of name=axis"),
        ("tokens=0=1", "it is not a list of name=axis"),
        ("tokens=1.0", "it is not a list of name=axis"),
        (0, "it does not say which axis of which input"),
        (["tokens"], "it does not say which axis of which input"),
        ({"tokens": "0"}, "'tokens': '0' is not the name of an input and an axis"),
        ({"tokens": True}, "'tokens': True is not the name of an input and an axis"),
        ({"tokens": None}, "'tokens': None is not the name of an input and an axis"),
        ({0: 0}, "0: 0 is not the name of an input and an axis"),
    ],
)
def test_malformed_batch_axes(value: object, why: str) -> None:
    message = refusal({"batch_axes": value})
    assert message.startswith("Option batch_axes is ")
    assert message.endswith(f": {why}. {AXES}")


@pytest.mark.parametrize("name", ["float32", "float64", "same"])
def test_accumulate_dtype(name: str) -> None:
    assert parse({"accumulate_dtype": name}).accumulate_dtype == name
    assert parse(REMAT_ACCUMULATE_DTYPE=name).accumulate_dtype == name


def test_accumulate_dtype_may_be_torch_s_own() -> None:
    assert parse({"accumulate_dtype": torch.float64}).accumulate_dtype == "float64"


@pytest.mark.parametrize("value", ["float16", "bfloat16", "fp32", "Same", torch.bfloat16, 32])
def test_malformed_accumulate_dtypes(value: object) -> None:
    message = refusal({"accumulate_dtype": value})
    assert message.startswith("Option accumulate_dtype is ")
    assert f": there is no such choice. {DTYPES}" in message


@pytest.mark.parametrize(
    ("value", "verify"),
    [(True, True), (False, False), (1, True), (0, False), ("1", True), ("yes", True), ("True", True), ("no", False)],
)
def test_verify(value: object, verify: bool) -> None:
    assert parse({"verify": value}).verify is verify
    assert parse(REMAT_VERIFY=str(value)).verify is verify


@pytest.mark.parametrize("value", ["maybe", 2, "on", [True], 1.0])
def test_malformed_verify(value: object) -> None:
    assert refusal({"verify": value}) == f"Option verify is {value!r}: it is neither true nor false. {BOOL}"


def test_new_options_from_the_environment_are_named_in_errors() -> None:
    assert refusal(REMAT_BATCH_AXES="tokens").startswith("Option batch_axes (from REMAT_BATCH_AXES) is 'tokens': ")
    assert refusal(REMAT_ACCUMULATE_DTYPE="flaot32").endswith("Did you mean 'float32'?")
    assert refusal(REMAT_VERIFY="perhaps").startswith("Option verify (from REMAT_VERIFY) is 'perhaps': ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"batch_norm": "per_batch"},
            "Option batch_norm is 'per_batch': there is no such choice."
            ' Accepted: "refuse", "per_microbatch". Did you mean \'per_microbatch\'?',
        ),
        (
            {"cost_model": "Analytic"},
            "Option cost_model is 'Analytic': there is no such choice."
            ' Accepted: "analytic", "measured", or an exported table (*.json). Did you mean \'analytic\'?',
        ),
        (
            {"lowering": 3},
            "Option lowering is 3: there is no such choice."
            ' Accepted: "inductor", "eager" (run the FX graphs as they are).',
        ),
        (
            {"fallback": "warn"},
            "Option fallback is 'warn': there is no such choice."
            ' Accepted: "error", "inductor" (warn, then compile as plain Inductor would).',
        ),
        (
            {"device_spec": 200},
            "Option device_spec is 200: it is neither a name nor a path."
            ' Accepted: a name ("h200", "a100-80g", "rtx4090", "cpu"...) or a JSON file.',
        ),
        (
            {"device_spec": ""},
            "Option device_spec is '': it is empty."
            ' Accepted: a name ("h200", "a100-80g", "rtx4090", "cpu"...) or a JSON file.',
        ),
        (
            {"dump_dir": b"plans"},
            "Option dump_dir is b'plans': it is not a path."
            " Accepted: a folder; one <graph>.plan.json a captured graph, and its graphs as text.",
        ),
    ],
)
def test_malformed_choices_and_paths(options: dict[str, object], expected: str) -> None:
    assert refusal(options) == expected


def test_a_choice_is_not_compared_with_an_array() -> None:
    assert "there is no such choice" in refusal({"lowering": np.array(["eager", "inductor"])})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("memory_buget", " Did you mean 'memory_budget'?"),
        ("Memory_Budget", " Did you mean 'memory_budget'?"),
        ("microbatches", " Did you mean 'num_microbatches'?"),
        ("max_autotun", " Did you mean 'max_autotune'?"),
        ("fallback_randm", " Did you mean 'fallback', or Inductor's 'fallback_random'?"),
        ("memory", " Did you mean 'memory_budget', or Inductor's 'memory_pool'?"),
        ("zzz", ""),
    ],
)
def test_unknown_options(name: str, hint: str) -> None:
    assert refusal({name: "8GiB"}) == (
        f"Unknown option {name!r} (value '8GiB').{hint} remat accepts {NAMES}, and every option of Inductor."
    )


def test_unknown_environment_variables() -> None:
    assert refusal(REMAT_MEMORY_BUGDET="8GiB") == (
        "Unknown environment variable REMAT_MEMORY_BUGDET (value '8GiB'). Did you mean 'REMAT_MEMORY_BUDGET'?"
        " remat reads REMAT_MEMORY_BUDGET, REMAT_RESERVE, REMAT_NUM_MICROBATCHES, REMAT_BATCH_NORM, REMAT_BATCH_AXES,"
        " REMAT_ACCUMULATE_DTYPE, REMAT_VERIFY, REMAT_COST_MODEL, REMAT_DEVICE_SPEC, REMAT_DUMP_DIR, REMAT_LOWERING,"
        " REMAT_FALLBACK."
    )
    assert parse(MEMORY_BUDGET="8 gigs", XREMAT_LOWERING="?", REMAT_MEMORY_BUGDET="") == Options()


def test_options_win_over_the_environment() -> None:
    parsed = parse(
        {"memory_budget": "1GiB", "lowering": "eager"}, REMAT_MEMORY_BUDGET="2GiB", REMAT_FALLBACK="inductor"
    )
    assert parsed.memory_budget == Budget("bytes", 2**30, "1GiB")
    assert (parsed.lowering, parsed.fallback) == ("eager", "inductor")
    assert parse({"memory_budget": "1GiB"}, REMAT_MEMORY_BUDGET="8 gigs").memory_budget == parsed.memory_budget


def test_none_and_empty_texts_are_not_set() -> None:
    assert (
        parse({option.name: None for option in OPTIONS}, **{option.environment: "" for option in OPTIONS}) == Options()
    )
    assert parse({"memory_budget": None}, REMAT_MEMORY_BUDGET="2GiB").memory_budget == Budget("bytes", 2**31, "2GiB")


def test_every_option_can_come_from_the_environment(tmp_path: Path) -> None:
    parsed = parse(
        REMAT_MEMORY_BUDGET="60%",
        REMAT_NUM_MICROBATCHES="4",
        REMAT_BATCH_NORM="per_microbatch",
        REMAT_BATCH_AXES="x=0, y=1",
        REMAT_ACCUMULATE_DTYPE="same",
        REMAT_VERIFY="1",
        REMAT_COST_MODEL="analytic",
        REMAT_DEVICE_SPEC="h200",
        REMAT_DUMP_DIR=str(tmp_path / "plans"),
        REMAT_LOWERING="eager",
        REMAT_FALLBACK="inductor",
    )
    assert parsed == Options(
        Budget("percent", 60.0, "60%"),
        num_microbatches=4,
        batch_norm="per_microbatch",
        batch_axes=(("x", 0), ("y", 1)),
        accumulate_dtype="same",
        verify=True,
        device_spec="h200",
        dump_dir=tmp_path / "plans",
        lowering="eager",
        fallback="inductor",
    )


def test_inductor_options_pass_through_sorted() -> None:
    given: dict[str, object] = {"triton.cudagraphs": True, "max-autotune": False, "memory_pool": None}
    parsed = parse(given)
    assert list(parsed.inductor.items()) == [
        ("max_autotune", False),
        ("memory_pool", None),
        ("triton.cudagraphs", True),
    ]
    given["max_autotune"] = True
    assert parsed.inductor["max_autotune"] is False
    assert hash(parsed) == hash(Options())


def test_options_must_be_a_dict() -> None:
    assert refusal(["memory_budget"]) == (  # type: ignore[arg-type]
        "options is ['memory_budget']: it must be a dict from option names to values."
    )


def test_identity_changes_with_each_option(tmp_path: Path) -> None:
    changes: dict[str, object] = {
        "memory_budget": Budget("bytes", 5, "5"),
        "reserve_bytes": 5,
        "num_microbatches": 2,
        "num_microbatches_auto": True,
        "batch_norm": "per_microbatch",
        "batch_axes": (("x", 0),),
        "accumulate_dtype": "same",
        "verify": True,
        "cost_model": "measured",
        "device_spec": "h200",
        "dump_dir": tmp_path,
        "lowering": "eager",
        "fallback": "inductor",
        "inductor": {"max_autotune": True},
    }
    assert set(changes) == {field.name for field in dataclasses.fields(Options)}
    changed = [dataclasses.replace(Options(), **{name: value}) for name, value in changes.items()]  # type: ignore[arg-type]
    assert len({Options().identity(), *(options.identity() for options in changed)}) == len(changes) + 1


def test_identity_is_about_meaning_not_spelling() -> None:
    def identity(options: dict[str, object]) -> str:
        return parse(options).identity()

    assert identity({"memory_budget": "8GiB"}) == identity({"memory_budget": 8 * 2**30})
    assert identity({"memory_budget": "8GiB"}) != identity({"memory_budget": "8GB"})
    assert identity({"memory_budget": "60%"}) != identity({"memory_budget": 60})
    assert identity({"max_autotune": 1, "memory_pool": "x"}) == identity({"memory_pool": "x", "max_autotune": 1})
    assert identity({"max_autotune": {"b", "a"}}) == identity({"max_autotune": {"a", "b"}})
    assert identity({"max_autotune": "1"}) != identity({"max_autotune": 1})


def test_identity_holds_no_addresses() -> None:
    class Pass:
        def uuid(self) -> bytes:
            return b"7"

    def identity(value: object) -> str:
        return parse({"epilogue_fusion": value}).identity()

    assert identity(object()) == identity(object())
    assert identity(Pass()) == identity(Pass()) != identity(object())
    assert "b'7'" in identity(Pass())
    assert identity([len, Pass]) == identity([len, Pass]) != identity([max, Pass])
    assert "0x" not in identity({"a": object(), "b": [object()]})


def test_dump_dir_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parse({"dump_dir": Path("a") / "b"})
    assert parsed.dump_dir == tmp_path / "a/b"
    assert list((tmp_path / "a/b").iterdir()) == []
    assert parse(REMAT_DUMP_DIR=str(tmp_path)).dump_dir == tmp_path
    assert prepare_dump_dir(tmp_path) == tmp_path


def test_a_refused_option_creates_no_folder(tmp_path: Path) -> None:
    refusal({"dump_dir": tmp_path / "plans", "fallback": "no"})
    assert not (tmp_path / "plans").exists()


def test_dump_dir_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refusal({"dump_dir": file}) == (
        f"Option dump_dir is '{file}': the folder cannot be created (File exists)."
        " Name a folder that exists or can be created."
    )
    assert refusal(REMAT_DUMP_DIR=f"{file}/plans") == (
        f"Option dump_dir (from REMAT_DUMP_DIR) is '{file}/plans': the folder cannot be created (Not a directory)."
        " Name a folder that exists or can be created."
    )
    assert "the folder cannot be created (embedded null" in refusal({"dump_dir": "a\0b"})


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc, where nobody can write")
def test_dump_dir_on_a_file_system_that_refuses_files() -> None:
    assert refusal({"dump_dir": "/proc/remat"}) == (
        "Option dump_dir is '/proc/remat': the folder cannot be created (No such file or directory)."
        " Name a folder that exists or can be created."
    )
    assert refusal({"dump_dir": "/proc"}).startswith("Option dump_dir is '/proc': no file can be written there (")


def resolve(
    value: object, device_kind: str = "cuda", peak: int = 1000, free: int | None = 700, reserve: int = 0
) -> int | None:
    return resolve_budget(
        None if value is None else parse_budget(value, "Option memory_budget"),
        device_kind=device_kind,
        inductor_peak_bytes=peak,
        free_bytes=free,
        baseline_bytes=40,
        reserve_bytes=reserve,
    )


def test_resolve_budget() -> None:
    assert resolve(None) is None
    assert resolve("8GiB", "cpu") == 8 * 2**30
    assert resolve("60%", "cpu") == 600
    assert resolve("60%", peak=999) == 599  # 599.4: rounded down
    assert resolve("12.5%", peak=10**12 + 8) == 125 * 10**9 + 1
    assert resolve("0.7%", peak=10**17) == 7 * 10**14  # in floats 700000000000000.1
    assert resolve("auto") == 740


@pytest.mark.parametrize(("budget", "whole"), [("5000", 5000), ("60%", 600), ("auto", 740)])
def test_a_reserve_is_taken_off_every_budget(budget: str, whole: int) -> None:
    assert resolve(budget, reserve=0) == whole
    assert resolve(budget, reserve=100) == whole - 100
    assert resolve(budget, reserve=whole - 1) == 1
    for reserve in (whole, whole + 1):
        with pytest.raises(ConfigError) as caught:
            resolve(budget, reserve=reserve)
        assert str(caught.value).startswith("Option reserve is ")
        assert f"memory_budget ({budget!r}) comes to" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [("2GiB", 2 * 2**30), (" 512 MiB ", 512 * 2**20), ("1000", 1000), (1000, 1000), (np.int64(5), 5), (0, 0), ("0", 0)],
)
def test_reserves(value: object, num_bytes: int) -> None:
    assert parse({"memory_budget": "8GiB", "reserve": value}).reserve_bytes == num_bytes
    assert parse(REMAT_MEMORY_BUDGET="8GiB", REMAT_RESERVE=str(value)).reserve_bytes == num_bytes


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("10%", "a reserve is a number of bytes"),
        ("auto", "a reserve is a number of bytes"),
        ("lots", "it is not a size"),
        ("9" * 5000, "it is not a size"),
        ("1.5", "bytes come in whole numbers"),
        (-1, "it is negative"),
        ("-1GiB", "it is negative"),
        (True, "a reserve is not a bool"),
        (1e9, "a reserve is not a float"),
    ],
)
def test_malformed_reserves(value: object, why: str) -> None:
    text = refusal({"memory_budget": "8GiB", "reserve": value})
    assert text.startswith(f"Option reserve is {value!r}: {why}")
    assert 'Accepted: bytes (int), "2GiB"' in text


def test_a_reserve_of_no_budget_is_refused() -> None:
    assert refusal(REMAT_RESERVE="2GiB") == (
        "Option reserve (from REMAT_RESERVE) is '2GiB' and there is no memory_budget that it could be kept free of."
        " Set memory_budget too, as 'auto', '8GiB' or '60%', or leave reserve out."
    )
    assert parse({"reserve": 0}).reserve_bytes == 0


def test_an_input_that_is_named_twice() -> None:
    assert refusal(REMAT_BATCH_AXES="x=0, y=0, x=1") == (
        f"Option batch_axes (from REMAT_BATCH_AXES) is 'x=0, y=0, x=1': it names 'x' twice. {AXES}"
    )


def test_auto_needs_a_device_that_knows_its_free_memory() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("auto", "cpu")
    assert str(caught.value) == (
        "Option memory_budget is 'auto' and the device is cpu: a CPU has no fixed amount of memory."
        " Name a number instead, such as '8GiB' or '60%'."
    )
    with pytest.raises(ConfigError, match="its free memory is not known"):
        resolve("auto", free=None)


def test_the_option_table_is_complete() -> None:
    names = [option.name for option in OPTIONS]
    assert names == NAMES.split(", ")
    assert [option.environment for option in OPTIONS] == [f"REMAT_{name.upper()}" for name in names]
    fields = {field.name.removesuffix("_bytes") for field in dataclasses.fields(Options)}
    assert set(names) == fields - {"num_microbatches_auto", "inductor"}
