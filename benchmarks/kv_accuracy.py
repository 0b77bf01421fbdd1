"""What a quantized KV cache does to a model's perplexity, on the CPU in float32.

Keys and values of every layer go through the cache's own references (write_kv_ref, gather_kv), everything else stays
float32; each window is scored with a cache of every kind, so that the windows' own differences drop out.

    python benchmarks/kv_accuracy.py                       # the demo model on the bundled text
    python benchmarks/kv_accuracy.py --windows 24 --json
    python benchmarks/kv_accuracy.py --model FOLDER --kinds int4 --simple
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from qengine.bench.about import commit
from qengine.checkpoint import open_checkpoint
from qengine.engine.key_axes import key_axes
from qengine.kernels.paged_attn.cache import KINDS, BlockLayout, Kind, KVPool, gather_kv
from qengine.kernels.paged_attn.ref import causal_attention
from qengine.kernels.paged_attn.write import write_kv_ref
from qengine.layers.attention import AttentionShape, DenseContext
from qengine.layers.rope import Rotary
from qengine.models import Decoder, load_model

BLOCK = 16
ONE_OFFSET = "int4, one key offset"


class QuantizedContext(DenseContext):
    """One sequence of `length` tokens, whose keys and values are read back from a cache of `kind`.

    axes: int32 [L, Hkv], of a cache that rotates, or None.
    """

    def __init__(self, length: int, kind: Kind, axes: torch.Tensor | None, key_offsets: int = 2) -> None:
        super().__init__(1, length)
        self.kind = kind
        self.axes = axes
        self.key_offsets = key_offsets

    def attend_joined(
        self, layer_index: int, qkv: torch.Tensor, rotary: Rotary | None, shape: AttentionShape
    ) -> torch.Tensor:
        """See AttentionContext."""
        layout = BlockLayout(self.kind, shape.kv_heads, shape.head_dim, BLOCK, self.key_offsets)
        blocks = -(-self.length // BLOCK)
        pool = KVPool.allocate(layout, 1, blocks, qkv.device, self.axes is not None)
        if pool.axes is not None and self.axes is not None:
            pool.axes.copy_(self.axes[layer_index])
        cache = pool.layer(0)
        norm = shape.head_norm
        write_kv_ref(
            qkv,
            cache,
            torch.arange(self.length, device=qkv.device),
            num_heads=shape.heads,
            head_norm=None if norm is None else norm.weight,
            norm_kind="rms" if norm is None else norm.kind,
            norm_eps=0.0 if norm is None else norm.eps,
            cos=None if rotary is None else rotary.cos,
            sin=None if rotary is None else rotary.sin,
            interleaved=rotary is not None and rotary.interleaved,
        )
        k, v = gather_kv(cache, torch.arange(blocks), self.length)
        q = qkv[:, : shape.heads * shape.head_dim].view(self.length, shape.heads, shape.head_dim)
        out = causal_attention(q, k, v, scale=shape.scale, softcap=shape.softcap, sliding_window=shape.sliding_window)
        return out.reshape(self.length, -1)


@torch.inference_mode()
def window_nll(decoder: Decoder, window: torch.Tensor, context: DenseContext) -> float:
    """Mean negative log-likelihood (nats) of tokens 1.. of `window`, int64 [L]."""
    hidden = decoder.forward(window, torch.arange(len(window)), context)
    logprobs = decoder.logits(hidden[:-1]).log_softmax(-1)
    return -float(logprobs.gather(1, window[1:, None]).double().mean())


def measure(folder: Path, kinds: list[Kind], windows: int, seq_len: int, simple: bool) -> dict[str, dict[str, float]]:
    """{kind: perplexity, its change in per cent against float32, and the standard error of that}.

    int4 is as the engine holds it, with an offset for each half of a key; ONE_OFFSET has one for both.
    """
    from transformers import AutoTokenizer

    text = resources.files("qengine.convert").joinpath("data/evaluation.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, verbose=False).input_ids
    spread = range(0, len(ids) // seq_len, max(1, len(ids) // seq_len // windows))
    chosen = [torch.tensor(ids[i * seq_len : (i + 1) * seq_len]) for i in spread][:windows]
    decoder = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    axes = None if simple else key_axes(decoder)
    plain = [window_nll(decoder, window, DenseContext(1, seq_len)) for window in chosen]
    found = {"float32": {"perplexity": math.exp(statistics.mean(plain)), "change": 0.0, "error": 0.0}}
    cases = [(kind, kind, axes if kind == "int4" else None, 2) for kind in kinds]
    if "int4" in kinds and not simple:
        cases.append((ONE_OFFSET, "int4", axes, 1))
    for name, kind, turned, offsets in cases:
        contexts = (QuantizedContext(seq_len, kind, turned, offsets) for _ in chosen)
        scores = [window_nll(decoder, window, context) for window, context in zip(chosen, contexts, strict=True)]
        changes = [a - b for a, b in zip(scores, plain, strict=True)]
        error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else math.nan
        found[name] = {
            "perplexity": math.exp(statistics.mean(scores)),
            "change": 100 * math.expm1(statistics.mean(changes)),
            "error": 100 * error,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder; the demo model if left out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cache")
    parser.add_argument("--windows", type=int, default=8, help="windows, spread over the text")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens a window")
    parser.add_argument("--simple", action="store_true", help="int4 without rotation")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    folder = arguments.model
    if folder is None:
        from qengine.demo_model import ensure_demo_model

        folder = ensure_demo_model()
    found = measure(folder, arguments.kinds, arguments.windows, arguments.seq_len, arguments.simple)
    if arguments.json:
        shape: dict[str, Any] = {"windows": arguments.windows, "seq_len": arguments.seq_len}
        about = {"commit": commit(), "torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({"model": folder.name, **shape, **about, "kinds": found}))
        return
    print(f"{folder.name}, {arguments.windows} windows of {arguments.seq_len} tokens")
    for kind, row in found.items():
        print(f"{kind:22s} perplexity {row['perplexity']:8.4f}  {row['change']:+7.3f} % +- {row['error']:.3f}")


if __name__ == "__main__":
    main()
