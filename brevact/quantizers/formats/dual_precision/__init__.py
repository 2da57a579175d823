"""Block means in float16, what they leave in a few bits."""
