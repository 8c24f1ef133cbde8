"""The tokenizer inside a GGUF file as a fast tokenizer of `transformers`.

Built from the file's own vocabulary, merges or scores, token types and flags, to give the ids that
llama.cpp gives. (transformers' own reading of GGUF tokenizers differs: it splits digits after white
space at another place, and may put a BOS in front where the file asks for none.)
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from checkpoints import gguf_pretokenizers
from checkpoints.errors import CheckpointError
from checkpoints.gguf_file import get_typed, read_header

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # token types
_SPACE = "\u2581"  # stands for a space in sentencepiece vocabularies
# Tokens that are control tokens whatever their type says: some files have them as plain text, and
# then a chat template would be spelled out letter by letter.
_ALWAYS_CONTROL = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
                   "<|eom_id|>", "<EOT>"}  # fmt: skip


def tokenizer_from_gguf(file: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, special tokens and chat template included.

    Two kinds: byte-level BPE (`gpt2`) with the pre-tokenizers of `gguf_pretokenizers`, and
    sentencepiece BPE (`llama`) with byte fallback. Encoding adds a BOS or EOS exactly if the file
    says so, or says nothing and its kind does; special tokens written out in a text become their
    ids, as llama.cpp does for chat prompts.

    `save_pretrained` writes it; read it back with `PreTrainedTokenizerFast.from_pretrained`, since
    `AutoTokenizer` puts its own splitting in place for some model types (qwen2).

    Raises FileNotFoundError, and CheckpointError naming the thing for a damaged file, a missing or
    inconsistent key, and a tokenizer or pre-tokenizer that is not supported.
    """
    header = read_header(file)
    return tokenizer_from_metadata(header.metadata, source=str(header.path))


def tokenizer_from_metadata(
    metadata: Mapping[str, Any], *, source: str = "metadata"
) -> PreTrainedTokenizerFast:
    """The same from a GGUF's metadata alone (key -> value); `source` names it in errors."""
    vocabulary = _read_vocabulary(metadata, source)
    kind = vocabulary.text("model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
        default_ids: dict[str, int] = {}
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
        default_ids = {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise CheckpointError(
            f"{source}: tokenizer {kind!r} (tokenizer.ggml.model) is not supported (only gpt2,"
            " llama)"
        )
    tokenizer.add_special_tokens([_added(t) for t in vocabulary.of_type(_CONTROL, _UNKNOWN)])
    tokenizer.add_tokens([_added(t) for t in vocabulary.of_type(_USER_DEFINED)])

    named = {
        f"{short}_token": vocabulary.special(name, default_ids.get(name))
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    named = {name: token for name, token in named.items() if token is not None}
    flags = {
        "add_bos_token": vocabulary.flag("add_bos_token", add_bos),
        "add_eos_token": vocabulary.flag("add_eos_token", False),
    }
    for flag, wanted in flags.items():
        if wanted and flag[4:] not in named:
            raise CheckpointError(f"{source}: {flag} is set, but there is no {flag[4:7]}_token_id")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(metadata, source),
        clean_up_tokenization_spaces=False,  # decoding gives back what was encoded
        **named,
        **flags,
    )


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens and their types by id, and typed access to the rest of the metadata."""

    metadata: Mapping[str, Any]
    source: str
    tokens: Sequence[str]
    types: Sequence[int]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        return get_typed(self.metadata, _PREFIX + key, kind, default, source=self.source)

    def text(self, key: str) -> str:
        value = self.get(key, str)
        if value is None:
            raise CheckpointError(f"{self.source}: the metadata lacks '{_PREFIX}{key}'")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, bool, default)

    def items(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        """A list of `kind`, of a given length if one is given."""
        values = self.get(key, list)
        if values is None:
            raise CheckpointError(f"{self.source}: the metadata lacks '{_PREFIX}{key}'")
        if not all(isinstance(value, kind) for value in values):
            raise CheckpointError(f"{self.source}: '{_PREFIX}{key}' is no list of {kind.__name__}")
        if length is not None and len(values) != length:
            raise CheckpointError(
                f"{self.source}: '{_PREFIX}{key}' has {len(values)} entries for {length} tokens"
            )
        return values

    def of_type(self, *types: int) -> list[str]:
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def special(self, name: str, default: int | None) -> str | None:
        """The text of a token that the file gives by id."""
        index: int | None = self.get(f"{name}_token_id", int, default)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise CheckpointError(
                f"{self.source}: '{_PREFIX}{name}_token_id' {index} is outside the vocabulary of"
                f" {len(self.tokens)}"
            )
        return self.tokens[index]


def _read_vocabulary(metadata: Mapping[str, Any], source: str) -> _Vocabulary:
    raw = _Vocabulary(metadata, source, (), ())
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(raw.items("tokens", str))]
    if not tokens:
        raise CheckpointError(f"{source}: '{_PREFIX}tokens' is empty")
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise CheckpointError(f"{source}: token {twice!r} occurs twice in '{_PREFIX}tokens'")
    types = [_NORMAL] * len(tokens)
    if f"{_PREFIX}token_type" in metadata:
        types = list(raw.items("token_type", int, len(tokens)))
    for i, token in enumerate(tokens):
        if token in _ALWAYS_CONTROL:
            types[i] = _CONTROL
    return _Vocabulary(metadata, source, tokens, types)


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _chat_template(metadata: Mapping[str, Any], source: str) -> str | dict[str, str] | None:
    """The template, or a dict of them (`default`, `tool_use`, ...) where the file names more."""
    key = "tokenizer.chat_template"
    default = get_typed(metadata, key, str, source=source)
    named: dict[str, str] = {
        name.removeprefix(f"{key}."): get_typed(metadata, name, str, source=source)
        for name in metadata
        if name.startswith(f"{key}.")
    }
    if not named:
        return default
    return {**({} if default is None else {"default": default}), **named}


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether its kind starts with a BOS by default."""
    name = vocabulary.get("pre", str, "default")
    kind = gguf_pretokenizers.find(name, source=vocabulary.source)
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges: dict[tuple[str, str], None] = {}  # a pair given twice keeps its first rank
    for merge in vocabulary.items("merges", str):
        at = merge.find(" ", 1)  # not a space that the first token starts with
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"{vocabulary.source}: merge {merge!r} does not join two tokens into a third"
            )
        merges[left, right] = None
    tokenizer = Tokenizer(
        # No unknown token: a byte that the vocabulary lacks is left out, as in llama.cpp.
        models.BPE(vocab=ids, merges=list(merges), ignore_merges=kind.ignore_merges)
    )
    tokenizer.pre_tokenizer = gguf_pretokenizers.build(kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """A BPE tokenizer over whole texts that merges what gives the token of the highest score.

    Every way to cut a token into two others is a merge, ranked by the token's score.
    """
    scores = vocabulary.items("scores", float, len(vocabulary.tokens))
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    lacking = [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in ids]
    if lacking:
        raise CheckpointError(
            f"{vocabulary.source}: sentencepiece vocabularies without byte tokens are not supported"
            f" ({lacking[0]!r} is missing)"
        )
    parts = {
        token: i
        for token, i in ids.items()
        if vocabulary.types[i] not in (_BYTE, _CONTROL, _UNKNOWN)
    }
    merges = [
        (-scores[i], parts[token[:at]], parts[token[at:]], token[:at], token[at:])
        for token, i in parts.items()
        for at in range(1, len(token))
        if token[:at] in parts and token[at:] in parts
    ]
    merges.sort()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=vocabulary.special("unknown", 0),
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    # Applies to each stretch between special tokens, as llama.cpp's prefix does.
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer
