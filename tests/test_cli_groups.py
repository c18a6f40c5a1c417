"""Grouping by module, folding of equal layers, sorting and totals."""

from __future__ import annotations

from dataclasses import replace

from plan_samples import MIB, OVER, gpt_plan, value

from remat_compiler.cli.groups import Group, Total, group_record, group_values, shape_text, total
from remat_passes.plan import ValuePlan


def labels(values: list[ValuePlan]) -> list[str]:
    return [group.title for group in group_values(values)]


def layers(*modules: str, **fields: object) -> list[ValuePlan]:
    return [value(f"mm_{at}", module=module, **fields) for at, module in enumerate(modules)]


def group_of(values: tuple[ValuePlan, ...], label: str) -> Group:
    return next(group for group in group_values(values) if group.label == label)


def test_sixteen_equal_layers_are_one_group_each_sorted_by_bytes() -> None:
    assert [group.title for group in group_values(gpt_plan().values)] == [
        "head",
        "blocks.0-15.mlp x16",
        "blocks.0-15.attn.qkv x16",
        "blocks.0-15 x16",
        "blocks.0-15.ln x16",
        "blocks.0-15.attn.proj x16",
        "wte",
        "(top level)",
    ]


def test_a_layer_that_was_decided_differently_stands_apart() -> None:
    values = [replace(entry, decision="save") if entry.name == "fc1_15" else entry for entry in gpt_plan().values]

    assert labels(values)[:5] == [
        "head",
        "blocks.0-14.mlp x15",
        "blocks.0-15.attn.qkv x16",
        "blocks.0-15 x16",
        "blocks.0-15.ln x16",
    ]
    assert labels(values).count("blocks.15.mlp") == 1


def test_each_part_of_the_key_keeps_layers_apart() -> None:
    for field, other in [
        ("op", "aten.bmm.default"),
        ("shape", (8, 4)),
        ("dtype", "bfloat16"),
        ("decision", "recompute"),
        ("reason", "another one"),
    ]:
        first, second = layers("blocks.0", "blocks.1")
        assert labels([first, replace(second, **{field: other})]) == ["blocks.0", "blocks.1"], field


def test_names_sources_costs_and_inputs_do_not_keep_layers_apart() -> None:
    first, second = layers("blocks.0", "blocks.1")
    second = replace(second, source="model.py:99", cost_us=7.5, inputs=("x",))

    assert labels([first, second]) == ["blocks.0-1 x2"]


def test_the_number_of_a_name_in_a_reason_does_not_keep_layers_apart() -> None:
    first, second, third = layers("blocks.0", "blocks.1", "blocks.2")
    views = [
        replace(first, reason="a view of addmm"),
        replace(second, reason="a view of addmm_12"),
        replace(third, reason="a view of add_12"),
    ]

    assert labels(views) == ["blocks.0-1 x2", "blocks.2"]


def test_a_multiset_is_compared_not_a_set() -> None:
    once, twice, again = layers("blocks.0", "blocks.1", "blocks.1")

    assert labels([once, twice, again]) == ["blocks.1", "blocks.0"]


def test_the_order_inside_a_module_does_not_matter() -> None:
    values = [
        value("a", module="blocks.0", op="x", bytes=1),
        value("b", module="blocks.0", op="y", bytes=2),
        value("y", module="blocks.1", op="y", bytes=2),
        value("x", module="blocks.1", op="x", bytes=1),
    ]

    (group,) = group_values(values)

    assert [[entry.name for entry in folded.values] for folded in group.folded] == [["b", "y"], ["a", "x"]]


def test_gaps_are_written_as_runs() -> None:
    values = layers("blocks.0", "blocks.1", "blocks.2", "blocks.5", "blocks.7", "blocks.8")

    assert labels(values) == ["blocks.0-2,5,7-8 x6"]


def test_every_second_layer_is_one_group() -> None:
    values = layers(*(f"blocks.{at}" for at in range(6)))
    values = [replace(entry, decision="recompute") if at % 2 else entry for at, entry in enumerate(values)]

    assert labels(values) == ["blocks.0,2,4 x3", "blocks.1,3,5 x3"]


