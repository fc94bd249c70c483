"""The three quantized GEMMs, their seam on Megatron's linears, and measuring passes."""
