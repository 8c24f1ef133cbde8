"""The Llama family as linen modules: structure only, used through `apply`, no hidden collections.

The one file that imports Flax. Parameters are a plain nested dict; the cache is an argument and a
result. Hidden states are `[B, T, E]` in the parameters' dtype; norms, softmax, RoPE angles and
logits are float32.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from sparse_jax.caches.base import CacheMethod, Projections, Span
from sparse_jax.config import ModelConfig
from sparse_jax.rope import apply_rope, rope_tables

Params = dict[str, Any]


class Attention(nn.Module):
    """Projections, RoPE and the output product; what is attended to is the method's affair."""

    config: ModelConfig
    layer: int
    dtype: Any

    def setup(self):
        config, dtype = self.config, self.dtype
        width = {"query": config.num_heads, "key": config.num_kv_heads}
        width["value"] = config.num_kv_heads
        for name, heads in width.items():
            features = heads * config.head_dim
            setattr(self, name, _dense(features, config.qkv_bias, dtype))
        self.output = _dense(config.hidden_size, config.output_bias, dtype)
        if config.qk_norm:
            self.query_norm = _norm(config, dtype)
            self.key_norm = _norm(config, dtype)

    def __call__(self, x, cos, sin, method: CacheMethod, state, span: Span, decode: bool):
        config = self.config
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, config.head_dim)
        query = self.query(x).reshape(heads)
        key = self.key(x).reshape(heads)
        value = self.value(x).reshape(heads)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        projected = Projections(
            query=apply_rope(query, cos, sin),
            key=apply_rope(key, cos, sin),
            raw_key=key,
            value=value,
        )
        attend = method.decode if decode else method.prefill
        out, state = attend(config, state, self.layer, projected, span)
        return self.output(out.reshape(batch, tokens, -1)), state


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    config: ModelConfig
    dtype: Any

    def setup(self):
        config, dtype = self.config, self.dtype
        for name in ("gate", "up", "down"):
            features = config.hidden_size if name == "down" else config.intermediate_size
            setattr(self, name, _dense(features, config.mlp_bias, dtype))

    def __call__(self, x):
        return self.down(nn.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer: pre-norm attention and MLP, each added to the residual stream."""

    config: ModelConfig
    layer: int
    dtype: Any

    def setup(self):
        self.attention_norm = _norm(self.config, self.dtype)
        self.attention = Attention(self.config, self.layer, self.dtype)
        self.mlp_norm = _norm(self.config, self.dtype)
        self.mlp = MLP(self.config, self.dtype)

    def __call__(self, x, cos, sin, method, state, span, decode):
        added, state = self.attention(self.attention_norm(x), cos, sin, method, state, span, decode)
        x = x + added
        return x + self.mlp(self.mlp_norm(x)), state


class Llama(nn.Module):
    """Token ids to hidden states (`__call__`), hidden states to logits (`logits`)."""

    config: ModelConfig
    dtype: Any

    def setup(self):
        config, dtype = self.config, self.dtype
        self.embedding = nn.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype
        )
        # linen names the list's modules layer_0, layer_1, ...
        self.layer = [Block(config, index, dtype) for index in range(config.num_layers)]
        self.final_norm = _norm(config, dtype)
        if not config.tie_embeddings:
            self.lm_head = _dense(config.vocab_size, False, dtype, dot=_float32_dot)

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        span: Span,
        method: CacheMethod,
        state: Any,
        rope_lengths: Int32[Array, " B"] | None,
        decode: bool,
    ) -> tuple[Float[Array, "B T E"], Any]:
        x = self.embedding(tokens)
        positions = span.starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        cos, sin = rope_tables(self.config, positions, rope_lengths)
        for block in self.layer:
            x, state = block(x, cos, sin, method, state, span, decode)
        return self.final_norm(x), method.advance(self.config, state, span.counts)

    def logits(self, x: Float[Array, "*batch E"]) -> Float32[Array, "*batch V"]:
        if self.config.tie_embeddings:
            table = self.embedding.embedding  # V E
            return _float32_dot(x, table, (((x.ndim - 1,), (1,)), ((), ())))
        return self.lm_head(x)

    def everything(self, tokens, span, method, state, rope_lengths):
        """Touches every parameter: what linen's `init` needs to see."""
        x, state = self(tokens, span, method, state, rope_lengths, False)
        return self.logits(x)


def _dense(features: int, bias: bool, dtype: Any, dot: Any = None) -> nn.Dense:
    return nn.Dense(
        features, use_bias=bias, dtype=dtype, param_dtype=dtype, dot_general=dot or _dot
    )


def _norm(config: ModelConfig, dtype: Any) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=config.rms_eps, dtype=dtype, param_dtype=dtype)


