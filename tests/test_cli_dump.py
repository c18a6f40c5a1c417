"""``remat dump``: text at two widths, JSON, DOT, and every refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plan_samples import MIB, gpt_plan, plan, value

from remat_compiler.cli import main
from remat_compiler.cli.dot import dot_graph, quoted
from remat_compiler.cli.peak import PeakGroup, peak_groups
from remat_passes.plan import PeakValue, RematPlan

GPT = gpt_plan()


def remat(*arguments: object, columns: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": columns})


def write_plan(folder: Path, sample: RematPlan) -> Path:
    path = folder / f"{sample.graph_id}.plan.json"
    path.write_text(sample.to_json(), encoding="utf-8")
    return path


@pytest.fixture
def gpt_file(tmp_path: Path) -> Path:
    return write_plan(tmp_path, GPT)


def dumped(path: Path, *arguments: str, columns: str | None = None) -> str:
    result = remat("dump", path, *arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.output


def section(text: str, title: str) -> str:
    """The part of the text from the line that starts with ``title`` to the next blank line after its table."""
    return text[text.index(title) :]


def test_the_headline(gpt_file: Path) -> None:
    assert dumped(gpt_file).startswith(
        "g00-1a2b3c4d  planned for h200 with the analytic cost model, lowered by inductor, torch 2.13.0\n"
        "\n"
        "  budget           256.0 MiB  16.0 MiB of it stay unused\n"
        "  projected peak   240.0 MiB  40% of plain Inductor's 600.0 MiB\n"
        "  step time         12.50 ms  1.25x plain Inductor's 10.00 ms\n"
        "  saved             98.0 MiB  49 values kept from forward to backward\n"
        "  recompute          2.52 ms  20% of the step, to compute 65 dropped values (777.0 MiB) again\n"
        "  micro-batches            1  the batch is not split\n"
        "  before the step   50.0 MiB  allocated already: parameters, buffers, inputs\n"
        "  gradients         48.0 MiB  of the parameters, alive at the end of the step\n"
        "  symbols                  1  planned for s0 = 1024; other sizes need other bytes\n"
        "  note: The projected peak holds for s0 = 1024; a longer sequence needs more.\n"
        "\n"
        "Certified: no plan within 256.0 MiB beats 12.00 ms; this one: 12.50 ms, 240.0 MiB (gap 4.0%)\n"
        "  by the cost model, among plans where each forward value is saved, or recomputed where backward\n"
        "  needs it; backward runs in autograd's order\n"
        "\n"
    )


def test_the_headline_of_a_plan_without_budget_recompute_or_bound(tmp_path: Path) -> None:
    sample = plan([value("a")], budget_bytes=None, num_microbatches=4, lower_bound_us=0.0, inductor_peak_bytes=0)

    text = dumped(write_plan(tmp_path, sample))

    meaning = "no limit was set: the smallest of the fastest plans"
    assert f"  budget                none  {meaning}\n" in text
    assert "  projected peak   240.0 MiB  plain Inductor's is not known\n" in text
    assert "  saved                128 B  1 value kept from forward to backward\n" in text
    assert "  recompute           0.0 us  nothing is computed twice\n" in text
    assert "Not certified: no lower bound is known; this one: 12.50 ms, 240.0 MiB\n" in text
    assert "  micro-batches            4  the batch runs in 4 slices\n" in text
    assert "symbols" not in text
    assert "note:" not in text


def test_a_budget_that_is_exceeded_is_said(tmp_path: Path) -> None:
    text = dumped(write_plan(tmp_path, plan([value("a")], budget_bytes=200 * MIB)))

    assert "  budget           200.0 MiB  exceeded by 40.0 MiB\n" in text


def test_the_table_of_values_at_100_columns(gpt_file: Path) -> None:
    text = dumped(gpt_file)
    start, end = text.index("What happens to"), text.index("blocks.0-15 x16")

    assert text[start:end] == (
        "What happens to the 131 forward values that backward needs, by module\n"
        "recompute: what computing the value again costs, whatever was decided. x16: so many modules were\n"
        "planned alike; the title adds them up, the lines show the first. Sources are below\n"
        "/home/user/projects/tiny-gpt/src/model/\n"
        "\n"
        "  decision       bytes  recompute  value                            why, and where\n"
        "  --------------------------------------------------------------------------------------------------\n"
        "\n"
        "head  393.0 MiB recomputed in 880.0 us\n"
        "  recompute  393.0 MiB   880.0 us  logits                           over budget: the cheapest bytes\n"
        "                                   aten.mm float32[2*s0,50304]      that were still saved\n"
        "                                                                    (transformer.py:110)\n"
        "\n"
        "blocks.0-15.mlp x16  32.0 MiB saved, 256.0 MiB recomputed in 944.0 us\n"
        "  recompute    8.0 MiB    55.0 us  fc1                              over budget: the cheapest bytes\n"
        "                                   aten.addmm float32[2048,1024]    that were still saved\n"
        "                                                                    (transformer.py:71)\n"
        "  recompute    8.0 MiB     4.0 us  gelu                             cheap: fused into its readers,\n"
        "                                   aten.gelu float32[2048,1024]     it is never written to memory\n"
        "                                                                    (transformer.py:72)\n"
        "  save         2.0 MiB    55.0 us  fc2                              its recompute costs more than\n"
        "                                   aten.addmm float32[2048,256]     its bytes are worth\n"
        "                                                                    (transformer.py:73)\n"
        "\n"
        "blocks.0-15.attn.qkv x16  96.0 MiB recomputed in 664.0 us\n"
        "  recompute    6.0 MiB    41.5 us  qkv                              over budget: the cheapest bytes\n"
        "                                   aten.addmm float32[2048,768]     that were still saved\n"
        "                                                                    (transformer.py:52)\n"
        "  free: 16 values without memory of their own (96.0 MiB, there anyway)\n"
        "\n"
    )


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_no_line_is_wider_than_the_page(gpt_file: Path, columns: int) -> None:
    write_plan(gpt_file.parent, gpt_plan(graph_id="g01-ffffffff", num_layers=3))

    text = dumped(gpt_file.parent, "--all", columns=str(columns))

    assert max(map(len, text.splitlines())) <= columns
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_summary_of_wide_figures_still_fits_80_columns(tmp_path: Path) -> None:
    wide = {"projected_peak_bytes": 1023 * MIB, "saved_bytes": 1022 * MIB, "step_us": 999_990.0}
    for graph_id in ("g00-aaaaaaaa", "g01-bbbbbbbb"):
        write_plan(tmp_path, plan([value("a")], graph_id=graph_id, **wide))

    lines = dumped(tmp_path, columns="80").splitlines()

    assert lines[3] == "  g00-     1023.0 MiB   170%  999.99 ms  100.00x  1022.0 MiB     0.0 us        1"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", ["80", "100"])
def test_numbers_are_never_cut(gpt_file: Path, columns: str) -> None:
    text = dumped(gpt_file, columns=columns)

    for number in ("393.0 MiB", "256.0 MiB", "float32[2048,1024]", "2*s0,", "50304]", "transformer.py:110", "944.0 us"):
        assert number in text, number


def test_values_that_differ_in_nothing_but_their_name_share_a_line(tmp_path: Path) -> None:
    path = write_plan(tmp_path, plan([value(f"mul_{at}") for at in range(5)]))

    assert (
        "  save      5 x 128 B  5 x 1.0 us  mul_0, mul_1, mul_2 and 2 more  worth its bytes (model.py:1)\n"
        in dumped(path)
    )
    assert "mul_0, mul_1, mul_2, mul_3, mul_4 " in dumped(path, "--all")


def test_values_whose_reasons_name_different_neighbours_do_not_share_a_line(tmp_path: Path) -> None:
    values = [value("a", reason="a view of mm_1"), value("b", reason="a view of mm_2")]

    text = dumped(write_plan(tmp_path, plan(values)))

    assert "a view of mm_1" in text
    assert "a view of mm_2" in text


def test_free_values_are_counted_unless_all_are_asked_for(gpt_file: Path) -> None:
    short, full = dumped(gpt_file), dumped(gpt_file, "--all")

    assert "view of qkv" not in short
    assert "(top level)  free: 1 value without memory of their own (16.0 KiB, there anyway)\n" in short
    assert "view of qkv (transformer.py:53)" in full
    assert "primals_1" in full


def test_the_grand_total(gpt_file: Path) -> None:
    assert (
        "In all\n"
        "\n"
        "  decision   values      bytes  recompute  what it means\n"
        "  --------------------------------------------------------------------------------------------\n"
        "  save           49   98.0 MiB          -  kept from forward to backward\n"
        "  recompute      65  777.0 MiB    2.52 ms  dropped after forward, computed again in backward\n"
        "  free           17   96.0 MiB          -  no memory of its own: an input, an output or a view\n"
    ) in dumped(gpt_file)


def test_what_is_alive_at_the_peak_by_module(gpt_file: Path) -> None:
    text = dumped(gpt_file)
    start, end = text.index("Alive at the projected peak"), text.index("Peak against step time")

    assert text[start:end].startswith(
        "Alive at the projected peak of 240.0 MiB, by module\n"
        "\n"
        "     bytes  of peak  values  module\n"
        "  ---------------------------------------------------------\n"
        "  96.0 MiB      40%       1  head\n"
        "  50.0 MiB      21%       -  parameters, buffers and inputs\n"
        "  48.0 MiB      20%       1  (top level)\n"
        "  28.0 MiB      12%      14  blocks.0-13\n"
        "  18.0 MiB       8%       6  blocks.0-5.attn.qkv\n"
        "\n"
        "The 10 largest of 23 values at the peak\n"
        "\n"
        "     bytes  of peak  value                           what it is\n"
    )
    largest = text[start:end].split("what it is\n")[1].splitlines()
    assert largest[1:5] == [
        "  96.0 MiB      40%  logits                          recomputed: aten.mm.default in head",
        "  50.0 MiB      21%  parameters, buffers and inputs",
        "  48.0 MiB      20%  tangents_1",
        "   3.0 MiB       1%  qkv_0                           in blocks.0.attn.qkv",
    ]
    assert largest[-2:] == ["   2.0 MiB       1%  add_0                           in blocks.0", ""]
    assert len([line for line in largest if "MiB" in line]) == 10


def test_groups_beyond_the_eighth_are_one_more() -> None:
    values = [PeakValue(f"v{at}", 100 - at, f"layer_{at}") for at in range(12)]

    groups = peak_groups(values, 8)

    assert [group.label for group in groups] == [*(f"layer_{at}" for at in range(8)), "other"]
    assert groups[-1] == PeakGroup("other", 92 + 91 + 90 + 89, 4)
    assert peak_groups(values[:9], 8)[-1].label == "layer_8"  # one alone is no longer than its name


def test_a_peak_that_was_read_back_is_set_apart_from_the_predicted_one(tmp_path: Path) -> None:
    path = write_plan(tmp_path, replace(GPT, projected_peak_bytes=250 * MIB))

    assert (
        "Alive at the projected peak of 240.0 MiB, by module\n"
        "As the memory model has it; the code that Inductor wrote allocates 250.0 MiB.\n"
    ) in dumped(path)


def test_the_frontier_is_cut_to_twelve_points(gpt_file: Path) -> None:
    text = dumped(gpt_file)
    lines = text[text.index("Peak against step time") :].splitlines()

    assert lines[0] == "Peak against step time (12 of 31 points)"
    assert lines[5] == "  10.00 ms  100.0%  600.0 MiB   100%        -  ######################## <- plain"
    assert [line for line in lines if "chosen" in line] == [
        "  12.50 ms  125.0%  240.0 MiB    40%   6.7 us  ########## <- chosen"
    ]
    assert len(lines) == 5 + 12 + 2


def test_an_empty_plan_is_shown_without_its_empty_tables(tmp_path: Path) -> None:
    text = dumped(write_plan(tmp_path, plan()))

    assert "What happens" not in text
    assert "Alive at" not in text
    assert "Peak against" not in text
    assert "  save            0    0 B          -  kept from forward to backward\n" in text


def test_a_folder_is_summed_up_and_shown_in_the_order_of_names(tmp_path: Path) -> None:
    for graph_id in ("g02-cccccccc", "g00-aaaaaaaa", "g01-bbbbbbbb"):
        write_plan(tmp_path, plan([value("a")], graph_id=graph_id, notes=("said once",)))
    (tmp_path / "g00-aaaaaaaa.forward.txt").write_text("not a plan")

    text = dumped(tmp_path, columns="80")

    assert text.startswith(
        "                              of               of                     micro-\n"
        "  graph              peak  plain      step  plain  saved  recompute  batches\n"
        "  --------------------------------------------------------------------------\n"
        "  g00-aaaaaaaa  240.0 MiB    40%  12.50 ms  1.25x  128 B     0.0 us        1\n"
        "  g01-bbbbbbbb  240.0 MiB    40%  12.50 ms  1.25x  128 B     0.0 us        1\n"
        "  g02-cccccccc  240.0 MiB    40%  12.50 ms  1.25x  128 B     0.0 us        1\n"
        "  of plain: compared with what plain Inductor is projected to need\n"
        "  note: said once\n"
        "\n"
        "g00-aaaaaaaa  planned for"
    )
    assert re.findall(r"^(g0\d)-\w+  planned", text, re.MULTILINE) == ["g00", "g01", "g02"]


def test_piped_text_has_no_escape_codes(gpt_file: Path) -> None:
    result = CliRunner().invoke(main, ["dump", str(gpt_file)], env={"FORCE_COLOR": "1", "COLUMNS": None}, color=True)

    assert "\x1b" not in result.output


def test_escape_codes_in_a_plan_are_defused(tmp_path: Path) -> None:
    text = dumped(write_plan(tmp_path, plan([value("a", reason="\x1b[2Jgone", module="\x07bell")])))

    assert "?[2Jgone" in text
    assert "?bell  128 B saved" in text
    assert "\x1b" not in text


def test_json_of_a_file_is_one_plan_with_groups_and_reads_back(gpt_file: Path) -> None:
    record = json.loads(dumped(gpt_file, "--format", "json"))

    assert RematPlan.from_json(json.dumps(record), "here") == GPT
    assert record["groups"][1]["label"] == "blocks.0-15.mlp"
    assert record["groups"][1]["num_modules"] == 16
    assert record["groups"][1]["saved_bytes"] == 32 * MIB
    assert record["gap"] == 0.04
    assert {key: record[key] for key in record if key not in ("groups", "gap")} == json.loads(GPT.to_json())


def test_json_of_a_folder_is_an_array(gpt_file: Path) -> None:
    records = json.loads(dumped(gpt_file.parent, "--format", "json"))

    assert [record["graph_id"] for record in records] == ["g00-1a2b3c4d"]


@pytest.mark.parametrize("form", ["text", "json", "dot"])
def test_output_goes_to_a_file(gpt_file: Path, tmp_path: Path, form: str) -> None:
    target = tmp_path / "report"

    assert dumped(gpt_file, "--format", form, "--output", str(target)) == ""
    assert target.read_text(encoding="utf-8") == dumped(gpt_file, "--format", form)


# The drawing.

TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\d+(?:\.\d+)?|->|[{}\[\];=,])')


def tokens(text: str) -> Iterator[str]:
    place = 0
    while text[place:].strip():
        match = TOKEN.match(text, place)
        assert match, f"no DOT here: {text[place : place + 40]!r}"
        yield match.group(1)
        place = match.end()


class DotReader:
    """The part of DOT's grammar (graphviz.org/doc/info/lang.html) that a drawing may use, read strictly."""

    def __init__(self, text: str) -> None:
        self.tokens = [*tokens(text), ""]
        self.place = 0
        self.nodes: dict[str, dict[str, str]] = {}
        self.edges: list[tuple[str, str]] = []
        self.clusters: dict[str, list[str]] = {}

    def next(self, *wanted: str) -> str:
        token = self.tokens[self.place]
        assert not wanted or token in wanted, (token, wanted)
        self.place += 1
        return token

    def peek(self) -> str:
        return self.tokens[self.place]

    def many(self, read: Callable[[], None], end: str) -> None:
        while self.peek() != end:
            read()
        self.next(end)

    def graph(self) -> DotReader:
        self.next("digraph")
        self.next()
        self.next("{")
        self.many(lambda: self.statement([]), "}")
        assert self.peek() == ""
        return self

    def statement(self, inside: list[str]) -> None:
        first = self.next()
        if first == "subgraph":
            return self.cluster(inside)
        if self.peek() == "=":
            self.next("=")
            self.next()
        elif self.peek() == "->":
            self.next("->")
            self.edges.append((first, self.next()))
        else:
            self.nodes[first] = self.attributes()
            inside.append(first)
        self.next(";")
        return None

    def cluster(self, inside: list[str]) -> None:
        name = self.next()
        self.next("{")
        held: list[str] = []
        self.many(lambda: self.statement(held), "}")
        assert name not in self.clusters
        self.clusters[name] = held
        inside += held

    def attributes(self) -> dict[str, str]:
        found = {}
        self.next("[")
        while self.peek() != "]":
            key = self.next()
            self.next("=")
            found[key] = self.next()
            if self.next(",", "]") == "]":
                return found
        self.next("]")
        return found


