"""Conversations to ids with one BOS, and what a cache holds of them already."""

import logging
from typing import cast

import pytest
from tiny_chat import tiny_config, tiny_params, tiny_tokenizer
from tokenizers import processors

from sparse_jax.caches import Dense, fork
from sparse_jax.chat import encode_chat, encode_text, new_part
from sparse_jax.generation import generate
from sparse_jax.prompts import pad_prompts
from sparse_jax.sampling import SamplingParams

CONFIG = tiny_config(num_layers=1)
MESSAGES = [{"role": "user", "content": "one two three"}]


def with_bos():
    """The tiny tokenizer, made to put a BOS in front of whatever it encodes."""
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("template_writes_bos", [False, True])
def test_exactly_one_bos(template_writes_bos):
    tokenizer = with_bos()
    bos = cast(int, tokenizer.bos_token_id)
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = "{{ bos_token }}" + plain if template_writes_bos else plain
    ids = encode_chat(tokenizer, MESSAGES)
    assert ids[0] == bos and ids.count(bos) == 1
    text = encode_text(tokenizer, "one two three")
    assert text[0] == bos and text.count(bos) == 1


def test_no_template_and_no_text_are_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="no message"):
        encode_chat(tokenizer, [])
    with pytest.raises(ValueError, match="the text is empty"):
        encode_text(tokenizer, "")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(tokenizer, MESSAGES)


def run(prompt, cache):
    tokens, lengths = pad_prompts([prompt])
    capacity = 96 if isinstance(cache, Dense) else None
    return generate(PARAMS, tokens, lengths, config=CONFIG, cache=cache, capacity=capacity,
                    sampling=SamplingParams(max_new_tokens=4, eos_ids=()))  # fmt: skip


PARAMS = tiny_params(CONFIG)


def test_a_turn_feeds_only_what_the_cache_lacks(caplog):
    first = run([5, 6, 7, 8, 9], Dense(page=16))
    held = [5, 6, 7, 8, 9, *first.tokens[0].tolist()]
    with caplog.at_level(logging.WARNING):
        cache, fed = new_part(fork(first.cache), [*held, 11, 12])
    assert fed == [11, 12] and not caplog.records
    assert (run(fed, cache).tokens == run([*held, 11, 12], Dense(page=16)).tokens).all()


@pytest.mark.parametrize("at", [3, 7])
def test_an_edited_conversation_reuses_the_common_prefix_and_says_so(caplog, at):
    first = run([5, 6, 7, 8, 9], Dense(page=16))
    held = [5, 6, 7, 8, 9, *first.tokens[0].tolist()]
    edited = [*held[:at], (held[at] + 1) % CONFIG.vocab_size, 11, 12]
    with caplog.at_level(logging.WARNING):
        cache, fed = new_part(first.cache, edited)
    assert fed == edited[at:]
    assert f"at token {at} of 9 held; reusing the first {at}" in caplog.text
    assert cache is not None and cache.lengths.tolist() == [at]
    assert (run(fed, cache).tokens == run(edited, Dense(page=16)).tokens).all()


def test_a_conversation_the_cache_holds_whole_feeds_its_last_token_again(caplog):
    first = run([5, 6, 7, 8, 9], Dense(page=16))
    with caplog.at_level(logging.WARNING):
        cache, fed = new_part(first.cache, [5, 6, 7])
    assert fed == [7]
    assert (run(fed, cache).tokens == run([5, 6, 7], Dense(page=16)).tokens).all()
