"""What backward quantization stores of a model, and what it does to its gradients: measured."""
