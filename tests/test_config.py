"""Reading and writing config.json: real models' files, transformers' own, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden.cases import MODELS

from checkpoints import keys
from sparse_jax.config import FAMILIES, ConfigError, ModelConfig, RopeConfig

SAVED = json.loads((Path(__file__).parent / "golden" / "models.json").read_text())
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}


def hf(family: str = "llama", **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **fields}


def read(family: str = "llama", **fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf(family, **fields))


# The files as published, abridged to what is read, and to what is peculiar in each.
LLAMA2 = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA32 = {
    **LLAMA31, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "tie_word_embeddings": True,
    "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0},
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

# config.json, some of what it means
REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 2": (
        LLAMA2,
        {"num_kv_heads": 32, "head_dim": 128, "rope": RopeConfig(), "eos_ids": (2,)},
    ),
    "Llama 3.1": (
        LLAMA31,
        {
            "eos_ids": (128001, 128008, 128009),
            "tie_embeddings": False,
            "rope": RopeConfig(
                500000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
            ),
        },
    ),
    "Llama 3.2": (LLAMA32, {"head_dim": 64, "tie_embeddings": True, "num_layers": 16}),
    "SmolLM2": (
        SMOLLM2,
        {
            "num_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 64,
            "rope": RopeConfig(theta=100000),
            "tie_embeddings": True,
            "pad_id": 2,
        },
    ),
    "Mistral 0.1": (MISTRAL, {"windows": (4096,) * 32, "qkv_bias": False}),
    "Mistral 0.3": ({**MISTRAL, "sliding_window": None}, {"windows": (None,) * 32}),
    "Qwen2.5": (
        QWEN25,
        {"qkv_bias": True, "output_bias": False, "windows": (None,) * 24, "head_dim": 64},
    ),
    "Qwen2.5, long": (
        {
            **QWEN25,
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            },
        },
        {"rope": RopeConfig(1000000.0, "yarn", 4.0, 32768)},
    ),
    "Qwen3": (
        QWEN3,
        {"qk_norm": True, "qkv_bias": False, "head_dim": 128, "max_positions": 40960},
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_published_configs(name):
    config, expected = REAL[name]
    before = json.dumps(config)
    ours = ModelConfig.from_hf(config)
    assert {field: getattr(ours, field) for field in expected} == expected
    assert json.dumps(config) == before  # transformers writes into the dicts it reads
    assert ModelConfig.from_hf(ours.to_hf()) == ours
    assert hash(ours) == hash(ModelConfig.from_hf(dict(config)))


@pytest.mark.parametrize("name", MODELS)
def test_new_spelling_means_the_same(name):
    """What transformers 5 saves (rope_parameters, layer_types) equals what it was made from."""
    ours = ModelConfig.from_hf(MODELS[name][1])
    assert ModelConfig.from_hf(SAVED[name]) == ours
    assert ModelConfig.from_hf(ours.to_hf()) == ours


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(transformers, family):
    theirs = transformers.AutoConfig.for_model(family, **SIZES)
    ours = read(family)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert ours.head_dim == getattr(theirs, "head_dim", 256 // 32)
    assert set(ours.windows) == {theirs.sliding_window if family == "mistral" else None}
    # And so are those that the table of tensors assumes.
    assert keys.head_sizes(hf(family)) == (ours.num_heads, ours.num_kv_heads, ours.head_dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_transformers_writes_is_known(transformers, family):
    theirs = transformers.AutoConfig.for_model(family, **SIZES)
    for whole in (True, False):
        written = json.loads(theirs.to_json_string(use_diff=not whole))
        assert ModelConfig.from_hf(written) == read(family)


YARN = RopeConfig(kind="yarn", factor=4.0, original_max_positions=32, mscale=1.0, truncate=False)
TO_WRITE = {
    "llama": ModelConfig.tiny(bos_id=1, eos_ids=(2, 3), pad_id=0),
    "llama biases": ModelConfig.tiny(qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama tied, head_dim": ModelConfig.tiny(head_dim=32, tie_embeddings=True, eos_ids=(2,)),
    "llama dynamic": ModelConfig.tiny(rope=RopeConfig(kind="dynamic", factor=2.0)),
    "mistral": ModelConfig.tiny(family="mistral", windows=(8, 8)),
    "mistral, odd sizes": ModelConfig.tiny(family="mistral", num_heads=6, rope=YARN),
    "qwen2": ModelConfig.tiny(family="qwen2", head_dim=32),
    "qwen2 windows": ModelConfig.tiny(family="qwen2", num_layers=4, windows=(None, None, 8, 8)),
    "qwen2 mixed": ModelConfig.tiny(family="qwen2", num_layers=3, windows=(8, None, 8)),
    "qwen3": ModelConfig.tiny(family="qwen3", windows=(8, 8)),
    "qwen3 bias": ModelConfig.tiny(family="qwen3", qkv_bias=True, output_bias=True),
}


@pytest.mark.parametrize("name", TO_WRITE)
def test_transformers_reads_what_we_write(transformers, name):
    ours = TO_WRITE[name]
    written = json.loads(json.dumps(ours.to_hf()))
    assert written["architectures"] == [f"{ours.family.capitalize()}ForCausalLM"]
    theirs = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    assert ModelConfig.from_hf(json.loads(theirs.to_json_string())) == ours
    assert theirs.head_dim == ours.head_dim
    if ours.rope.kind != "default":
        assert theirs.rope_parameters["rope_type"] == ours.rope.kind
        assert theirs.rope_parameters["factor"] == ours.rope.factor


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (ModelConfig.tiny(windows=(8, 8)), "windows"),
        (ModelConfig.tiny(qkv_bias=True), "output_bias"),
        (ModelConfig.tiny(qk_norm=True), "qk_norm"),
        (ModelConfig.tiny(family="mistral", windows=(8, None)), "windows"),
        (ModelConfig.tiny(family="mistral", mlp_bias=True), "mlp_bias"),
        (ModelConfig.tiny(family="qwen2", windows=(8, 9)), "windows"),
        (ModelConfig.tiny(family="qwen2", qkv_bias=False), "qkv_bias"),
        (ModelConfig.tiny(rope=RopeConfig(kind="dynamic", factor=2.0)).at_context(9), "context=9"),
        (ModelConfig.tiny(num_heads=6), "num_heads"),
    ],
)
def test_what_a_family_cannot_express_is_not_written(config, named):
    with pytest.raises(ConfigError, match=named):
        config.to_hf()


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mixtral", {}, "model_type = 'mixtral': not supported.*llama, mistral, qwen2, qwen3"),
        (None, {}, "model_type = None"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'.*silu"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = .*dequantise"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
        ("llama", {"is_causal": False}, "is_causal = False"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: unknown"),
        ("llama", {"num_key_value_heads": 5}, "num_kv_heads .num_key_value_heads.* = 5.* = 32"),
        ("llama", {"num_key_value_heads": 0}, "num_kv_heads .* = 0"),
        ("llama", {"head_dim": 7}, "head_dim = 7: must be even"),
        ("llama", {"head_dim": 8.0}, "head_dim = 8.0: give an int"),
        ("llama", {"hidden_size": 250}, "does not divide hidden_size = 250.*give head_dim"),
        ("llama", {"vocab_size": "320"}, "vocab_size = '320'"),
        ("llama", {"rms_norm_eps": 0}, "rms_eps .rms_norm_eps.* = 0"),
        ("llama", {"tie_word_embeddings": None}, "tie_embeddings .tie_word_embeddings.* = None"),
        ("llama", {"attention_bias": 1}, "attention_bias = 1"),
        ("llama", {"eos_token_id": "2"}, "eos_ids .eos_token_id.* = '2'"),
        ("llama", {"eos_token_id": [2, 320]}, "= 320: not in the vocabulary of 320"),
        ("llama", {"bos_token_id": True}, "bos_id .* = True"),
        ("llama", {"pad_token_id": -1}, "pad_id .* = -1"),
        ("llama", {"sliding_window": 8}, "sliding_window = 8.*mistral"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mistral", {"attention_bias": True}, "attention_bias = True"),
        ("mistral", {"mlp_bias": True}, "mlp_bias = True"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("mistral", {"use_sliding_window": False}, "sliding_window = 4096 .the default"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types.*make them agree"),
        ("qwen2", {"attention_bias": False}, "attention_bias = False.*always"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window = 1"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers = -1"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "there is no window"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "num_hidden_layers = 3"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ("qwen3", {"rope_parameters": {"sliding_attention": None}}, "rope_parameters"),
    ],
)
def test_what_would_change_the_result_is_refused(family, fields, named):
    with pytest.raises(ConfigError, match=named):
        read(family, **fields)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "model_type"])
def test_sizes_must_be_given(key):
    config = hf()
    del config[key]
    with pytest.raises(ConfigError, match=f"no '{key}'"):
        ModelConfig.from_hf(config)


def test_windows_follow_transformers():
    windows = {"use_sliding_window": True, "sliding_window": 8}
    assert read("qwen2", **windows, max_window_layers=1).windows == (None, 8, 8)
    assert read("qwen2", **windows).windows == (None,) * 3  # 28 layers come first by default
    mixed = ["sliding_attention", "full_attention", "attention"]
    assert read("qwen3", **windows, layer_types=mixed).windows == (8, None, None)
    assert read("qwen2", sliding_window=8, max_window_layers=0).windows == (None,) * 3
    assert read("mistral", sliding_window=8).windows == (8,) * 3
    assert read("mistral", sliding_window=8, layer_types=["sliding_attention"] * 3).windows == (
        (8,) * 3
    )


def test_harmless_fields_change_nothing():
    harmless = {
        "architectures": None, "attention_dropout": 0.5, "initializer_range": 0.1,
        "use_cache": False, "torch_dtype": "float16", "dtype": "bfloat16", "_name_or_path": "x",
        "transformers_version": "4.0", "temperature": 0.6, "max_length": 20, "do_sample": True,
        "id2label": {"0": "a"}, "pruned_heads": {}, "quantization_config": None,
    }  # fmt: skip
    assert read(**harmless) == read()
    assert read(num_key_value_heads=None, head_dim=None, pretraining_tp=None) == read()


def test_every_eos_form():
    assert read(eos_token_id=None).eos_ids == ()
    assert read(eos_token_id=[]).eos_ids == ()
    assert read(eos_token_id=7).eos_ids == (7,)
    assert read(eos_token_id=[7, 9]).eos_ids == (7, 9)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"family": "gpt"}, "family .model_type.* = 'gpt'"),
        ({"num_layers": 0}, "num_layers .num_hidden_layers.* = 0"),
        ({"num_heads": 2.0}, "num_heads .* = 2.0: give an int, not float"),
        ({"num_kv_heads": 3}, "num_kv_heads .* = 3: must divide num_heads = 4"),
        ({"head_dim": 5}, "head_dim = 5"),
        ({"head_dim": 2, "rope": RopeConfig(kind="dynamic", factor=2.0)}, "head_dim = 2"),
        ({"rms_eps": float("nan")}, "rms_eps .* = nan"),
        ({"rope": {"theta": 1.0}}, "rope = .*give a RopeConfig"),
        ({"qk_norm": 1}, "qk_norm = 1: give true or false"),
        ({"windows": [None, None]}, "windows .*give a tuple"),
        ({"windows": (8,)}, "has 1 entries for num_layers = 2"),
        ({"windows": (8, 0)}, "windows .* = 0"),
        ({"bos_id": 64}, "bos_id .* = 64: not in the vocabulary of 64"),
        ({"eos_ids": 2}, "eos_ids .* = 2: give a tuple"),
        ({"eos_ids": (2, -1)}, "eos_ids .* = -1"),
        ({"layers": 3}, "layers = 3: no such field"),
    ],
)
def test_direct_construction_is_checked(overrides, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.tiny(**overrides)


def test_context_length_is_checked():
    with pytest.raises(ConfigError, match="length = 0"):
        ModelConfig.tiny().at_context(0)
    with pytest.raises(ConfigError, match="length = 1.5"):
        ModelConfig.tiny().at_context(1.5)  # pyright: ignore[reportArgumentType]


def test_configs_are_static():
    config = ModelConfig.tiny(family="qwen3")
    assert config == ModelConfig.tiny(family="qwen3") and isinstance(hash(config), int)
    assert config.qk_norm and ModelConfig.tiny(family="qwen2").qkv_bias
    assert ModelConfig.tiny(num_layers=5).windows == (None,) * 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert issubclass(ConfigError, ValueError)


def test_a_list_is_no_config():
    with pytest.raises(ConfigError, match="holds a list"):
        ModelConfig.from_hf([])  # pyright: ignore[reportArgumentType]


def test_import_is_light():
    code = (
        "import sys, sparse_jax.config; "
        "print([m for m in ('transformers', 'torch', 'orbax', 'flax') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