def _dot(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, **_):
    """`lax.dot_general`, but for one row of 16-bit numbers on a CPU.

    There XLA widens the whole weight matrix to float32 first, in a copy; two rows go to a kernel
    that reads 16-bit weights as they are (2 to 3.5 times faster, measured).
    """

    def plain(lhs, rhs):
        return jax.lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
        )

    def two_rows(lhs, rhs):
        return plain(jnp.concatenate([lhs, lhs]), rhs)[:1]

    if lhs.dtype.itemsize != 2 or math.prod(lhs.shape[:-1]) != 1:
        return plain(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cpu=two_rows, default=plain)


# bf16 weights, float32 logits: the product's accumulator isn't rounded on its way out.
_float32_dot = functools.partial(_dot, preferred_element_type=jnp.float32)


def hidden_states(
    params: Params,
    tokens: Int32[Array, "B T"],
    span: Span,
    state: Any,
    *,
    config: ModelConfig,
    method: CacheMethod,
    decode: bool,
    rope_lengths: Int32[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T E"], Any]:
    """Runs one chunk through all layers: final hidden states and the method's new state. Pure."""
    check_params(params, config)  # once a compile, since it looks at shapes only
    module = Llama(config, params_dtype(params))
    return module.apply(  # type: ignore[return-value]
        {"params": params}, tokens, span, method, state, rope_lengths, decode
    )


def logits_of(
    params: Params, hidden: Float[Array, "*batch E"], *, config: ModelConfig
) -> Float32[Array, "*batch V"]:
    """The output layer, float32. Pure."""
    module = Llama(config, params_dtype(params))
    return module.apply({"params": params}, hidden, method="logits")  # type: ignore[return-value]


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """The parameter tree as ShapeDtypeStructs, for initialising, restoring and compiling alike."""
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype))


def init_params(key: Array, config: ModelConfig, dtype: Any) -> Params:
    """Random parameters (linen's default initialisers; norms 1, biases 0)."""
    # Imported here: caches sit above the kernels, and only initialisation needs this one.
    from sparse_jax.caches.uncached import Uncached

    method = Uncached()
    one = jnp.ones(1, jnp.int32)
    variables = Llama(config, jnp.dtype(dtype)).init(
        key,
        jnp.zeros((1, 1), jnp.int32),
        Span(starts=0 * one, counts=one),
        method,
        method.init(config, 1, 1, dtype),
        one,
        method="everything",
    )
    return dict(variables["params"])


def check_params(params: Params, config: ModelConfig) -> None:
    """Demands the tree that the config describes: linen would ignore what it doesn't look for.

    Raises:
        ValueError: a leaf is missing, too many, or of another shape; the message has its path.
    """
    # Layers are alike, so that one is enough to know the shapes of all.
    small = dataclasses.replace(config, num_layers=1, windows=(None,))
    shapes = _shapes(abstract_params(small, jnp.float32))
    expected = {}
    for path, shape in shapes.items():
        first, _, rest = path.partition("/")
        names = [first]
        if first == "layer_0":
            names = [f"layer_{index}" for index in range(config.num_layers)]
        expected |= {f"{name}/{rest}": shape for name in names}
    found = _shapes(params)
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"params: {path} is {found.get(path, 'missing')}, and the config wants "
                f"{expected.get(path, 'none')}; give the config that belongs to the parameters"
            )


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(entry.key) for entry in path): leaf.shape for path, leaf in leaves}


def params_dtype(params: Params) -> Any:
    """The one dtype of all parameters.

    Raises:
        TypeError: they differ, or aren't float32, bfloat16 or float16.
    """
    dtypes = {jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(params)}
    allowed = {jnp.dtype(each) for each in (jnp.float32, jnp.bfloat16, jnp.float16)}
    if len(dtypes) != 1 or not dtypes <= allowed:
        listed = ", ".join(sorted(str(each) for each in dtypes))
        raise TypeError(
            f"params hold {listed or 'nothing'}; all must share one of float32, bfloat16, float16 "
            "(load_model(path, dtype=...) converts)"
        )
    return dtypes.pop()
