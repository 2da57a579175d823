"""Forward fake quantization in regions: its Functions, statistics of scales, and the ops of torch.ao and torchao."""
