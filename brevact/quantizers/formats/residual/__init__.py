"""What a rounding to integers leaves over, in a few bits."""
