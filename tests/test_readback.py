"""A wrapper run on bytes: what it allocates, frees, shows and hands on; and what is not understood is not guessed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import compiled, remat_error
from torch import Tensor, nn

import remat_compiler
from benchmarks.networks import ExplicitAttention, LanguageModel, UNet
from remat_compiler import torch_private
from remat_compiler.partitioner import Made
from remat_compiler.plan_log import measured_peaks
from remat_compiler.readback import Allocations, Result, Signature, StepReader, Storage, read_allocations

F32 = torch.float32
HELD = Storage(0, 128, F32, is_held=True)
OWN = Storage(1, 256, F32)


def read(
    body: str,
    outputs: tuple[str | None, ...] = ("out",),
    results: dict[str, tuple[tuple[Result | None, ...], ...]] | None = None,
    device: str = "cpu",
    **inputs: Storage | int,
) -> Allocations | None:
    """Run the body of a wrapper, whose arguments are called as its graph's."""
    inputs = inputs or {"held": HELD}
    graph = Signature(tuple(inputs), outputs, results or {})
    start = f"def call(args):\n    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = args\n    args.clear()\n"
    source = "from torch import empty_strided\n" + start + textwrap.indent(textwrap.dedent(body), "    ")
    return read_allocations(source, graph, inputs, device)


def understood(found: Allocations | None) -> Allocations:
    assert found is not None
    return found


def test_allocated_and_freed() -> None:
    found = understood(
        read("""
            buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
            cpp_fused_0(held, buf0)
            buf1 = empty_strided_cpu((8, ), (1, ), torch.float64)
            cpp_fused_1(buf0, buf1)
            del buf0
            buf2 = empty_strided_cpu((2, ), (1, ), torch.int64)
            cpp_fused_2(buf1, buf2)
            return (buf2, )
        """)
    )

    assert found.timeline == (("cpp_fused_0", 128), ("cpp_fused_1", 192), ("cpp_fused_2", 80))
    assert (found.peak_bytes, found.final_bytes) == (192, 16)
    assert found.returned["out"].bytes == 16


def test_a_view_keeps_its_base() -> None:
    found = understood(
        read("""
            buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
            cpp_fused_0(buf0)
            buf1 = reinterpret_tensor(buf0, (8, 4), (4, 1), 0)
            del buf0
            buf2 = empty_strided_cpu((1, ), (1, ), torch.float32)
            cpp_fused_1(buf1, buf2)
            del buf1
            cpp_fused_2(buf2)
            return (buf2, )
        """)
    )

    assert [size for _, size in found.timeline] == [128, 132, 4]


def test_a_buffer_that_is_taken_over() -> None:
    found = understood(
        read("""
            buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
            cpp_fused_0(buf0)
            buf1 = buf0; del buf0  # reuse
            cpp_fused_1(buf1)
            buf2 = reinterpret_tensor(buf1, (32, ), (1, ), 0); del buf1  # reuse
            cpp_fused_2(buf2)
            return (buf2, )
        """)
    )

    assert [size for _, size in found.timeline] == [128, 128, 128]
    assert (found.peak_bytes, found.final_bytes) == (128, 128)


def test_gaps_count_and_expanded_dimensions_do_not() -> None:
    found = understood(
        read(
            """
            buf0 = empty_strided_cpu((2, 3), (10, 1), torch.uint8)
            buf1 = empty_strided_cpu((1000, 3), (0, 1), torch.uint8)
            buf2 = empty_strided_cpu((0, 3), (3, 1), torch.uint8)
            return (buf0, buf1, buf2, )
        """,
            ("a", "b", "c"),
        )
    )

    assert [found.returned[name].bytes for name in "abc"] == [13, 3, 0]


def test_arguments_are_the_callers_or_the_graphs_own() -> None:
    found = understood(
        read(
            """
            del held
            cpp_fused_0(own)
            del own
            cpp_fused_1()
            return (None, )
        """,
            (None,),
            held=HELD,
            own=OWN,
        )
    )

    assert found.timeline == (("cpp_fused_0", 0), ("cpp_fused_1", -256))
    assert found.final_bytes == -256


