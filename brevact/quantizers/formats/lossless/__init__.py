"""No quantization: for policies that pack only exactly."""
