"""No quantization: what a policy stands for that packs only what loses nothing."""
