"""Text and conversations to token ids, and which of them a cache holds already."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_jax.caches.base import Cache, truncate

logger = logging.getLogger(__name__)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a plain text, with a BOS exactly if the tokenizer adds one.

    Raises:
        ValueError: the text is empty, or gives no tokens.
    """
    ids = list(tokenizer(text)["input_ids"]) if text else []
    if not ids:
        raise ValueError("the text is empty: it gives no tokens")
    return ids


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, reply: bool = True
) -> list[int]:
    """Ids of a conversation by the tokenizer's chat template, with exactly one BOS at most.

    Args:
        messages: dicts with `role` and `content`.
        reply: end with the opening of the assistant's turn.

    Raises:
        ValueError: the tokenizer has no chat template, or there is no message.
    """
    if not messages:
        raise ValueError("messages: no message; give at least one")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template; use a chat model, or give the plain prompt"
        )
    # The template writes out the BOS itself where the model wants one: the tokenizer mustn't add
    # a second.
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=reply
    )
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
    if adds_bos and ids[:1] != [bos]:
        ids = [bos, *ids]
    return ids


def new_part(cache: Cache, ids: Sequence[int]) -> tuple[Cache | None, list[int]]:
    """How to go on from a cache of one row to the conversation `ids`: what to reuse and feed.

    Where `ids` starts with all that the cache holds, that is the cache and the rest of `ids`.
    Where they part earlier (an edited message, or an answer that encodes differently when read
    back) only the common prefix is reused, which is reported as a warning; a method that can't
    take tokens back gives None, and all ids are to be fed to a new cache.

    Raises:
        ValueError: the cache has several rows.
    """
    if cache.batch != 1:
        raise ValueError(f"the cache has {cache.batch} rows; a conversation has one")
    held = np.asarray(cache.history[0])[: int(cache.lengths[0])]
    wanted = np.asarray(ids, np.int32)
    shared = min(held.size, wanted.size)
    differ = np.flatnonzero(held[:shared] != wanted[:shared])
    common = int(differ[0]) if differ.size else shared
    if common == held.size and wanted.size > held.size:
        return cache, wanted[common:].tolist()
    # The last token has to be fed anew to get its logits.
    common = min(common, wanted.size - 1)
    logger.warning(
        "the conversation parts from the cache at token %d of %d held; reusing the first %d",
        common, held.size, common,
    )  # fmt: skip
    try:
        return truncate(cache, np.array([common], np.int32)), wanted[common:].tolist()
    except NotImplementedError:
        return None, wanted.tolist()
