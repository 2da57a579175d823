"""Compiled graphs: pack the tensors that the partitioner of `torch.compile` saves for backward."""