def test_two_integers_in_a_path_fold_to_a_product() -> None:
    values = layers(*(f"blocks.{layer}.experts.{expert}.up" for layer in range(3) for expert in range(4)))

    (group,) = group_values(values)

    assert group.title == "blocks.0-2.experts.0-3.up x12"
    assert group.modules[:5] == (
        "blocks.0.experts.0.up",
        "blocks.0.experts.1.up",
        "blocks.0.experts.2.up",
        "blocks.0.experts.3.up",
        "blocks.1.experts.0.up",
    )


def test_what_is_no_product_is_several_groups_and_nothing_is_lost() -> None:
    values = layers("down.0.1", "down.0.2", "down.1.1", "down.1.2", "down.2.1")

    assert labels(values) == ["down.0-1.1-2 x4", "down.2.1"]


def test_paths_that_differ_in_a_word_do_not_fold() -> None:
    assert labels(layers("encoder.0", "decoder.0")) == ["encoder.0", "decoder.0"]


def test_a_padded_number_is_a_name() -> None:
    assert labels(layers("blocks.00", "blocks.01", "blocks.1")) == ["blocks.00", "blocks.01", "blocks.1"]


def test_layers_are_ordered_as_numbers_not_as_text() -> None:
    (group,) = group_values(layers("blocks.10", "blocks.9", "blocks.11"))

    assert group.title == "blocks.9-11 x3"
    assert group.modules == ("blocks.9", "blocks.10", "blocks.11")
    assert [entry.name for entry in group.folded[0].values] == ["mm_1", "mm_0", "mm_2"]


def test_free_bytes_do_not_lift_a_group() -> None:
    values = [
        value("big", module="a", bytes=1000, decision="free"),
        value("small", module="b", bytes=1),
        value("medium", module="c", bytes=10, decision="recompute"),
    ]

    assert labels(values) == ["c", "b", "a"]


def test_values_inside_a_group_are_sorted_by_bytes_then_by_forwards_order() -> None:
    values = [value(name, module="a", op=name, bytes=size) for name, size in [("x", 1), ("z", 5), ("y", 5), ("w", 9)]]

    (group,) = group_values(values)

    assert [folded.first.name for folded in group.folded] == ["w", "z", "y", "x"]


def test_totals_of_a_group_count_every_module() -> None:
    values = gpt_plan().values
    mlp = group_of(values, "blocks.0-15.mlp")

    assert total(mlp.values, "save") == Total(16, 32 * MIB, 880.0)
    assert total(mlp.values, "recompute") == Total(32, 256 * MIB, 944.0)
    assert total(mlp.values, "free") == Total(0, 0, 0.0)


def test_totals_of_the_groups_add_up_to_those_of_the_plan() -> None:
    plan = gpt_plan()
    groups = group_values(plan.values)

    for decision in ("save", "recompute", "free"):
        parts = [total(group.values, decision) for group in groups]
        whole = total(plan.values, decision)
        assert sum(part.bytes for part in parts) == whole.bytes
        assert sum(part.num_values for part in parts) == whole.num_values
    assert total(plan.values, "save").bytes == plan.saved_bytes


def test_a_group_as_a_record() -> None:
    qkv = group_of(gpt_plan(num_layers=2).values, "blocks.0-1.attn.qkv")

    assert group_record(qkv) == {
        "label": "blocks.0-1.attn.qkv",
        "modules": ["blocks.0.attn.qkv", "blocks.1.attn.qkv"],
        "num_modules": 2,
        "saved_bytes": 0,
        "recomputed_bytes": 12 * MIB,
        "free_bytes": 12 * MIB,
        "recompute_us": 83.0,
        "values": [
            {
                "names": ["qkv", "qkv_1"],
                "op": "aten.addmm.default",
                "shape": [2048, 768],
                "dtype": "float32",
                "bytes": 6 * MIB,
                "decision": "recompute",
                "reason": OVER,
                "cost_us": 41.5,
            },
            {
                "names": ["view", "view_1"],
                "op": "aten.view.default",
                "shape": [2, 1024, 768],
                "dtype": "float32",
                "bytes": 6 * MIB,
                "decision": "free",
                "reason": "view of qkv",
                "cost_us": 0.0,
            },
        ],
    }


def test_shapes_are_written_as_inductor_writes_them() -> None:
    assert shape_text(value("a", dtype="torch.bfloat16", shape=(2, "s0*4", 8))) == "bfloat16[2,s0*4,8]"
    assert shape_text(value("a", shape=())) == "float32[]"
