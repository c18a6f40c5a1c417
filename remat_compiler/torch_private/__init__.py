"""Everything private of torch that remat touches, in one place: a test finds any other use.

Checked on torch 2.13.0 (all tests), on 2.11.0 and 2.15.0 (test_legality, test_joint, test_plan_time, test_kept_graphs
and test_backward_writes without Inductor, on 2.11.0 test_first_step too), and on 2.14.1 (tests of the passes, and a
small net under Inductor). After an upgrade of torch, these files are the ones to read again:

- ``graphs``: what Dynamo and AOTAutograd note on the nodes of their graphs, ``invoke_subgraph``, and Dynamo's count of
  the versions of a function, its graph breaks, and the axes that ``mark_dynamic`` was told of.
- ``partitioners``: ``torch._functorch.partitioners``, which is asked what it would save (the yardstick) and cuts the
  joint module in two as it is told.
- ``inductor``: ``compile_fx`` and its partitioner hook (``config.custom_partitioner_fn``), the lowering of random
  numbers, which nodes fuse, ``torch._functorch.config`` (``enable_autograd_cache``,
  ``force_non_lazy_backward_lowering``, ``donated_buffer``), AOTAutograd's list of donated values
  (``get_donated_idxs``), ``torch._guards`` for a compile in backward.
- ``eager``: ``torch._dynamo.backends.common.aot_autograd`` with Inductor's decomposition table.
- ``joint``: the joint graph of a compile that ends there.
- ``fake_tensors``: ``torch._subclasses.fake_tensor``, for steps and optimizers that are traced and not run.
- ``allocator``: ``torch.autograd._enable_profiler_legacy``, the sizes that the CPU allocator hands out, without Kineto;
  and the addresses, in ``torch.profiler``'s tree of events.
"""

from torch._inductor.custom_graph_pass import CustomPartitionerFn

from .allocator import Allocation, AllocationLog, allocations_within
from .eager import compile_with_aot_autograd
from .fake_tensors import UNKNOWN_CONTENTS, plain_tensors, shapes_only, tensors_on_paper, unhooked
from .graphs import (
    BODY_PREFIX,
    PLACE,
    CompiledGraph,
    Place,
    call_subgraph,
    calls_of,
    copy_of,
    fake_mode_of,
    fix_sizes,
    input_position,
    is_part,
    marked_dynamic,
    num_versions_left,
    outside_of_tracing,
    replace_graph,
    source_names,
)
from .inductor import (
    compile_plain_inductor,
    compile_with_inductor,
    graph_is_kept,
    inductor_mode_options,
    inductor_modes,
    inductor_option_names,
    lower_own_ops,
    reuses_saved_values,
)
from .joint import JointModule, joint_module_of, traced_step
from .partitioners import (
    extract_modules,
    inductor_saved_names,
    pinned_to_backward,
    prepare_joint_module,
    thread_random_state,
)
