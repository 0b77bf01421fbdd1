"""`qengine plan`: its arithmetic against what the engine really holds, its choices, its errors."""

import json
import math
import random

import pytest
import torch
from tiny_llm import tiny_folder
from typer.testing import CliRunner

from qengine.checkpoint import open_checkpoint
from qengine.cli.main import app
from qengine.errors import ConfigError, QEngineError
from qengine.kernels.paged_attn.cache import BlockLayout, KVPool
from qengine.kernels.w4a16 import W4A16Weight
from qengine.models import load_model
from qengine.plan import PlanOptions, find_card, plan_model
from qengine.plan.memory import bytes_per_token, cache_tokens, users_at
from qengine.plan.speed import model_shape
from qengine.plan.weights import model_weights, packed_bytes
from qengine.random_model import random_checkpoint, shape_config, tensor_entries

GIB = 2**30


@pytest.fixture(autouse=True)
def _no_predictions(request, monkeypatch):
    """Predictions compile kernels that are not shipped: only where a test is about them."""
    if "predict" not in request.node.name:
        monkeypatch.setattr("qengine.plan.plan.speeds", lambda weights, plan: {"unavailable": "not asked for"})


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("seed", range(12))
def test_packed_bytes_are_those_of_the_packed_weight(seed):
    rng = random.Random(seed)
    bits, group = rng.choice([3, 4, 8]), rng.choice([16, 32, 48, 64, 128, -1])
    n, k = 8 * rng.randrange(1, 12), rng.choice([64, 96, 128, 200, 256, 384])
    size = group if 0 < group < k else k
    groups = math.ceil(k / size)
    q = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    g_idx = None
    if seed % 4 == 3 and k % size == 0:
        g_idx = torch.randperm(k) // size
    weight = W4A16Weight.pack(
        q, torch.rand(n, groups), torch.zeros(n, groups, dtype=torch.int16), g_idx, bits, group, "cpu"
    )
    ordered = weight.perm is not None
    assert packed_bytes(n, k, bits, group, sorted_columns=ordered) == weight.nbytes()


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_cache_tokens_fill_the_bytes(kind):
    spec = model_weights(
        random_checkpoint("tiny", "cpu"), dtype=torch.float16, int8_head=False, embedding_on_host=False
    ).spec
    given = 1_000_003
    tokens = cache_tokens(spec, kind, 16, given)
    layout = BlockLayout(kind, spec.num_kv_heads, spec.head_dim, 16)
    pool = KVPool.allocate(layout, spec.num_layers, tokens // 16, "cpu")
    assert pool.storage.nbytes <= given < pool.storage.nbytes + spec.num_layers * layout.block_bytes
    assert bytes_per_token(spec, kind, 16) == pool.storage.nbytes / tokens
    assert users_at(tokens, 33, 16) == tokens // 48


def test_a_plain_model_takes_what_loading_says():
    folder = tiny_folder("llama3")[1]
    plain = load_model(open_checkpoint(folder), dtype=torch.float16, device="cpu").memory_bytes()
    found = as_json(folder, "--gpu", "t4", "--no-embedding-on-host", "--lm-head-dtype", "model")
    assert found["fits"]
    assert found["choices"] == {"embedding_on_host": False, "int8_head": False, "quantization": None}
    sizes = found["gpu_gib"]
    assert (sizes["layers"] + sizes["head"] + sizes["embedding"]) * GIB == pytest.approx(plain, rel=0.01)


def test_a_known_model_by_its_files():
    """Llama-2-7B: packed weights are the file's, and every number of the cache follows from its sizes."""
    found = as_json("--shape", "llama-2-7b", "--memory", 14.6, "--kv-cache-dtype", "float16")
    config = shape_config("llama-2-7b")
    layers = sum(e.nbytes for e in tensor_entries(config) if "layers" in e.name)
    assert found["gpu_gib"]["layers"] * GIB == pytest.approx(layers, rel=0.03)
    assert found["host_gib"]["embedding"] * GIB == 32000 * 4096 * 2
    assert found["cache"]["float16"]["bytes_per_token"] == 2 * 32 * 4096 * 2
    tokens = found["cache"]["float16"]["tokens"]
    assert tokens == int(found["gpu_gib"]["cache"] * GIB / (2 * 32 * 4096 * 2 * 16)) * 16
    assert 18_000 < tokens < 25_000
    assert found["cache"]["int8"]["tokens"] > 1.9 * tokens
    assert sum(found["gpu_gib"].values()) == pytest.approx(14.6)
    assert found["cache"]["float16"]["users"]["1024"] == tokens // 1024


def test_predictions_are_those_of_the_cost_model():
    from qengine.kernels.cost import CARDS, MODELS, decode_step

    options = {"dtype": torch.float16, "int8_head": False, "embedding_on_host": False}
    shape = model_shape(model_weights(random_checkpoint("llama-2-7b", "cpu"), **options))
    assert shape == MODELS["Llama-2-7B"]
    found = as_json("--shape", "llama-2-7b", "--gpu", "t4", "--kv-cache-dtype", "float16", "--lm-head-dtype", "model")
    one = found["predicted"]["decode"][0]
    assert one["users"] == 1
    assert one["ms"] == pytest.approx(decode_step(CARDS["T4"], shape, 1, 1024).ms)
    rates = [row["tokens_per_s"] for row in found["predicted"]["decode"]]
    assert max(rates) > 4 * rates[0] == 4 * min(rates)
    assert [row["prompt"] for row in found["predicted"]["ttft"]] == [512, 2000]
    text = run("--shape", "llama-2-7b", "--gpu", "t4").stdout
    assert "predicted output tokens a second on T4, 1,024 tokens of context each" in text


def test_predictions_that_cannot_be_made_say_why(monkeypatch):
    from qengine.kernels.code_facts import CostError

    def missing(*arguments, **more):
        raise CostError("Triton is not installed")

    monkeypatch.setattr("qengine.plan.plan.predict", missing)
    found = as_json("--shape", "llama-2-7b", "--gpu", "t4")
    assert found["predicted"] == {"unavailable": "Triton is not installed"}
    assert found["fits"]


@pytest.mark.parametrize(
    ("shape", "tokens", "weights"), [("llama-2-7b", 20_976, 3.3305), ("qwen2.5-7b", 180_416, 3.7526)]
)
def test_the_plan_is_near_what_an_h200_measured(shape, tokens, weights):
    """`benchmarks/plan_check.py` there, with 14.6 GiB."""
    arguments = ("--shape", shape, "--gpu", "h200", "--memory", 14.6, "--max-model-len", 2048)
    found = as_json(*arguments, "--kv-cache-dtype", "float16", "--max-num-batched-tokens", 1024)
    assert found["cache"]["float16"]["tokens"] == pytest.approx(tokens, rel=0.01)
    assert found["gpu_gib"]["layers"] + found["gpu_gib"]["head"] == pytest.approx(weights, abs=0.001)


def test_defaults_follow_the_memory():
    small = as_json("--shape", "qwen2.5-7b", "--gpu", "t4")
    large = as_json("--shape", "qwen2.5-7b", "--gpu", "h200")
    assert small["kv_cache_dtype"] == "int8"
    assert small["choices"]["embedding_on_host"]
    assert small["choices"]["int8_head"]
    assert large["kv_cache_dtype"] == "float16"
    assert not large["choices"]["embedding_on_host"]
    capped = as_json("--shape", "qwen2.5-7b", "--gpu", "h200", "--memory", 14.6)
    assert capped["choices"] == small["choices"]
    assert "fp8" in large["cache"]
    assert "fp8" not in small["cache"]


def test_a_tied_head_shares_its_table_where_it_can():
    card = find_card("a10")
    ckpt = random_checkpoint("qwen2.5-0.5b", "cpu")
    shared = plan_model(ckpt, card, PlanOptions(embedding_on_host=False, lm_head_dtype="model"))
    apart = plan_model(ckpt, card, PlanOptions(embedding_on_host=False, lm_head_dtype="int8"))
    assert shared.memory.parts["embedding"] == 0
    assert apart.memory.parts["embedding"] == 151936 * 896 * 2


def test_what_does_not_fit_says_by_how_much_and_what_to_do():
    result = run("--shape", "qwen2.5-14b", "--gpu", "rtx2060")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "GiB are missing" in result.stdout
    assert "--max-num-batched-tokens 512" in result.stdout
    found = as_json("--shape", "qwen2.5-14b", "--gpu", "rtx2060", code=1)
    assert not found["fits"]
    assert found["predicted"] == {"unavailable": "the model does not fit"}


def test_a_long_model_is_lowered_with_the_numbers():
    found = as_json("--shape", "llama-2-7b", "--memory", 6, "--kv-cache-dtype", "float16")
    assert found["fits"]
    assert found["max_model_len"] < found["asked_model_len"] == 4096
    assert "lowered from 4096" in found["advice"][0]
    text = run("--shape", "llama-2-7b", "--memory", 6, "--kv-cache-dtype", "float16").stdout
    assert "users at once" in text
    assert "█" in text
    assert "no predictions: not asked for" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a model"),
        (("x", "--shape", "tiny"), "not both"),
        (("--shape", "llama-9-7b"), "did you mean"),
        (("--shape", "tiny", "--gpu", "voodoo"), "known are T4"),
        (("--shape", "tiny", "--gpu", "rtx"), "could be"),
        (("--shape", "tiny", "--gpu", "t4", "--memory", 15), "more than the 14.6 GiB"),
        (("--shape", "tiny", "--memory", 0), "memory=0"),
        (("--shape", "tiny", "--kv-cache-dtype", "fp8"), "use one of float16, int8, int4"),
        (("--shape", "tiny", "--dtype", "bfloat16"), "no bfloat16"),
        (("--shape", "tiny", "--dtype", "float32"), "not served on a GPU"),
        (("--shape", "tiny", "--block-size", 24), "block_size=24, must be a power of two"),
        (("--shape", "tiny", "--max-num-seqs", 0), "max_num_seqs=0"),
        (("--shape", "tiny", "--gpu-memory-utilization", 1.5), "gpu_memory_utilization"),
        (("--shape", "tiny", "--lm-head-dtype", "fp4"), "lm_head_dtype"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(QEngineError, match=r"config\.json"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["t4", "Tesla T4", "RTX 2060", "rtx2060", "2060", "NVIDIA GeForce RTX 2060", "a100"])
def test_cards_by_the_names_people_use(name):
    assert find_card(name).name in ("T4", "RTX 2060", "A100 40GB")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository, org/model, whose files are a folder's; what is read of its weights is counted."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils._safetensors import SafetensorsFileMetadata
    from huggingface_hub.utils._safetensors import TensorInfo as HubTensor

    source, cache, read = tmp_path / "source", tmp_path / "cache", []
    cache.mkdir()

    def missing(model):
        error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        Exception.__init__(error, f"404: no {model}")
        return error

    def download(model, name, revision=None):
        if model != "org/model":
            raise missing(model)
        if not (source / name).is_file():
            error = EntryNotFoundError.__new__(EntryNotFoundError)
            Exception.__init__(error, name)
            raise error
        (cache / name).write_bytes((source / name).read_bytes())
        return str(cache / name)

    def metadata(self, model, revision=None):
        files = {}
        for file in source.glob("*.safetensors"):
            data = file.read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            header.pop("__metadata__", None)
            tensors = {n: HubTensor(e["dtype"], e["shape"], tuple(e["data_offsets"])) for n, e in header.items()}
            files[file.name] = SafetensorsFileMetadata({}, tensors)
        return type("Found", (), {"files_metadata": files})

    def cat(self, path, start, end):
        read.append(end - start)
        assert path.startswith("org/model/")
        return (source / path.removeprefix("org/model/")).read_bytes()[start:end]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", metadata)
    monkeypatch.setattr(huggingface_hub.HfFileSystem, "cat_file", cat)
    return source, read


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_a_model_on_the_hub_is_planned_from_its_headers(hub, kind):
    import shutil

    source, read = hub
    if kind == "awq":
        from qengine.random_model import write_random_model

        write_random_model("tiny", source)
    else:
        from vectors import vector_path

        shutil.copytree(vector_path("gptqmodel-gptq-w4-g64-sym-descact"), source)
    remote = as_json("org/model", "--gpu", "t4", "--max-model-len", 64)
    local = as_json(source, "--gpu", "t4", "--max-model-len", 64)
    assert remote.pop("model") == "org/model"
    assert local.pop("model") == str(source)
    assert remote == local
    assert sum(read) < sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert (sum(read) == 0) == (kind == "awq"), "only what the format's reader looks at is fetched"


def test_a_hub_id_that_is_not_there(hub):
    with pytest.raises(QEngineError, match=r"org/other: no such folder here, and its headers .*404: no org/other"):
        run("org/other")


def test_large_tensors_are_never_fetched(hub, monkeypatch):
    from qengine.plan import remote
    from qengine.random_model import write_random_model

    source, _ = hub
    write_random_model("tiny", source)
    store = remote.open_headers("org/model").tensors
    small = store.load("model.norm.weight")
    assert torch.equal(small, open_checkpoint(source).tensors.load("model.norm.weight"))
    monkeypatch.setattr(remote, "MOST_BYTES", 1000)
    with pytest.raises(QEngineError, match="hf download org/model"):
        store.load("model.embed_tokens.weight")


def test_the_cache_is_no_larger_than_it_can_be_used():
    found = as_json("--shape", "tiny", "--gpu", "t4", "--max-model-len", 100, "--max-num-seqs", 3)
    assert found["cache"]["int8"]["tokens"] == 3 * 112
