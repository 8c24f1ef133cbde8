"""A chat model small enough for any test: random parameters, one token for each byte of text."""

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparse_jax.config import ModelConfig
from sparse_jax.model import Params, init_params

BOS_ID = 256
SPECIAL = ("<bos>", "<eos>", "<turn>")
TEMPLATE = (
    "<bos>{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """259 ids: the 256 bytes, then `SPECIAL`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, turn = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, extra_special_tokens=[turn]
    )
    if chat:
        fast.chat_template = TEMPLATE
    return fast


def tiny_config(**overrides) -> ModelConfig:
    return ModelConfig.tiny(**{"vocab_size": 259, "bos_id": 256, "eos_ids": (257,)} | overrides)


def tiny_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random float32 parameters, large enough for probabilities that differ between tokens."""
    params = init_params(jax.random.key(seed), config, jnp.float32)
    return jax.tree.map(lambda leaf: leaf * (3.0 if leaf.ndim == 2 else 1.0), params)
