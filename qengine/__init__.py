"""qengine: quantized inference for low-VRAM GPUs."""

__version__ = "0.1.0"
