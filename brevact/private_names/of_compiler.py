"""Private and undocumented names of the compilers of PyTorch; the import takes Inductor's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from brevact.private_names.lookup import find

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
else:
    CustomPartitionerFn = find("torch._inductor.custom_graph_pass.CustomPartitionerFn")

OrderedSet = find("torch.utils._ordered_set.OrderedSet")
autograd_function_apply = find("torch._functorch.autograd_function.autograd_function_apply")
backends = find("torch._dynamo.backends.common")
compile_fx = find("torch._inductor.compile_fx")
functorch_config = find("torch._functorch.config")
get_hash_for_files = find("torch._inductor.custom_graph_pass.get_hash_for_files")
inductor_config = find("torch._inductor.config")
lookup_backend = find("torch._dynamo.backends.registry.lookup_backend")
mode_options = find("torch._inductor.list_mode_options")
nop = find("torch._functorch.compilers.nop")
partitioners = find("torch._functorch.partitioners")
select_decomp_table = find("torch._inductor.decomposition.select_decomp_table")
detect_fake_mode = find("torch._guards.detect_fake_mode")
inductor_prims = find("torch._inductor.inductor_prims")  # registers the next op
low_memory_max_pool = torch.ops.prims._low_memory_max_pool_with_offsets
to_copy = torch.ops.aten._to_copy
