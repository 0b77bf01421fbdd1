"""Make tests/data/vectors from folders of checkpoints with reference weights: python tests/data/make_vectors.py SOURCE.

Each folder of SOURCE holds a checkpoint and `dequant_fp32.safetensors`; the reference weights, most of its bytes,
become
digests in `expected.json`; all else is copied, logits as float16 where that loses nothing. `packing_*.json` (integers
and the words a library packs them
to) are copied too.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TARGET = Path(__file__).parent / "vectors"
REFERENCE = "dequant_fp32.safetensors"


def digests(path: Path) -> dict[str, object]:
    with safe_open(path, "np") as file:
        weights = {}
        for name in sorted(file.keys()):
            array = file.get_tensor(name) + 0.0  # -0.0 becomes 0.0: a forward pass, by which some were made, loses it
            weights[name] = {"shape": list(array.shape), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
        return {"by": (file.metadata() or {}).get("by", ""), "weights": weights}


def copy_logits(source: Path, target: Path) -> None:
    """Logits that were computed in float16 take half the space without a change."""
    tensors = load_file(source)
    half = tensors["logits"].to(torch.float16)
    if torch.equal(half.float(), tensors["logits"]):
        tensors["logits"] = half
    save_file(tensors, target)


def main(source: Path) -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for folder in sorted(path.parent for path in source.glob(f"*/{REFERENCE}")):
        target = TARGET / folder.name
        target.mkdir(parents=True)
        for file in sorted(folder.iterdir()):
            if file.name == "logits.safetensors":
                copy_logits(file, target / file.name)
            elif file.name != REFERENCE:
                shutil.copyfile(file, target / file.name)
        (target / "expected.json").write_text(json.dumps(digests(folder / REFERENCE), indent=0) + "\n")
    for file in source.glob("packing_*.json"):
        shutil.copyfile(file, TARGET / file.name)
    size = sum(file.stat().st_size for file in TARGET.rglob("*") if file.is_file())
    print(f"{TARGET}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
