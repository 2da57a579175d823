"""One tensor, without autograd: quantize it to packed codes and decode them."""

import torch

import brevact

quantizer = brevact.quantizer(brevact.StochBackward2bit, bucket_size=256)
packed = quantizer.quantize(torch.randn(1024, 64), seed=0)
print(packed.nbytes, packed.dequantize().shape)
