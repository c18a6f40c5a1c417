"""``remat run``: the script must not notice, and what it ends with comes through. The scripts know no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from plan_samples import MIB, gpt_plan

from remat_passes.plan import RematPlan

TESTS = Path(__file__).parent
REMAT = [sys.executable, "-m", "remat_compiler.cli"]
NO_PLAN = (
    "remat made no plan, because train.py trained nothing that was compiled with it:"
    ' write torch.compile(model, backend="remat") and call the result in a training step, with gradients enabled.\n'
)
RECORD = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from plan_samples import gpt_plan
from remat_compiler.plan_log import record
record(gpt_plan(), 0.1)
"""


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("REMAT_") and name != "COLUMNS"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def remat_run(folder: Path, text: str, *before: str, after: tuple[str, ...] = ()) -> tuple[int, str, str]:
    script(folder, text)
    return ended(start([*REMAT, "run", *before, "train.py", *after], folder))


def python(folder: Path, *arguments: str) -> tuple[int, str, str]:
    return ended(start([sys.executable, "train.py", *arguments], folder))


# What the script sees.

SHOW = """
import json, os, sys
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path0": sys.path[0], "spec": __spec__,
    "cached": __cached__, "package": __package__, "doc": __doc__, "loader": type(__loader__).__name__,
    "main": sys.modules["__main__"].__dict__ is globals(), "names": sorted(globals()),
}))
"""


def test_the_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    arguments = ("--epochs", "3", "--help", "--", "-x", "--budget=1")
    code, stdout, _ = remat_run(tmp_path, SHOW, after=arguments)
    plain = json.loads(python(tmp_path, *arguments)[1])

    assert code == 0
    seen = json.loads(stdout)
    for entry in (plain, seen):
        entry["names"] = sorted({*entry["names"], "__annotations__"})  # Python makes it up front, we when it is needed
    assert seen == plain
    assert seen["argv"] == ["train.py", *arguments]
    assert seen["path0"] == str(tmp_path)


def test_a_script_beside_it_can_be_imported_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "model.py").write_text("WIDTH = 256\n")
    (tmp_path / "inner" / "train.py").write_text("import model, sys\nprint(model.WIDTH, sys.argv)\n")

    code, stdout, _ = ended(start([*REMAT, "run", "inner/train.py", "a"], tmp_path))

    assert (code, stdout) == (0, "256 ['inner/train.py', 'a']\n")


def test_exit_handlers_and_threads_still_find_main(tmp_path: Path) -> None:
    text = """
        import atexit, sys, threading, time
        WORD = "alive"
        def late():
            time.sleep(0.3)
            print(sys.modules["__main__"].WORD)
        threading.Thread(target=late).start()
        atexit.register(lambda: print(WORD, sys.modules["__main__"].WORD))
    """

    assert remat_run(tmp_path, text)[1] == "alive\nalive alive\n"


ENVIRONMENT = 'import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("REMAT_")}))'


def test_the_options_reach_the_backend_through_the_environment(tmp_path: Path) -> None:
    options = ("--budget", "8GiB", "--microbatches", "12", "--dump-dir", "plans")

    assert json.loads(remat_run(tmp_path, ENVIRONMENT, *options)[1]) == {
        "REMAT_MEMORY_BUDGET": "8GiB",
        "REMAT_NUM_MICROBATCHES": "12",
        "REMAT_DUMP_DIR": str(tmp_path / "plans"),
    }


@pytest.mark.parametrize("budget", ["1", "0.5GiB", "8GB", "60%", "0.5%", "100%", "auto"])
def test_legal_budgets(tmp_path: Path, budget: str) -> None:
    code, stdout, _ = remat_run(tmp_path, ENVIRONMENT, "--budget", budget, "--microbatches", "auto")

    assert code == 0
    assert json.loads(stdout) == {"REMAT_MEMORY_BUDGET": budget, "REMAT_NUM_MICROBATCHES": "auto"}


def test_what_was_not_given_is_left_alone(tmp_path: Path) -> None:
    assert remat_run(tmp_path, ENVIRONMENT)[1] == "{}\n"


# How the script ends.

FAILURES = {
    "exception": "def inner():\n    raise ValueError('bad')\ninner()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')\n",
    "suggestion": "value = 1\nprint(vaule)\n",
    "syntax error": "x = = 1\n",
    "from the library": "import json\njson.loads('{')\n",
    "own hook": "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno)\n1 / 0\n",
    "missing import": "import no_such_module_anywhere\n",
    "exit 3": "import sys\nprint('out')\nsys.exit(3)\n",
    "exit text": "import sys\nsys.exit('all is lost')\n",
    "exit true": "import sys\nsys.exit(True)\n",
    "exit list": "import sys\nsys.exit([1, 2])\n",
    "exit 300": "import sys\nsys.exit(300)\n",
}
ENDINGS = {
    "nothing": "print('out')\n",
    "exit none": "import sys\nsys.exit()\n",
    "exit 0": "import sys\nsys.exit(0)\n",
    "bare SystemExit": "raise SystemExit\n",
}


@pytest.mark.parametrize("text", FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_looks_as_in_python(tmp_path: Path, text: str) -> None:
    code, stdout, stderr = remat_run(tmp_path, text)
    plain_code, plain_stdout, plain_stderr = python(tmp_path)

    assert (code, stdout, stderr.removesuffix(NO_PLAN)) == (plain_code, plain_stdout, plain_stderr)
    assert code != 0


@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_good_end_is_a_good_end(tmp_path: Path, text: str) -> None:
    code, stdout, stderr = remat_run(tmp_path, text)

    assert (code, stdout) == python(tmp_path)[:2]
    assert (code, stderr) == (0, NO_PLAN)


def test_no_plan_is_said_after_an_exit_but_not_after_a_traceback(tmp_path: Path) -> None:
    assert remat_run(tmp_path, FAILURES["exit 3"]) == (3, "out\n", NO_PLAN)
    assert NO_PLAN not in remat_run(tmp_path, FAILURES["exception"])[2]


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(30)\n")
    process = start([*REMAT, "run", "train.py"], tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    code, _, stderr = ended(process)

    assert code == 130
    assert stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line ')
    assert stderr.count("  File ") == 1
    assert stderr.endswith("KeyboardInterrupt\n")


# What is printed at the end.


def test_the_plan_table(tmp_path: Path) -> None:
    code, stdout, stderr = remat_run(tmp_path, f"{RECORD}print('loss 0.1')\n")

    assert (code, stderr) == (0, "")
    assert stdout == (
        "loss 0.1\n"
        "\n"
        "remat planned 1 graph for h200\n"
        "\n"
        "                              of               of                        micro-\n"
        "  graph              peak  plain      step  plain     saved  recompute  batches\n"
        "  -----------------------------------------------------------------------------\n"
        "  g00-1a2b3c4d  240.0 MiB    40%  12.50 ms  1.25x  98.0 MiB    2.52 ms        1\n"
        "  of plain: compared with what plain Inductor is projected to need\n"
        "  note: The projected peak holds for s0 = 1024; a longer sequence needs more.\n"
        "  'remat run --dump-dir DIR' keeps the plans, and 'remat dump DIR' shows every decision and its\n"
        "  reason.\n"
    )


def measured(peak_bytes: int) -> str:
    return f"{RECORD}from remat_compiler.plan_log import record_measurement\nrecord_measurement(0, {peak_bytes})\n"


@pytest.mark.parametrize(
    ("measured_bytes", "said"),
    [
        (256 * MIB + 20, "256.0 MiB in its first step, projected were 240.0 MiB (+6.7%), within the budget"),
        (243 * MIB, "243.0 MiB in its first step, projected were 240.0 MiB (+1.2%), within the budget"),
        (264 * MIB, "264.0 MiB in its first step, projected were 240.0 MiB (+10.0%), over the budget"),
        (216 * MIB, "216.0 MiB in its first step, projected were 240.0 MiB (-10.0%), within the budget"),
    ],
)
def test_the_measured_peak_stands_beside_the_projected_one(tmp_path: Path, measured_bytes: int, said: str) -> None:
    code, stdout, stderr = remat_run(tmp_path, measured(measured_bytes))

    assert (code, stderr) == (0, "")
    assert f"g00-1a2b3c4d took {said}" in " ".join(stdout.split())  # however the lines break


def test_the_measured_peak_in_json(tmp_path: Path) -> None:
    for text, peak in ((measured(243 * MIB), 243 * MIB), (RECORD, None)):
        code, stdout, _ = remat_run(tmp_path, text, "--format", "json")

        assert code == 0
        [record] = json.loads(stdout)
        assert record["measured_peak_bytes"] == peak


def test_what_came_of_running_a_step_both_ways(tmp_path: Path) -> None:
    sentence = "g00-1a2b3c4d: verified, 12 tensors, largest relative difference 1.4e-07"
    text = f"{RECORD}from remat_compiler.plan_log import record_verification\nrecord_verification({sentence!r})\n"

    assert f"\n  {sentence}\n" in remat_run(tmp_path, text)[1]
    assert json.loads(remat_run(tmp_path, text, "--format", "json")[1])[0]["verification"] == sentence
    assert json.loads(remat_run(tmp_path, RECORD, "--format", "json")[1])[0]["verification"] is None


def test_a_verification_that_failed_is_shown_with_the_plans(tmp_path: Path) -> None:
    sentence = (
        "g00-1a2b3c4d: the split step is not the same as the unsplit one. output 0: they differ by 1, of 2 at most."
    )
    text = (
        f"{RECORD}from remat_compiler.plan_log import record_verification\nrecord_verification({sentence!r})\n"
        "raise ValueError('wrong')\n"
    )
    code, stdout, stderr = remat_run(tmp_path, text)

    assert (code, stdout) == (1, "")
    assert sentence in " ".join(stderr.split())
    assert json.loads(remat_run(tmp_path, text, "--format", "json")[1])[0]["verification"] == sentence


def test_the_plan_table_names_the_folder_to_look_into(tmp_path: Path) -> None:
    stdout = remat_run(tmp_path, RECORD, "--dump-dir", "plans")[1]

    assert stdout.endswith("\n  'remat dump plans' shows every decision and its reason.\n")


def test_a_failing_script_still_shows_its_plans_on_stderr(tmp_path: Path) -> None:
    code, stdout, stderr = remat_run(tmp_path, f"{RECORD}raise ValueError('late')\n")

    assert (code, stdout) == (1, "")
    assert "\nValueError: late\n\nremat planned 1 graph for h200\n" in stderr


NOISY = """
import atexit, os, sys
print('loss 0.1')
print('warned', file=sys.stderr)
os.write(1, b'from C\\n')
os.system('echo from a child')
atexit.register(print, 'at the end')
"""


def test_json_has_stdout_for_itself(tmp_path: Path) -> None:
    code, stdout, stderr = remat_run(tmp_path, f"{RECORD}{NOISY}", "--format", "json")

    assert code == 0
    (record,) = json.loads(stdout)
    assert RematPlan.from_json(json.dumps(record), "here") == gpt_plan()
    assert stderr == "loss 0.1\nwarned\nfrom C\nfrom a child\nat the end\n"


@pytest.mark.parametrize("end", ["sys.stdout.close()", "os.close(1)", "raise ValueError('late')"])
def test_json_whatever_the_script_does_to_stdout(tmp_path: Path, end: str) -> None:
    stdout = remat_run(tmp_path, f"import os, sys\n{RECORD}{end}\n", "--format", "json")[1]

    assert len(json.loads(stdout)) == 1


def test_json_without_a_stderr(tmp_path: Path) -> None:
    script(tmp_path, f"{RECORD}print('loss 0.1')\n")
    stdout = ended(start(["sh", "-c", f"{' '.join(REMAT)} run --format json train.py 2>&-"], tmp_path))[1]

    assert len(json.loads(stdout)) == 1


def test_json_without_plans_is_an_empty_array(tmp_path: Path) -> None:
    assert remat_run(tmp_path, "", "--format", "json") == (0, "[]\n", NO_PLAN)


def test_a_script_that_closes_stdout(tmp_path: Path) -> None:
    assert remat_run(tmp_path, f"{RECORD}sys.stdout.close()\n") == (0, "", "")


# What is refused before the script starts.


@pytest.mark.parametrize("budget", ["", "8XB", "-1GiB", "0", "0%", "101%", "%", "sixty%", "1e9", "none"])
def test_a_malformed_budget(tmp_path: Path, budget: str) -> None:
    code, stdout, stderr = remat_run(tmp_path, "print('started')", "--budget", budget)

    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"Error: --budget is {budget!r}: ")
    assert "Accepted: " in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("num", ["0", "-2", "two", "1.5", ""])
def test_a_malformed_number_of_microbatches(tmp_path: Path, num: str) -> None:
    assert remat_run(tmp_path, "print('started')", "--microbatches", num) == (
        2,
        "",
        f"Error: --microbatches {num!r} is no number of micro-batches: write a whole number above zero, or auto.\n",
    )


@pytest.mark.parametrize("path", ["gone.py", "."])
def test_no_such_script(tmp_path: Path, path: str) -> None:
    code, stdout, stderr = ended(start([*REMAT, "run", path], tmp_path))

    assert (code, stdout) == (2, "")
    assert stderr == f"Error: {path} is not a file: give the Python script that trains.\n"


def test_options_of_remat_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    stdout = remat_run(tmp_path, "import sys; print(sys.argv[1:])", after=("--budget", "nonsense", "--version"))[1]

    assert stdout == "['--budget', 'nonsense', '--version']\n"


def test_no_script_and_an_unknown_option(tmp_path: Path) -> None:
    assert ended(start([*REMAT, "run"], tmp_path))[0] == 2
    assert ended(start([*REMAT, "run", "--no-such", "train.py"], tmp_path))[0] == 2


# The command line itself.


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["dump", "."], ["explain", ".", "fc1"], ["diff", ".", "."]]
)
def test_torch_is_not_imported(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "g00-1a2b3c4d.plan.json").write_text(gpt_plan(1).to_json())
    program = (
        "import sys\n"
        "from remat_compiler.cli import main\n"
        f"main({arguments!r}, prog_name='remat', standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'networkx' not in sys.modules\n"
    )
    code, _, stderr = ended(start([sys.executable, "-c", program], tmp_path))

    assert (code, stderr) == (0, "")


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "g00-1a2b3c4d.plan.json").write_text(gpt_plan(64).to_json())
    process = start([*REMAT, "dump", ".", "--format", "json"], tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None

    assert (process.wait(timeout=60), process.stderr.read()) == (0, "")
    process.stderr.close()