def test_an_argument_that_is_dropped_only_by_the_return() -> None:
    found = understood(read("cpp_fused_0(own)\nreturn (None, )", (None,), own=OWN))

    assert found.final_bytes == -256


def test_an_argument_that_is_handed_on() -> None:
    found = understood(read("return (own, )", own=OWN))

    assert found.final_bytes == 0
    assert found.returned["out"].number == OWN.number


def test_symbolic_sizes() -> None:
    found = understood(
        read(
            """
            s0 = size
            buf0 = empty_strided_cpu((s0, 2*s0), (2*s0, 1), torch.float32)
            return (buf0, )
        """,
            held=HELD,
            size=3,
        )
    )

    assert found.final_bytes == 3 * 6 * 4


def test_cuda_rounds_and_counts_its_own_memory_only() -> None:
    found = understood(
        read(
            """
            with torch.cuda._DeviceGuard(0):
                torch.cuda.set_device(0)
                buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
                stream0 = get_raw_stream(0)
                triton_poi_fused_0.run(held, buf0, 32, stream=stream0)
                buf1 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
            return (buf0, buf1, )
        """,
            ("a", "b"),
            device="cuda",
        )
    )

    assert found.timeline == (("triton_poi_fused_0.run", 512),)
    assert found.final_bytes == 512


# Ops of ATen, which allocate what they return.

SORT = {"torch.ops.aten.sort.default": ((Result((4, 8), F32, "cpu"), Result((4, 8), torch.int64, "cpu")),)}


def test_an_op_with_one_result() -> None:
    body = """
        buf0 = torch.ops.aten.cumsum.default(held, 1)
        assert_size_stride(buf0, (4, 8), (8, 1), 'torch.ops.aten.cumsum.default')
        cpp_fused_0(buf0)
        return (buf0, )
    """
    half = {"torch.ops.aten.cumsum.default": ((Result((4, 8), torch.float16, "cpu"),),)}

    assert understood(read(body, results=half)).final_bytes == 64
    assert understood(read(body)).final_bytes == 128  # of its operand's type


def test_the_results_of_an_op_live_as_long_as_their_tuple() -> None:
    found = understood(
        read(
            """
            buf0 = torch.ops.aten.sort.default(held)
            buf1 = buf0[0]
            assert_size_stride(buf1, (4, 8), (8, 1), 'torch.ops.aten.sort.default')
            cpp_fused_0(buf1)
            del buf0
            cpp_fused_1(buf1)
            return (buf1, )
        """,
            results=SORT,
        )
    )

    assert [size for name, size in found.timeline if name.startswith("cpp")] == [128 + 256, 128]


def test_an_out_variant_allocates_nothing() -> None:
    found = understood(
        read("""
            buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
            extern_kernels.mm(held, reinterpret_tensor(held, (8, 4), (1, 8), 0), out=buf0)
            return (buf0, )
        """)
    )

    assert found.timeline == (("mm", 64),)


# What is not understood.


@pytest.mark.parametrize(
    "body",
    [
        "if True:\n    pass\nreturn (held, )",
        "for _ in range(3):\n    pass\nreturn (held, )",
        "partition_0(held); x, y = partition_1()\nreturn (held, )",
        "buf0 = torch.ops.aten.cumsum.default(held, 1)\nreturn (buf0, )",
        "buf0 = torch.ops.aten.sort.default(held)\nbuf1 = buf0[0]\nreturn (buf1, )",
        "buf0 = empty_strided_cpu((u0, ), (1, ), torch.float32)\nreturn (buf0, )",
        "buf0 = empty_strided_cpu((4, ), (1, ), torch.no_such_type)\nreturn (buf0, )",
        "return (nobody, )",
        "return (held, held, held, )",
    ],
)
def test_what_is_not_understood_is_not_guessed(body: str) -> None:
    assert read(body) is None


