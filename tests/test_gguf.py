"""GGUF models: values against transformers and against definitions, and every way to be wrong."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf_blocks
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from checkpoints import CheckpointError, keys
from checkpoints.gguf import read_gguf
from checkpoints.gguf_file import read_header

GOLDEN = Path(__file__).parent / "golden" / "smollm2_gguf_sha256.json"


def assert_same(params, tree):
    """Equal trees: structure, dtype, every bit."""
    assert jax.tree.structure(params) == jax.tree.structure(tree)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(tree), strict=True
    ):
        assert isinstance(got, jax.Array)
        assert got.dtype == want.dtype and got.shape == want.shape, path
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=str(path))


# The real model


def test_demo_weights_equal_what_transformers_reads(demo_gguf):
    config, params = read_gguf(demo_gguf)
    expected = json.loads(GOLDEN.read_text())["sha256"]
    found = {}
    for entry in keys.table(config):
        leaf = params
        for name in entry.path:
            leaf = leaf[name]
        values = np.asarray(leaf)
        assert values.dtype == np.float32
        values = np.ascontiguousarray(values.T if entry.transpose else values)
        found[entry.key] = hashlib.sha256(values.tobytes()).hexdigest()
    assert found == expected


def test_demo_config(demo_gguf):
    header = read_header(demo_gguf)
    assert len(header.tensors) == 272
    config, _ = read_gguf(demo_gguf, dtype=jnp.bfloat16)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


MEASURE = """
import re, sys
import jax, numpy as np
from checkpoints.gguf import read_gguf
jax.device_put(np.zeros(4, np.float32)).block_until_ready()
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
_, params = read_gguf(sys.argv[1])
print((peak() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_stays_below_1_2_of_the_result(demo_gguf):
    """In a process of its own; what Python and JAX held before the call is not counted, the header
    with its 49152 tokens and 48900 merges is."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(demo_gguf)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    ratio = float(ran.stdout)
    assert 1.0 <= ratio < 1.2, ratio  # below 1 the measurement itself would be broken


# Layout


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("arch", "bias", "qk_norm"),
    [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_tree_comes_back(tmp_path, arch, bias, qk_norm, tied):
    tree = gguf_files.random_tree(bias=bias, qk_norm=qk_norm, tied=tied)
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.gguf_tensors(tree, arch), arch=arch)
    config, params = read_gguf(file)
    assert_same(params, tree)
    assert config["model_type"] == arch
    assert config["tie_word_embeddings"] is tied
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)


def test_llama_with_biases_on_all_projections(tmp_path):
    tree = gguf_files.random_tree(bias=True)
    tensors = gguf_files.gguf_tensors(tree)
    rng = np.random.default_rng(1)
    for i in range(gguf_files.LAYERS):
        bias = rng.standard_normal(gguf_files.HIDDEN).astype(np.float32)
        tensors[f"blk.{i}.attn_output.bias"] = tree[f"layer_{i}"]["attention"]["output"]["bias"] = (
            bias
        )
    config, params = read_gguf(gguf_files.write(tmp_path / "m.gguf", tensors))
    assert config["attention_bias"] is True and config["mlp_bias"] is False
    assert_same(params, tree)


def test_an_output_equal_to_the_embedding_stays_a_leaf_of_its_own(tmp_path):
    tree = gguf_files.random_tree(tied=False)
    tree["lm_head"]["kernel"] = np.ascontiguousarray(tree["embedding"]["embedding"].T)
    config, params = read_gguf(gguf_files.write(tmp_path / "m.gguf", gguf_files.gguf_tensors(tree)))
    assert config["tie_word_embeddings"] is False
    assert_same(params, tree)


# Tensor types


@pytest.mark.parametrize("kind", list(gguf_blocks.SIZES), ids=lambda kind: kind.name)
def test_block_formats_follow_their_definition(tmp_path, kind):
    """Random bits in four tensors (one of them permuted), decoded by the reference beside it."""
    tree = gguf_files.random_tree()
    tensors, types = gguf_files.gguf_tensors(tree), {}
    for name in ("token_embd", "blk.0.attn_q", "blk.0.ffn_down", "blk.1.attn_v"):
        name += ".weight"
        rows, width = tensors[name].shape
        block_bytes, block = gguf_blocks.SIZES[kind]
        blocks = gguf_blocks.random_blocks(kind, rows * width // block, seed=len(types))
        values = gguf_blocks.decode(kind, blocks).reshape(rows, width)
        tensors[name], types[name] = blocks.reshape(rows, width // block * block_bytes), kind
        if name.startswith("token"):
            tree["embedding"]["embedding"] = values
        elif name.endswith("attn_q.weight"):
            back = np.empty_like(values)
            back[gguf_files.permuted(np.arange(rows))] = values
            tree["layer_0"]["attention"]["query"]["kernel"] = back.T
        elif name.endswith("ffn_down.weight"):
            tree["layer_0"]["mlp"]["down"]["kernel"] = values.T
        else:
            tree["layer_1"]["attention"]["value"]["kernel"] = values.T
    _, params = read_gguf(gguf_files.write(tmp_path / "m.gguf", tensors, types=types))
    assert_same(params, tree)


# Half a step of each format, as a share of the largest magnitude in a block of 32.
HALF_STEP = {
    Type.Q8_0: 0.5 / 127,
    Type.Q4_0: 1 / 8,  # 16 steps from -max to 7/8 of it: the far end is off by a whole one
    Type.Q4_1: 1 / 15,
    Type.Q5_0: 1 / 16,
    Type.Q5_1: 1 / 31,
}


@pytest.mark.parametrize("kind", list(HALF_STEP), ids=lambda kind: kind.name)
def test_quantised_values_come_back_within_half_a_step(tmp_path, kind):
    tree = gguf_files.random_tree()
    tensors, types = gguf_files.gguf_tensors(tree), {}
    for name, values in tensors.items():
        if values.ndim == 2:
            tensors[name], types[name] = quants.quantize(np.ascontiguousarray(values), kind), kind
    _, params = read_gguf(gguf_files.write(tmp_path / "m.gguf", tensors, types=types))
    for i in range(gguf_files.LAYERS):
        for name in ("query", "key", "value", "output"):
            want = tree[f"layer_{i}"]["attention"][name]["kernel"].T
            got = np.asarray(params[f"layer_{i}"]["attention"][name]["kernel"]).T
            blocks = (len(want), -1, 32)
            largest = np.abs(want.reshape(blocks)).max(-1, keepdims=True)
            off = np.abs(got - want).reshape(blocks) / largest
            # A float16 scale or minimum is off by up to 2^-11 of itself, at the largest value.
            assert 0 < off.max() <= HALF_STEP[kind] + 2**-10


@pytest.mark.parametrize(("stored", "kind"), [(np.float16, "float16"), (jnp.bfloat16, "bfloat16")])
def test_sixteen_bit_floats_keep_their_bits(tmp_path, stored, kind):
    tree = gguf_files.random_tree(tied=False)
    cast = jax.tree.map(lambda x: x if x.ndim == 1 else np.asarray(x).astype(stored), tree)
    tensors = gguf_files.gguf_tensors(cast)
    _, params = read_gguf(gguf_files.write(tmp_path / "m.gguf", tensors))
    assert params["layer_0"]["mlp"]["up"]["kernel"].dtype == kind
    assert params["final_norm"]["scale"].dtype == "float32"  # as the file has it
    assert_same(params, cast)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.float32])
def test_an_explicit_dtype_holds_for_every_leaf(tmp_path, dtype):
    tree = gguf_files.random_tree()
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.gguf_tensors(tree))
    _, params = read_gguf(file, dtype=dtype)
    assert_same(params, jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), tree))


# RoPE scaling


def scaling_of(tmp_path, changes, freqs=None, arch="llama"):
    tensors = gguf_files.gguf_tensors(gguf_files.random_tree(bias=arch == "qwen2"), arch)
    if freqs is not None:
        tensors["rope_freqs.weight"] = freqs
    values = gguf_files.metadata(arch, **changes)
    return read_gguf(gguf_files.write(tmp_path / "m.gguf", tensors, values, arch=arch))[0]


def test_linear_scaling_new_and_old_spelling(tmp_path):
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    want = {"rope_type": "linear", "factor": 4.0}
    assert scaling_of(tmp_path, changes)["rope_scaling"] == want
    assert scaling_of(tmp_path, {"llama.rope.scale_linear": 4.0})["rope_scaling"] == want
    assert scaling_of(tmp_path, {"llama.rope.scale_linear": 1.0})["rope_scaling"] is None
    assert scaling_of(tmp_path, {"llama.rope.scaling.type": "none"})["rope_scaling"] is None


def test_yarn_scaling(tmp_path):
    prefix = "qwen2.rope.scaling."
    changes = {
        f"{prefix}type": "yarn",
        f"{prefix}factor": 4.0,
        f"{prefix}original_context_length": 32,
    }
    want = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert scaling_of(tmp_path, changes, arch="qwen2")["rope_scaling"] == want
    changes |= {f"{prefix}attn_factor": 0.5, f"{prefix}yarn_beta_fast": 16.0}
    got = scaling_of(tmp_path, changes, arch="qwen2")["rope_scaling"]
    # The file's factor comes on top of YaRN's 0.1 ln(4) + 1.
    assert got == want | {"attention_factor": 0.5 * (0.1 * np.log(4.0) + 1.0), "beta_fast": 16.0}


def llama3_freqs(theta, factor, low, high, original, head_dim=gguf_files.HEAD_DIM):
    """Divisors as model converters compute them, in float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    divisors = []
    for frequency in np.float32(1.0) / np.float32(theta) ** exponents:
        wavelength = 2 * np.pi / float(frequency)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("factor", "high", "original"), [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (4.0, 8.0, 4096)]
)
def test_llama3_scaling_is_derived_exactly(tmp_path, factor, high, original):
    freqs = llama3_freqs(500000.0, factor, 1.0, high, original)
    got = scaling_of(tmp_path, {"llama.rope.freq_base": 500000.0}, freqs)["rope_scaling"]
    assert got == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def test_other_rope_factors_are_refused(tmp_path):
    theta = {"llama.rope.freq_base": 500000.0}
    good = llama3_freqs(500000.0, 8.0, 1.0, 4.0, 8192)
    middle = int(np.flatnonzero((good > 1.01) & (good < 7.9))[0])
    bent = good.copy()
    bent[middle] *= 1.001
    for freqs in (bent, np.ones_like(good), good[:-1], -good, good * np.nan):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            scaling_of(tmp_path, theta, freqs)
    with pytest.raises(CheckpointError, match="both"):
        linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
        scaling_of(tmp_path, theta | linear, good)


# Bad input: each refused by name, and never with anything but the errors stated


@pytest.fixture
def good(tmp_path):
    return gguf_files.write(
        tmp_path / "good.gguf", gguf_files.gguf_tensors(gguf_files.random_tree())
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": None}, r"lacks 'llama\.block_count'"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"llama.embedding_length": "wide"}, r"llama\.embedding_length' should be int"),
        ({"llama.attention.head_count": [4, 2]}, "head_count' should be int"),
        ({"llama.attention.head_count_kv": 3}, "fit no model"),
        ({"llama.rope.dimension_count": 32}, "dimension_count 32"),
        ({"llama.attention.value_length": 32}, "value_length 32"),
        ({"llama.attention.key_length": 32}, "dimension_count 64"),
        ({"llama.vocab_size": 33}, "33 tokens"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.logit_scale": 8.0}, "logit_scale"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
         "original_context_length"),
        ({"llama.rope.scaling.factor": 2.0}, "type is not"),
        ({"split.count": 3}, "split"),
        ({"general.alignment": 48}, "48 is no power of two"),
        ({"llama.feed_forward_length": 256}, r"blk\.0\.ffn_down\.weight"),
        ({"llama.block_count": 3}, r"missing.*blk\.2\.attn_k\.weight"),
        ({"llama.block_count": 1}, r"not in this model.*blk\.1\.attn_k\.weight"),
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit(tmp_path, change, message):
    tensors = gguf_files.gguf_tensors(gguf_files.random_tree())
    file = gguf_files.write(tmp_path / "m.gguf", tensors, gguf_files.metadata(**change))
    with pytest.raises(CheckpointError, match=message):
        read_gguf(file)


def test_unknown_architecture(tmp_path):
    tensors = gguf_files.gguf_tensors(gguf_files.random_tree())
    file = gguf_files.write(tmp_path / "m.gguf", tensors, arch="gemma3")
    with pytest.raises(CheckpointError, match="architecture 'gemma3' is not supported"):
        read_gguf(file)


def test_missing_and_left_over_tensors(tmp_path):
    tensors = gguf_files.gguf_tensors(gguf_files.random_tree())
    extra = tensors | {"rope_factors_long.weight": np.ones(32, np.float32)}
    with pytest.raises(CheckpointError, match=r"not in this model.*rope_factors_long\.weight"):
        read_gguf(gguf_files.write(tmp_path / "extra.gguf", extra))
    for name in tensors:
        less = {other: data for other, data in tensors.items() if other != name}
        with pytest.raises(CheckpointError, match=name):
            read_gguf(gguf_files.write(tmp_path / "less.gguf", less))


def test_unsupported_tensor_type(tmp_path):
    tensors = gguf_files.gguf_tensors(gguf_files.random_tree())
    name = "blk.1.attn_v.weight"
    tensors[name] = np.zeros((128, 256 // 32 * 18), np.uint8)
    file = gguf_files.write(tmp_path / "m.gguf", tensors, types={name: Type.IQ4_NL})
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_v\.weight.*IQ4_NL"):
        read_gguf(file)


@pytest.mark.parametrize("dtype", ["int8", np.int32, "float64", "nonsense"])
def test_wrong_dtype(good, dtype):
    with pytest.raises(ValueError, match="dtype"):
        read_gguf(good, dtype=dtype)


def test_wrong_beginnings(tmp_path, good):
    data = good.read_bytes()
    for start, message in (
        (b"GGML", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack("<I", 4), "version 4"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(start + data[len(start) :])
        with pytest.raises(CheckpointError, match=message):
            read_gguf(bad)
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "absent.gguf")


def test_every_truncation_is_named(tmp_path, good):
    data = good.read_bytes()
    header_end = min(info.offset for info in read_header(good).tensors.values())
    cuts = [*range(0, header_end, 7), header_end, len(data) // 2, len(data) - 1]
    bad = tmp_path / "cut.gguf"
    for cut in cuts:
        bad.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"cut short|not a GGUF file"):
            read_gguf(bad)


def test_damaged_headers_give_no_other_error(good):
    """A byte of the header replaced, 300 times: refused as a checkpoint, or read (a name or a
    number can change and stay possible)."""
    header_end = min(info.offset for info in read_header(good).tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    with good.open("r+b", buffering=0) as file:

        def replace(at: int, new: bytes) -> bytes:
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(new)
            return was

        for at in rng.integers(0, header_end, 300).tolist():
            was = replace(at, rng.bytes(1))
            try:
                read_gguf(good)
            except CheckpointError:
                refused += 1
            replace(at, was)
    read_gguf(good)
    assert refused > 200


def test_a_tensor_or_key_given_twice(tmp_path, good):
    data = good.read_bytes()
    bad = tmp_path / "twice.gguf"
    bad.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight' occurs twice"):
        read_gguf(bad)
    bad.write_bytes(data.replace(b"llama.embedding_length", b"llama.context_length\0\0"))
    with pytest.raises(CheckpointError, match="context_length"):
        read_gguf(bad)