def test_dot_draws_every_value_edge_and_cluster() -> None:
    drawn = DotReader(dot_graph(gpt_plan(num_layers=2))).graph()

    assert len(drawn.nodes) - 1 == len(gpt_plan(num_layers=2).values)  # and the defaults, `node [...]`
    assert drawn.nodes['"fc2"'] == {
        "label": r'"fc2\naten.addmm.default\nfloat32[2048,256] 2.0 MiB"',
        "shape": "box",
        "style": '"filled,bold"',
        "fillcolor": '"palegreen"',
    }
    assert drawn.nodes['"gelu_1"']["style"] == "dashed"
    assert drawn.nodes['"view"']["color"] == '"grey60"'
    assert ('"fc1_1"', '"gelu_1"') in drawn.edges
    assert drawn.clusters['"cluster_blocks.1.mlp"'] == ['"fc1_1"', '"gelu_1"', '"fc2_1"']
    assert set(drawn.clusters['"cluster_blocks.0.mlp"']) < set(drawn.clusters['"cluster_blocks.0"'])
    assert '"primals_1"' in drawn.nodes
    assert not any('"primals_1"' in held for held in drawn.clusters.values())


def test_dot_escapes_quotes_backslashes_and_line_breaks() -> None:
    odd = plan(
        [
            value('a"b\\', op='odd\n"op"\\N', module='m."q"'),
            value("b", inputs=('a"b\\', "not_needed"), decision="recompute"),
        ],
        graph_id='g"0\\',
    )
    text = dot_graph(odd)
    drawn = DotReader(text).graph()

    assert quoted('a"b\\') == r'"a\"b\\"'
    assert text.startswith(r'digraph "g\"0\\" {' + "\n")
    assert drawn.nodes[r'"a\"b\\"']["label"] == r'"a\"b\\\nodd \"op\"\\N\nfloat32[4,8] 128 B"'
    assert drawn.edges == [(r'"a\"b\\"', '"b"')]
    assert drawn.clusters[r'"cluster_m.\"q\""'] == [r'"a\"b\\"']