@pytest.mark.parametrize("source", ["", "def call(args:", "def other(args):\n    return ()"])
def test_no_wrapper(source: str) -> None:
    assert read_allocations(source, Signature(("held",), ("out",), {}), {"held": HELD}, "cpu") is None


def test_other_arguments_than_the_graphs() -> None:
    source = "def call(args):\n    a, b = args\n    return (a, )\n"

    assert read_allocations(source, Signature(("held",), ("out",), {}), {"held": HELD}, "cpu") is None


# What Inductor writes for a GPU.

BF16 = torch.bfloat16
KIB = 1024


def read_cuda(body: str, outputs: tuple[str | None, ...] = ("out",), **more: Any) -> Allocations:
    return understood(read(body, outputs, device="cuda", **more))


def test_inputs_that_are_checked_for_alignment() -> None:
    """torch 2.13 checks each input of a GPU graph before the first kernel that reads it."""
    found = read_cuda(
        """
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((256, ), (1, ), torch.float32)
            own = copy_if_misaligned(own)
            stream0 = get_raw_stream(0)
            triton_poi_fused_add_0.run(own, buf0, 256, stream=stream0)
            del own
            buf1 = empty_strided_cuda((256, ), (1, ), torch.float32)
            triton_poi_fused_add_1.run(buf0, buf1, 256, stream=stream0)
            del buf0
        return (buf1, )
    """,
        own=Storage(1, KIB, F32),
    )

    assert [size for _, size in found.timeline] == [KIB, KIB]
    assert found.final_bytes == 0


def test_a_workspace_that_is_cleared() -> None:
    found = read_cuda("""
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            workspace_0 = empty_strided_cuda((4096, ), (1, ), torch.uint8)
            workspace_0.zero_()
            buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
            stream0 = get_raw_stream(0)
            triton_red_fused_sum_0.run(held, buf0, workspace_0, 8, 4096, stream=stream0)
            del workspace_0
            triton_poi_fused_1.run(buf0, 8, stream=stream0)
        return (buf0, )
    """)

    assert [size for _, size in found.timeline] == [4096, 4096 + 512, 512]


def test_a_buffer_that_is_padded_in_place() -> None:
    found = read_cuda("""
        buf0 = empty_strided_cuda((128, 40), (40, 1), torch.bfloat16).as_strided((128, 33), (40, 1))
        triton_poi_fused_0.run(held, buf0, 4224, stream=stream0)
        buf1 = reinterpret_tensor(buf0, (128, 40), (40, 1), 0); del buf0  # reuse
        buf2 = empty_strided_cuda((128, 8), (8, 1), torch.bfloat16)
        extern_kernels.mm(buf1, reinterpret_tensor(held, (40, 8), (8, 1), 0), out=buf2)
        del buf1
        return (buf2, )
    """)

    assert [size for _, size in found.timeline] == [128 * 40 * 2, 128 * 48 * 2]
    assert found.final_bytes == 128 * 8 * 2


def test_buffers_of_a_pool_are_the_pool() -> None:
    """As Inductor's option ``memory_planning`` writes them."""
    found = read_cuda("""
        pool0 = empty_strided_cuda((8192, ), (1, ), torch.uint8)
        buf0 = alloc_from_pool(pool0, 0, torch.float32, (1024, ), (1, ))
        triton_poi_fused_0.run(held, buf0, 1024, stream=stream0)
        buf1 = alloc_from_pool(pool0, 4096, torch.float32, (1024, ), (1, ))
        del pool0
        triton_poi_fused_1.run(buf0, buf1, 1024, stream=stream0)
        del buf0
        triton_poi_fused_2.run(buf1, 1024, stream=stream0)
        return (buf1, )
    """)

    assert [size for _, size in found.timeline] == [8192, 8192, 8192]


