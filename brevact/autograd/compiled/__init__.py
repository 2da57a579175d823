"""Regions in code that a compiler traces: the mode that Dynamo traces, and its graph nodes."""
