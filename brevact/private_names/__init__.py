"""The one place where private names of other libraries are looked up: names that a new version may drop.

``of_torch``, ``of_brevitas`` and ``of_triton`` hold the names of one library each, and say what needs
them; ``lookup`` finds them, and stands in for what is missing. The rest of the package imports from here, and touches
no other name that a library does not document. Imports nothing else of brevact.
"""
