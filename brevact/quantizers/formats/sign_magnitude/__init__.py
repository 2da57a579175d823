"""A sign and a magnitude in units of the scale of each bucket."""
