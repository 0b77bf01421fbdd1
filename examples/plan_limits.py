"""What a card can serve of a model, from headers alone: `python examples/plan_limits.py MODEL [GPU]`.

MODEL: a folder, a hub id (kilobytes are fetched) or random:SHAPE. The settings that come out are those of `LLM`.
"""

import sys

from qengine.plan import PlanOptions, find_card, plan_model
from qengine.plan.remote import open_headers
from qengine.random_model import is_random, random_checkpoint

name = sys.argv[1]
card = find_card(sys.argv[2] if len(sys.argv) > 2 else "t4")
checkpoint = random_checkpoint(name, "cpu") if is_random(name) else open_headers(name, None)

limit = card.memory_gib - 0.5  # left for others on the card
for kind in ("float16", "int8", "int4"):
    options = PlanOptions(memory_gib=limit, dtype="float16", kv_cache_dtype=kind, max_num_seqs=32)
    plan = plan_model(checkpoint, card, options, name=name)
    if not plan.fits:
        print(f"{kind}: does not fit {card.name}, {-plan.memory.free / 2**30:.2f} GiB are missing before any cache")
        continue
    print(f"{kind}: {plan.cache[kind]['tokens']:,} tokens of cache, up to {plan.max_model_len:,} a sequence")
    print(f"    LLM(model, gpu_memory_limit={limit:.1f}, kv_cache_dtype={kind!r}, max_model_len={plan.max_model_len},")
    print("        dtype='float16', max_num_seqs=32)")
