"""One conversion by another library, in the environment where that library is installed.

    PYTHON benchmarks/convert_peer_run.py PEER SOURCE OUT WINDOWS.json --bits 4 --group-size 64 [--sym]

PEER: autoawq, gptqmodel, llmcompressor-awq or llmcompressor-gptq. WINDOWS.json: the calibration windows as lists of
token ids. Needs nothing of qengine; `convert_peers.py` calls it and scores what it writes. Prints the seconds that the
library's own quantizer took, as JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import resource
import textwrap
import time

import torch


def autoawq(args: argparse.Namespace, windows: list[list[int]]) -> float:
    """AutoAWQ 0.2.9. On a CPU its backup of the weights copies nothing; here it is mended by a clone."""
    from awq import AutoAWQForCausalLM
    from awq.quantize import quantizer
    from transformers import AutoTokenizer

    method = quantizer.AwqQuantizer._compute_best_scale
    text = textwrap.dedent(inspect.getsource(method))
    text = text.replace("@torch.no_grad()\n", "")
    mended = text.replace("{k: v.cpu() for", "{k: v.detach().clone() for")
    if mended == text:
        raise SystemExit("AutoAWQ's backup of the weights is not where it was in 0.2.9; look again")
    exec(compile(mended, quantizer.__file__, "exec"), vars(quantizer))
    quantizer.AwqQuantizer._compute_best_scale = torch.no_grad()(vars(quantizer)["_compute_best_scale"])

    model = AutoAWQForCausalLM.from_pretrained(args.source, torch_dtype=torch.float32, device_map="cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    config = {"zero_point": not args.sym, "q_group_size": args.group_size, "w_bit": args.bits, "version": "GEMM"}
    started = time.monotonic()
    model.quantize(
        tokenizer,
        quant_config=config,
        calib_data=windows,
        max_calib_samples=len(windows),
        max_calib_seq_len=len(windows[0]),
    )
    seconds = time.monotonic() - started
    model.save_quantized(args.out)
    return seconds


def gptqmodel(args: argparse.Namespace, windows: list[list[int]]) -> float:
    """GPTQModel's GPTQ with its own defaults."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=args.bits, group_size=args.group_size, sym=args.sym, desc_act=False)
    model = GPTQModel.load(args.source, config, dtype=torch.float32, device="cpu")
    data = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows]
    started = time.monotonic()
    model.quantize(data, batch_size=1)
    seconds = time.monotonic() - started
    model.save(args.out)
    return seconds


def llmcompressor(args: argparse.Namespace, windows: list[list[int]]) -> float:
    """llm-compressor's AWQ or GPTQ; on a CPU its cache must not pin memory."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    IntermediatesCache.pin_memory = lambda self, *a, **k: None
    weights = {"num_bits": args.bits, "type": "int", "symmetric": args.sym, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": args.group_size}}
    if args.peer == "llmcompressor-awq":
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier

        recipe = [AWQModifier(), QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])]
    else:
        from llmcompressor.modifiers.quantization import GPTQModifier

        recipe = [GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"])]
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32)
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(ids) for ids in windows]})
    started = time.monotonic()
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(args.source),
        dataset=data,
        recipe=recipe,
        max_seq_length=len(windows[0]),
        num_calibration_samples=len(windows),
        shuffle_calibration_samples=False,
    )
    seconds = time.monotonic() - started
    model.save_pretrained(args.out, save_compressed=True)
    return seconds


def main() -> None:
    """Convert once and print the time and the peak of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["autoawq", "gptqmodel", "llmcompressor-awq", "llmcompressor-gptq"])
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("windows")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--sym", action="store_true")
    args = parser.parse_args()
    with open(args.windows, encoding="utf-8") as file:
        windows = json.load(file)
    run = {"autoawq": autoawq, "gptqmodel": gptqmodel}.get(args.peer, llmcompressor)
    seconds = run(args, windows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peer": args.peer, "seconds": round(seconds, 1), "peak_mib": round(peak)}))


if __name__ == "__main__":
    main()