def test_dot_of_a_folder_is_one_digraph_a_plan(gpt_file: Path) -> None:
    write_plan(gpt_file.parent, plan([value("a")], graph_id="g01-ffffffff"))

    text = dumped(gpt_file.parent, "--format", "dot")

    assert re.findall(r'^digraph "(.*)" {$', text, re.MULTILINE) == ["g00-1a2b3c4d", "g01-ffffffff"]


# What is refused.


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    result = remat("dump", tmp_path / "gone")

    assert result.exit_code == 2
    assert result.output == (
        f"Error: {tmp_path}/gone does not exist: give a plan file (*.plan.json) or the folder that holds them.\n"
    )


def test_a_folder_without_plans_says_how_to_write_them(tmp_path: Path) -> None:
    result = remat("dump", tmp_path)

    assert result.exit_code == 1
    assert result.output == (
        f"Error: {tmp_path} holds no plan files (*.plan.json): train with REMAT_DUMP_DIR={tmp_path} set,"
        f" or with 'remat run --dump-dir {tmp_path} TRAIN.py', to write them.\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a plan file: "),
        ("[]", "is not a plan file: it has no 'schema'."),
        ('{"schema": 99}', "has plan schema 99; this remat reads schema 1."),
        ('{"schema": 1}', "is a damaged plan file: field 'graph_id' is missing."),
        (GPT.to_json().replace('"save"', '"keep"'), "is a damaged plan file: decision 'keep' of value"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "g00-1a2b3c4d.plan.json"
    path.write_text(text, encoding="utf-8")

    for target in (path, tmp_path):
        result = remat("dump", target)
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: {path} {said}")
        assert len(result.output.splitlines()) == 1


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.plan.json"
    path.write_bytes(b"\xff\xfe\x00")

    result = remat("dump", path)

    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {path} cannot be read: ")


def test_an_output_that_cannot_be_written(gpt_file: Path, tmp_path: Path) -> None:
    result = remat("dump", gpt_file, "--output", tmp_path / "no" / "such" / "folder.txt")

    assert result.exit_code == 2
    assert result.output == f"Error: {tmp_path}/no/such/folder.txt cannot be written: No such file or directory.\n"


@pytest.mark.parametrize("arguments", [["dump"], ["dump", "x", "--format", "yaml"], ["dump", "x", "--what"], ["paint"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert remat(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["run", "dump", "frontier", "explain", "diff"])
def test_each_help_text_has_an_example(command: str) -> None:
    result = remat(command, "--help")

    assert result.exit_code == 0
    assert f"Example:\n    remat {command} " in result.output


def test_help_and_version() -> None:
    assert "remat run --budget 8GiB" in remat("--help").output
    assert remat("--version").output == "remat, version 0.1.0\n"
