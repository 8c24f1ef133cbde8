"""How byte-level BPE vocabularies split text into words before merging, by the name that a GGUF
file gives in `tokenizer.ggml.pre`.

A kind is a list of patterns applied one after the other: each cuts the pieces that are there so
far into its matches and what lies between them. A look-ahead sees the end of its piece, not of
the text, so the order and the number of patterns matter: with digits cut off first, the white
space before a digit ends its piece and stays together.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from checkpoints.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# A word in at most two parts, upper case then lower; letters without case serve as either.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns, and what files of this kind mean where they don't say it."""

    patterns: tuple[str, ...]
    add_bos: bool = False  # where the file has no add_bos_token
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, merges or not


_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_PATTERNS = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
_LLAMA3 = PreTokenizer(_LLAMA3_PATTERNS, add_bos=True, ignore_merges=True)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",))
_GPT2_KIND = PreTokenizer((_GPT2,))

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_KIND,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3_PATTERNS),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(
        (rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
        add_bos=True,
        ignore_merges=True,
    ),
}


def find(name: str, *, source: str) -> PreTokenizer:
    """The kind of this name; CheckpointError naming it if it is not known."""
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported (only"
            f" {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    return PRE_TOKENIZERS[name]


def build(kind: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The same as a pre-tokenizer of the `tokenizers` library, words in byte-level letters."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, as_bytes])