def test_copies_from_and_to_another_device() -> None:
    found = read_cuda("""
        buf0 = empty_strided_cpu_pinned((64, ), (1, ), torch.int64)
        cpp_fused_arange_0(buf0)
        buf1 = empty_strided_cuda((64, ), (1, ), torch.int64)
        buf1.copy_(buf0, True)
        del buf0
        triton_poi_fused_1.run(buf1, 64, stream=stream0)
        return (buf1, )
    """)

    assert found.timeline[1:] == (("buf1.copy_", 512), ("triton_poi_fused_1.run", 512))


def test_symbolic_sizes_of_a_launch() -> None:
    found = read_cuda(
        """
        s77 = size
        ps0 = 4*s77
        buf0 = empty_strided_cuda((s77, 128), (128, 1), torch.float32)
        triton_poi_fused_0_xnumel = 128*s77
        stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(held, buf0, ps0, triton_poi_fused_0_xnumel, stream=stream0)
        return (buf0, )
    """,
        held=HELD,
        size=3,
    )

    assert found.final_bytes == 3 * 512


@pytest.mark.parametrize("name", ["mystery", "held.resize_", "nobody.zero_"])
def test_what_else_is_done_to_a_buffer_is_not_guessed(name: str) -> None:
    body = f"x = {name}(held)\nreturn (held, )" if name == "mystery" else f"{name}(held)\nreturn (held, )"

    assert read(body, device="cuda") is None


B, H, T, D = 2, 4, 200, 48
HEADS, PLAIN = (T * H * D, D, H * D, 1), (H * T * D, T * D, D, 1)  # heads of a token together, or tokens of a head
FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"
SEED = Result((2,), torch.uint64, "cuda")
FLASH_RESULTS = {
    f"{FLASH}.default": (
        (Result((B, H, T, D), BF16, "cuda"), Result((B, H, T), F32, "cuda"), None, None, None, None, SEED, SEED, None),
    ),
    f"{FLASH}_backward.default": ((Result((B, H, T, D), BF16, "cuda"),) * 3,),
}


