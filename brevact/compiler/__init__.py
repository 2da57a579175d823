"""Compiled graphs: pack the tensors that the partitioner of `torch.compile` saves for backward."""

#: Key of a node's mark, the text of its settings; empty for full precision.
MARK, FULL_PRECISION = "brevact", ""
