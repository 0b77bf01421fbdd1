"""Every checkpoint format, unpacked to one in-memory form."""

from qengine.quant.source import WeightSource, open_weights
from qengine.quant.weights import LinearWeight, PlainWeight, QuantizedWeight, QuantSpec

__all__ = ["LinearWeight", "PlainWeight", "QuantSpec", "QuantizedWeight", "WeightSource", "open_weights"]
