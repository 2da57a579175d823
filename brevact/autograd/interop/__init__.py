"""Other libraries' code that saves tensors for its own backward pass."""
