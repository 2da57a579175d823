"""Several processes: DistributedDataParallel as usual; a hook packs the gradients that ranks exchange, if you want."""

import torch
from torch import distributed

import brevact

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # or as torchrun says
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.SiLU(), torch.nn.Linear(256, 8))
parallel = torch.nn.parallel.DistributedDataParallel(brevact.quantize_backward(model))
parallel.register_comm_hook(None, brevact.distributed.quantized_hook(brevact.StochBackward4bit))
parallel(torch.randn(64, 256)).square().mean().backward()
distributed.destroy_process_group()
