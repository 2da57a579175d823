"""The formats: each file holds a quantizer and its formulas. They need torch alone."""
