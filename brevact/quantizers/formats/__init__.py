"""The formats: each folder holds a quantizer, its formulas and tables, and its injectors.

`quantizer.py` needs torch alone. `injectors.py` is the one file of a folder that imports Brevitas, or modules on top of
it.
"""
