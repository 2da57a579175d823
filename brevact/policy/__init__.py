"""Which backward quantizer applies where in a model."""
