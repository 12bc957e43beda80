"""Folders of safetensors whose weights are quantised: GPTQ, AWQ, FP8, MXFP4, compressed-tensors."""
