"""Block means in float16, the residual in a few bits."""
