"""Two quantizers for one tensor: some of its buckets are stored at a higher width."""