def flash(strides: tuple[int, ...], shared: int = 1) -> str:
    """Attention forward and backward; ``shared`` is how many heads share keys."""
    keys = f"reinterpret_tensor(held, {(B, H // shared, T, D)}, {(T * H // shared * D, D, H // shared * D, 1)}, 0)"
    query = f"reinterpret_tensor(held, {(B, H, T, D)}, {HEADS}, 0)"
    gradients = "\n".join(
        f"buf{20 + i} = buf19[{i}]\nassert_size_stride(buf{20 + i}, {(B, own, T, D)}, {(T * own * D, D, own * D, 1)},"
        f" '{FLASH}_backward.default')\nassert_alignment(buf{20 + i}, 16, '{FLASH}_backward.default')"
        for i, own in enumerate((H, H // shared, H // shared))
    )
    forward = f"""
buf5 = {FLASH}.default({query}, {keys}, {keys}, 0.0, True, scale=0.125)
buf6 = buf5[0]
assert_size_stride(buf6, {(B, H, T, D)}, {HEADS}, '{FLASH}.default')
assert_alignment(buf6, 16, '{FLASH}.default')
buf7 = buf5[1]
assert_size_stride(buf7, {(B, H, T)}, {(H * T, T, 1)}, '{FLASH}.default')
buf8 = buf5[6]
assert_size_stride(buf8, (2, ), (1, ), '{FLASH}.default')
buf9 = buf5[7]
assert_size_stride(buf9, (2, ), (1, ), '{FLASH}.default')
del buf5
buf18 = empty_strided_cuda({(B, H, T, D)}, {strides}, torch.bfloat16)
triton_poi_fused_0.run(held, buf18, 1, stream=stream0)
buf19 = {FLASH}_backward.default(
    buf18, {query}, {keys}, {keys}, buf6, buf7, None, None, {T}, {T}, 0.0, True, buf8, buf9, scale=0.125)
del buf6, buf7, buf8, buf9, buf18
{gradients}
del buf19
return (buf20, buf21, buf22, )
"""
    return forward


def test_flash_attention_and_what_its_backward_allocates_for_itself() -> None:
    sums, accumulated = B * H * 256 * 4, B * H * 256 * 64 * 4  # rows in blocks of 128, a head in blocks of 32
    ones, lse = B * H * T * D * 2, -(-B * H * T * 4 // 512) * 512
    held = Storage(0, 3 * ones, BF16, is_held=True)
    together, apart = (
        read_cuda(flash(strides), ("q", "k", "v"), results=FLASH_RESULTS, held=held).timeline[-1][1]
        for strides in (HEADS, PLAIN)
    )

    assert together == (ones + lse + 2 * 512) + ones + 3 * ones + sums + accumulated
    assert apart == together + ones  # the incoming gradient is copied


def test_flash_attention_whose_heads_share_keys() -> None:
    ones = B * H * T * D * 2
    half = Result((B, H // 2, T, D), BF16, "cuda")
    backward = {f"{FLASH}_backward.default": ((Result((B, H, T, D), BF16, "cuda"), half, half),)}
    held = Storage(0, 3 * ones, BF16, is_held=True)
    own = read_cuda(flash(HEADS), ("q", "k", "v"), results=FLASH_RESULTS, held=held)
    shared = read_cuda(flash(HEADS, 2), ("q", "k", "v"), results={**FLASH_RESULTS, **backward}, held=held)

    assert shared.timeline[-1][1] == own.timeline[-1][1] - ones + 2 * ones  # the results, and a gradient a head


# A step: forward, then backward with what forward has saved.

FORWARD = """
def call(args):
    primals_1, = args
    args.clear()
    buf0 = empty_strided_cpu((16, ), (1, ), torch.float32)
    buf1 = empty_strided_cpu((32, ), (1, ), torch.float32)
    buf2 = empty_strided_cpu((64, ), (1, ), torch.float32)
    cpp_fused_0(primals_1, buf0, buf1, buf2)
    del buf2
    return (buf0, primals_1, buf1, buf0, )
"""
BACKWARD = """
def call(args):
    primals_1, saved, out, tangents_1 = args
    args.clear()
    buf3 = empty_strided_cpu((8, ), (1, ), torch.float32)
    cpp_fused_1(tangents_1, saved, out, buf3)
    del saved
    del out
    del tangents_1
    buf4 = empty_strided_cpu((100, ), (1, ), torch.float32)
    cpp_fused_2(buf3, buf4)
    del buf4
    return (buf3, )
"""


def test_a_step() -> None:
    reader = StepReader("cpu", num_forward_outputs=1)
    x, tangent = torch.zeros(16), torch.zeros(16)
    assert reader.peak_bytes(1000) is None
    forward = Signature(("primals_1",), ("out", "primals_1", "saved", "out"), {})
    reader.read(FORWARD, forward, [x], is_backward=False)
    assert reader.peak_bytes(1000) is None
    backward = Signature(("primals_1", "saved", "out", "tangents_1"), ("gradient",), {})
    reader.read(BACKWARD, backward, [x, torch.zeros(32), torch.zeros(16), tangent], is_backward=True)

    assert reader.forward is not None
    assert reader.backward is not None
    assert (reader.forward.peak_bytes, reader.forward.final_bytes) == (4 * (16 + 32 + 64), 4 * (16 + 32))
    # The output stays, the saved value and the tangent go; the caller's input counts in neither.
    assert [size for _, size in reader.backward.timeline] == [4 * 8, 4 * (8 - 32 - 16 + 100)]
    assert reader.peak_bytes(1000) == 1000 + 4 * (16 + 32 + 16 - 32 - 16 + 8 + 100)
    assert reader.peak_values(1000) == (
        ("parameters, buffers and inputs", 1000),
        ("a buffer of cpp_fused_2", 4 * 100),
        ("out", 4 * 16),
        ("a buffer of cpp_fused_1", 4 * 8),
    )


def test_a_step_whose_backward_gets_something_unknown() -> None:
    reader = StepReader("cpu", num_forward_outputs=1)
    reader.read(
        FORWARD,
        Signature(("primals_1",), ("out", "primals_1", "saved", "out"), {}),
        [torch.zeros(16)],
        is_backward=False,
    )
    stranger = Signature(("primals_1", "stranger", "out", "tangents_1"), ("gradient",), {})
    reader.read(
        BACKWARD,
        stranger,
        [torch.zeros(16), torch.zeros(32), torch.zeros(16), torch.zeros(16)],
        is_backward=True,
    )

    assert reader.peak_bytes(0) is None


def test_a_copy_of_an_input_that_forward_hands_on_is_backwards_to_free() -> None:
    """As the channels-last copy of a convolution's weight is."""
    reader = StepReader("cpu", num_forward_outputs=0)
    forward = """
        def call(args):
            primals_1, = args
            buf0 = empty_strided_cpu((16, ), (1, ), torch.float32)
            cpp_fused_0(primals_1, buf0)
            return (buf0, )
    """
    reader.read(
        textwrap.dedent(forward), Signature(("primals_1",), ("primals_1",), {}), [torch.zeros(16)], is_backward=False
    )
    backward = """
        def call(args):
            primals_1, = args
            args.clear()
            buf1 = empty_strided_cpu((8, ), (1, ), torch.float32)
            cpp_fused_1(primals_1, buf1)
            del primals_1
            cpp_fused_2(buf1)
            return (buf1, )
    """
    reader.read(
        textwrap.dedent(backward), Signature(("primals_1",), ("gradient",), {}), [torch.zeros(16)], is_backward=True
    )

    assert reader.backward is not None
    assert [size for _, size in reader.backward.timeline] == [4 * 8, 4 * (8 - 16)]
    assert reader.peak_values(64) == (
        ("parameters, buffers and inputs", 64),
        ("primals_1", 64),
        ("a buffer of cpp_fused_1", 32),
    )


def test_a_scalar_tangent_is_held_by_autograd() -> None:
    reader = StepReader("cpu", num_forward_outputs=1)
    source = "def call(args):\n    primals_1, = args\n    return (primals_1, )\n"
    reader.read(source, Signature(("primals_1",), ("primals_1",), {}), [torch.zeros(4)], is_backward=False)
    drops = "def call(args):\n    tangents_1, = args\n    del tangents_1\n    return (None, )\n"
    reader.read(drops, Signature(("tangents_1",), (None,), {}), [torch.zeros(())], is_backward=True)

    assert reader.peak_bytes(16) == 16 + 4
    assert reader.backward is not None
    assert reader.backward.final_bytes == 0


def test_on_a_gpu_a_tangent_takes_a_whole_block_and_what_lies_elsewhere_none() -> None:
    meta = torch.zeros((), device="meta")  # stands for a GPU, whose tensors cannot be made without one
    reader = StepReader("meta", num_forward_outputs=1)
    source = "def call(args):\n    primals_1, = args\n    return (primals_1, )\n"
    reader.read(source, Signature(("primals_1",), ("primals_1",), {}), [torch.zeros(4)], is_backward=False)
    drops = "def call(args):\n    tangents_1, = args\n    return (None, )\n"
    reader.read(drops, Signature(("tangents_1",), (None,), {}), [meta], is_backward=True)

    assert reader.peak_bytes(0) == 512
    assert reader.primals["primals_1"] == replace(HELD, bytes=0)


# Plans that turn out too large are made again.


@pytest.fixture
def deep(fresh_compiler: None) -> nn.Module:
    blocks = [(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6)]
    return nn.Sequential(*(part for block in blocks for part in block))


def reads_as(monkeypatch: pytest.MonkeyPatch, read_bytes: Callable[[int], int]) -> list[Any]:
    """Inductor's code allocates something else than is predicted; all that is compiled is listed."""
    compiled_with: list[Any] = []

    def compile_eagerly(module: Any, inputs: Any, _options: Any, partitioner: Any, seen: Any) -> Callable[..., Any]:
        compiled_with.append(partitioner)
        return torch_private.compile_with_aot_autograd(module, inputs, partitioner, seen)

    def read(made: Made) -> Any:
        return replace(made.plan, projected_peak_bytes=read_bytes(made.plan.predicted_peak_bytes))

    monkeypatch.setattr(torch_private, "compile_with_inductor", compile_eagerly)
    monkeypatch.setattr(Made, "final_plan", property(read))
    return compiled_with


@pytest.fixture
def code_is_larger(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Inductor's code allocates a fifth more than is predicted."""
    return reads_as(monkeypatch, lambda predicted_bytes: predicted_bytes * 6 // 5)


ONE_BUFFER = 256 * 64 * 4  # the hidden values of one block


@pytest.fixture
def code_is_smaller(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Inductor's code does without one of the buffers that were predicted."""
    return reads_as(monkeypatch, lambda predicted_bytes: predicted_bytes - ONE_BUFFER)


def train(module: nn.Module, budget: int | str | None) -> None:
    torch._dynamo.reset()
    options = {} if budget is None else {"memory_budget": budget}
    call: Callable[[Tensor], Tensor] = compiled(module, lowering="inductor", num_microbatches=1, **options)
    call(torch.randn(256, 32)).square().sum().backward()


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_a_plan_whose_code_is_too_large_is_made_again(deep: nn.Module, code_is_larger: list[Any]) -> None:
    before = len(remat_compiler.plans())
    train(deep, "90%")
    [plan] = remat_compiler.plans()[before:]

    assert plan.budget_bytes is not None
    assert plan.predicted_peak_bytes < plan.projected_peak_bytes <= plan.budget_bytes
    assert plan.graph_id.startswith(f"g{before:02d}-")
    assert plan.notes[0].startswith("planned again: the code of the first plan, predicted to need ")


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_a_plan_whose_code_fits_is_not_made_again(deep: nn.Module, code_is_larger: list[Any]) -> None:
    before = len(remat_compiler.plans())
    train(deep, 10**9)
    train(deep, None)

    assert len(remat_compiler.plans()) == before + 2
    assert not any("planned again" in note for plan in remat_compiler.plans()[before:] for note in plan.notes)


def named_by_refusal(module: nn.Module, budget_bytes: int) -> int:
    with pytest.raises(Exception, match="cannot be met") as caught:
        train(module, budget_bytes)
    named = re.search(r"can be reached is [^(]*\((\d+) bytes\)", str(remat_error(caught.value)))
    assert named is not None
    return int(named[1])


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_a_refusal_names_another_plan_where_the_smallest_ones_code_is_larger(
    deep: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads_as(monkeypatch, lambda predicted_bytes: predicted_bytes)
    smallest_bytes = named_by_refusal(deep, 1)
    reads_as(monkeypatch, lambda predicted: 2 * predicted if predicted < 1.1 * smallest_bytes else predicted)
    named_bytes = named_by_refusal(deep, 1)

    assert 1.1 * smallest_bytes <= named_bytes <= 1.5 * smallest_bytes
    before = len(remat_compiler.plans())
    train(deep, named_bytes)
    assert remat_compiler.plans()[before].projected_peak_bytes <= named_bytes


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_the_peak_that_a_refusal_names_can_be_had(deep: nn.Module, code_is_larger: list[Any]) -> None:
    before = len(remat_compiler.plans())
    smallest = named_by_refusal(deep, 1)
    assert len(remat_compiler.plans()) == before
    train(deep, smallest)
    [plan] = remat_compiler.plans()[before:]

    assert plan.projected_peak_bytes == smallest
    with pytest.raises(Exception, match="cannot be met"):
        train(deep, smallest - 1)


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_a_difference_of_one_buffer_is_made_good_by_one_more_trial(
    deep: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that is lower by a ratio would give away more than the buffer at a small budget, and a plan with it."""
    compiled_with = reads_as(monkeypatch, lambda predicted_bytes: predicted_bytes + ONE_BUFFER)
    before = len(remat_compiler.plans())
    train(deep, "80%")
    [plan] = remat_compiler.plans()[before:]
    [limit_bytes] = compiled_with[-1].limits.values()

    assert len(compiled_with) == 2
    assert plan.budget_bytes is not None
    assert plan.budget_bytes - 2 * ONE_BUFFER < limit_bytes <= plan.budget_bytes
    assert limit_bytes == plan.budget_bytes - ONE_BUFFER or plan.predicted_peak_bytes <= plan.budget_bytes - ONE_BUFFER


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_where_the_code_is_smaller_than_predicted_a_faster_plan_is_taken(
    deep: nn.Module, code_is_smaller: list[Any]
) -> None:
    before = len(remat_compiler.plans())
    train(deep, "80%")
    [plan] = remat_compiler.plans()[before:]
    first = code_is_smaller[0].made[0].plan

    assert plan.budget_bytes is not None
    assert first.predicted_peak_bytes <= plan.budget_bytes < plan.predicted_peak_bytes
    assert plan.projected_peak_bytes <= plan.budget_bytes
    assert plan.step_us < first.step_us
    assert plan.notes[0].startswith("planned again: the code of the first plan, predicted to need ")
    assert len(code_is_smaller) <= 3


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_nothing_is_compiled_twice_where_no_faster_plan_would_fit(deep: nn.Module, code_is_smaller: list[Any]) -> None:
    train(deep, "100%")
    train(deep, None)

    assert len(code_is_smaller) == 2


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_a_faster_plan_whose_code_is_too_large_is_not_taken(deep: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[int] = []

    def read_bytes(predicted_bytes: int) -> int:
        predicted.append(predicted_bytes)
        return predicted_bytes - ONE_BUFFER if predicted_bytes == predicted[0] else 2**40

    compiled_with = reads_as(monkeypatch, read_bytes)
    before = len(remat_compiler.plans())
    train(deep, "80%")
    [plan] = remat_compiler.plans()[before:]

    assert len(compiled_with) == 2
    assert plan.predicted_peak_bytes == predicted[0]
    assert plan.projected_peak_bytes == predicted[0] - ONE_BUFFER


@pytest.mark.filterwarnings("ignore::remat_passes.errors.RematWarning")
def test_a_refusal_says_that_each_graph_is_planned_by_itself(deep: nn.Module, code_is_larger: list[Any]) -> None:
    with pytest.raises(Exception, match="TORCH_LOGS=graph_breaks shows where"):
        train(deep, 1)


# On Inductor itself.


def unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return UNet(8), (torch.randn(4, 3, 32, 32), torch.randint(5, (4, 32, 32)))


def language_model() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = LanguageModel([ExplicitAttention(64, 4, 0.1)], 64, 256, None)
    return model, (torch.randint(256, (4, 64)), torch.randint(256, (4, 64)))


@pytest.mark.inductor
@pytest.mark.parametrize("network", [unet, language_model])
def test_what_is_read_back_is_what_is_measured(
    network: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], fresh_compiler: None
) -> None:
    model, batch = network()
    before = len(remat_compiler.plans())
    for _ in ("compiled", "out of Inductor's cache"):
        torch._dynamo.reset()
        compiled(model, lowering="inductor", memory_budget="80%")(*batch).backward()
        model.zero_grad(set_to_none=True)
    plans, peaks = remat_compiler.plans()[before:], measured_peaks()[before:]

    assert plans[0].projected_peak_bytes == plans[1].projected_peak_bytes
    for plan, measured in zip(plans, peaks, strict=True):
        assert measured == pytest.approx(plan.projected_peak_bytes, rel=0.01)
        assert plan.budget_bytes is not None
        assert measured <= plan.budget_bytes
