"""Regions in code that a compiler traces: the mode that Dynamo follows, and the nodes that it puts into its graph."""
