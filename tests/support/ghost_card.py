"""A CUDA card that is not there: enough of it for a dry run, which launches on tensors without memory."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qengine.engine.shape_only import ShapeOnly
from qengine.kernels.fused import card
from qengine.kernels.paged_attn import decode, prefill
from qengine.kernels.w4a16 import ops
from qengine.kernels.w4a16.layout import W4A16Weight
from qengine.layers.activation import gated_activation
from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.linear_w4a16 import FusedGatedLinear, FusedLinear
from qengine.layers.norm import RMSNorm
from qengine.layers.rope import Rope
from qengine.models.decoder import MLP, Attention, Decoder, DecoderLayer

CARDS = {75: (65536, 40), 80: (166912, 108), 90: (232448, 132)}
DEVICE = torch.device("cuda", 0)


class GhostDriver:
    """Triton's driver of the card."""

    def __init__(self, sm):
        self.sm = sm

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.sm, 32)

    def get_active_torch_device(self):
        return DEVICE


class _Device(Rope):
    def __init__(self, spec, device):
        super().__init__(spec, torch.device("cpu"))
        self._short = torch.empty(self._short.shape, dtype=self._short.dtype, device=device)


@contextlib.contextmanager
def ghost_card(monkeypatch, sm):
    """Within, torch and Triton believe in a card of capability `sm`."""
    shared, count = CARDS[sm]
    properties = SimpleNamespace(
        major=sm // 10, minor=sm % 10, shared_memory_per_block_optin=shared, multi_processor_count=count,
        total_memory=16 << 30,
    )  # fmt: skip
    caches = (ops.device_limits, decode._device, prefill.capability, prefill.multiprocessors, card._capability)
    driver = triton.runtime.driver
    active = driver._active
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (sm // 10, sm % 10))
        patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=7))
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
        patch.setattr(ShapeOnly, "__getitem__", _item, raising=False)
        for cache in caches:
            cache.cache_clear()
        driver.set_active(GhostDriver(sm))
        forget_compiled()
        try:
            yield
        finally:
            driver._active = active
            forget_compiled()
            for cache in caches:
                cache.cache_clear()


def _item(x, index):
    """x[index] for numbers and slices: torch's own asks for the card."""
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        start, end, step = part.indices(x.shape[dim])
        assert step == 1
        x = x.narrow(dim, start, max(0, end - start))
        dim += 1
    return x


def forget_compiled():
    """Binders of all kernels: they hold the target."""
    for kernel in [x for x in gc.get_objects() if isinstance(type(x), type) and issubclass(type(x), JITFunction)]:
        kernel.device_caches.clear()


def _linear(shape, bits=4, group=128, bias=False, act=None):
    n, k = shape
    weight = W4A16Weight(
        torch.empty(-(-n // 16), -(-k // (512 // bits)), 256, dtype=torch.int32, device=DEVICE),
        torch.empty(-(-k // group), -(-n // 16), 8, 2, dtype=torch.int32, device=DEVICE),
        None, n, k, bits, group, 1.0,
    )  # fmt: skip
    impl = object.__new__(FusedLinear if act is None else FusedGatedLinear)
    impl.shape, impl._weight, impl._run = shape, weight, ops.w4a16_linear
    if act is not None:
        impl._gated, impl._activation, impl._paired_bias = ops.w4a16_gated, act.name, None
    impl.bias = torch.empty(n, dtype=torch.float16, device=DEVICE) if bias else None
    linear = object.__new__(Linear)
    linear.name, linear.dtype, linear.device, linear.split, linear.observer, linear._impl, linear.gate = (
        "ghost", torch.float16, DEVICE, "replicated", None, impl, act,
    )  # fmt: skip
    return linear


def ghost_decoder(spec):
    """A Llama-like Decoder of one layer, float16; to be made within recorded_launches."""
    shapes, act = spec.linear_shapes(), gated_activation(spec.activation)
    qkv = sum(shapes[f"self_attn.{x}_proj"][0] for x in "qkv")
    linears = {
        "qkv": _linear((qkv, spec.hidden_size)),
        "o": _linear(shapes["self_attn.o_proj"]),
        "gate_up": _linear((2 * spec.intermediate_size, spec.hidden_size), act=act),
        "down": _linear(shapes["mlp.down_proj"]),
    }

    def norm():
        return RMSNorm(torch.empty(spec.hidden_size, dtype=torch.float16, device=DEVICE), spec.norm_eps, torch.float16)

    attention = Attention(spec, 0, [linears["qkv"]], linears["o"], None, None)
    mlp = MLP(act, [linears["gate_up"]], linears["down"])
    rope = _Device(spec.layers[0].rope, DEVICE)
    layer = DecoderLayer(spec, torch.float16, attention, mlp, (norm(), None, norm(), None), rope, linears)
    table = torch.empty(spec.vocab_size, spec.hidden_size, dtype=torch.float16, device=DEVICE)
    head = _linear((spec.vocab_size, spec.hidden_size), bits=8)
    return Decoder(spec, torch.float16, DEVICE, Embedding(table, 1.0, torch.float16, DEVICE), [layer], norm(), head)
