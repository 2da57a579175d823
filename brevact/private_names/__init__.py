"""The one place that looks up other libraries' private names, which a new version may drop.

``of_torch``, ``of_brevitas`` and ``of_triton`` hold the names of one library each; ``lookup`` finds them. The rest of
the package imports from here, and touches no other undocumented name. Imports nothing else of brevact.
"""
