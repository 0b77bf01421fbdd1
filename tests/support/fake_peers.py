"""Packages that look like AutoAWQ, GPTQModel and Optimum: they note what they are given and save a ready folder.

FAKE_NOTES names the file for the notes, FAKE_MADE the folder that is copied as the result, FAKE_FAULT what goes wrong:
raise, exit, kill, or partial (some files, then an error).
"""

from __future__ import annotations

from pathlib import Path

COMMON = """
import json, os, shutil, signal
NOTES = {}
def note(**values):
    NOTES.update(values)
    with open(os.environ["FAKE_NOTES"], "w") as file:
        json.dump(NOTES, file, default=str)
def save(out):
    print("this is the peer's own output")
    fault = os.environ.get("FAKE_FAULT", "")
    if fault == "partial":
        open(os.path.join(out, "model.safetensors"), "w").write("half")
    if fault in ("raise", "partial"):
        raise RuntimeError("no kernel for this card")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    shutil.copytree(os.environ["FAKE_MADE"], out, dirs_exist_ok=True)
"""

AWQ = """
from fake_common import note, save
class AutoAWQForCausalLM:
    @classmethod
    def from_pretrained(cls, source, **options):
        note(source=source, load=options)
        return cls()
    def quantize(self, tokenizer, **options):
        note(tokenizer=type(tokenizer).__name__, quantize=options)
    def save_quantized(self, out):
        save(out)
"""

AWQ_QUANTIZER = '''
class AwqQuantizer:
    """With the fault of the real one: what it keeps of the weights is the weights."""
    def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, linears2scale, fp16_output, kwargs={}):
        kept = {k: v.cpu() for k, v in module2inspect.state_dict().items()}
        for linear in linears2scale:
            linear.weight.data.mul_(2)
        module2inspect.load_state_dict(kept)
        return x
'''

GPTQMODEL = """
from fake_common import note, save
class BACKEND:
    AUTO, AWQ_TORCH = "auto", "awq_torch"
class QuantizeConfig(dict):
    def __init__(self, **options):
        super().__init__(options)
        note(config=options)
class GPTQModel:
    @classmethod
    def load(cls, source, config, **options):
        note(source=source, load=options)
        return cls()
    def quantize(self, data, **options):
        note(data=data, quantize=options)
    def save(self, out):
        save(out)
"""

OPTIMUM = """
from fake_common import note, save
class GPTQQuantizer:
    def __init__(self, **options):
        self.dataset, self.format, self.sym = options["dataset"], "gptq", options["sym"]
        data = [{k: v.tolist() for k, v in row.items()} for row in options.pop("dataset")]
        note(config=options, data=data)
    def quantize_model(self, model):
        self.format = "gptq_v2"
        note(model=str(next(model.parameters()).dtype))
        return model
    def to_dict(self):
        return {"bits": 4, "group_size": 32, "sym": self.sym, "quant_method": "gptq", "format": self.format,
                "dataset": self.dataset}
    def save(self, model, out):
        import json, os
        said = model.config.quantization_config
        if self.sym:
            self.format = "gptq"
        save(out)
        path = os.path.join(out, "config.json")
        config = {**json.load(open(path)), "quantization_config": said}
        json.dump(config, open(path, "w"))
"""

VERSIONS = {"autoawq": "0.2.9", "gptqmodel": "7.6.0", "optimum": "2.3.0"}


def write_fakes(folder: Path, **versions: str) -> Path:
    """Put the packages and their metadata into `folder`, which goes onto the import path."""
    files = {
        "fake_common.py": COMMON,
        "awq/__init__.py": AWQ,
        "awq/quantize/__init__.py": "",
        "awq/quantize/quantizer.py": AWQ_QUANTIZER,
        "gptqmodel/__init__.py": GPTQMODEL,
        "optimum/__init__.py": "",
        "optimum/gptq/__init__.py": OPTIMUM,
    }
    for name, version in {**VERSIONS, **versions}.items():
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files[f"{name}-{version}.dist-info/METADATA"] = text
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
