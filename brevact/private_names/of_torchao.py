"""What regions take the place of in torchao, which nobody imports for it."""

#: Module, and the function that all of torchao's integer fake quantizers call: of the tensor, block sizes, scale, zero
#: point, the type and range of the integers, and the domain of the zero point. It returns integers and values.
FAKE_QUANTIZATION = ("torchao.quantization.quant_primitives", "_do_fake_quantize_affine")

#: Module, and the class of its float8 fake quantizers: a module with ``enabled``, whose forward takes a tensor.
FLOAT8_FAKE_QUANTIZER = ("torchao.quantization.qat.fake_quantizer", "Float8FakeQuantizer")
