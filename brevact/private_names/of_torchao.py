"""Functions of torchao that regions replace, found without importing torchao."""

#: Module, and the function that all of torchao's integer fake quantizers call, with tensor, block sizes, scale, zero
#: point, the integers' type and range, and the zero point's domain. It returns integers and values.
FAKE_QUANTIZATION = ("torchao.quantization.quant_primitives", "_do_fake_quantize_affine")
