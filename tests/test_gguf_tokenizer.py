"""Tokenizers out of GGUF files: llama.cpp's ids, to the last of 441 pieces and 8 kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpoints import CheckpointError
from checkpoints.gguf_file import read_header
from checkpoints.gguf_tokenizer import tokenizer_from_gguf, tokenizer_from_metadata

GOLDEN = json.loads((Path(__file__).parent / "golden" / "llama_cpp_tokens.json").read_text())
PIECES: list[str] = GOLDEN["pieces"]
IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def demo_metadata(demo_gguf) -> dict[str, Any]:
    return dict(read_header(demo_gguf).metadata)


@pytest.fixture(scope="module")
def demo_tokenizer(demo_metadata) -> PreTrainedTokenizerFast:
    return tokenizer_from_metadata(demo_metadata)


def of_kind(metadata: dict[str, Any], kind: str) -> dict[str, Any]:
    """The metadata that the golden ids of a kind were made from."""
    if kind == "sentencepiece":
        return GOLDEN["sentencepiece"]["metadata"]
    changed: dict[str, Any] = metadata | {"tokenizer.ggml.pre": kind}
    if kind == "smollm":
        return changed
    del changed["tokenizer.ggml.add_bos_token"]
    digits = GOLDEN["digits"]
    for key, values in (
        ("tokens", digits),
        ("token_type", [1] * len(digits)),
        ("merges", [f"{token[:-1]} {token[-1]}" for token in digits]),
    ):
        changed[f"tokenizer.ggml.{key}"] = changed[f"tokenizer.ggml.{key}"] + values
    return changed


def disagreements(tokenizer, ids: list[list[int]]) -> list[tuple[str, list[int], list[int]]]:
    found = tokenizer(PIECES)["input_ids"]
    assert len(found) == len(ids) == len(PIECES) > 400
    return [
        (piece, got, want)
        for piece, got, want in zip(PIECES, found, ids, strict=True)
        if got != want
    ]


# Ids


@pytest.mark.parametrize("kind", [*GOLDEN["ids"], "sentencepiece"])
def test_ids_are_llama_cpps(demo_metadata, kind):
    golden = GOLDEN["ids"] | {"sentencepiece": GOLDEN["sentencepiece"]["ids"]}
    assert disagreements(tokenizer_from_metadata(of_kind(demo_metadata, kind)), golden[kind]) == []


def test_the_kinds_differ_so_that_agreeing_means_something():
    """But for llama-bpe without its BOS, which is smaug-bpe."""
    ids = GOLDEN["ids"]
    for kind in ids:
        for other in ids:
            differ = sum(a != b for a, b in zip(ids[kind], ids[other], strict=True))
            assert kind == other or differ > 20, (kind, other)


def test_reading_the_file_gives_the_same(demo_gguf):
    assert disagreements(tokenizer_from_gguf(demo_gguf), GOLDEN["ids"]["smollm"]) == []


def test_white_space_before_a_digit_stays_together(demo_tokenizer):
    """The pitfall: `\\n ` before a digit is a piece of its own, not split before its last space."""
    tokens = [demo_tokenizer.decode([i]) for i in demo_tokenizer("a\n  7")["input_ids"]]
    assert tokens == ["a", "\n  ", "7"]


def test_missing_pre_tokenizer_means_default(demo_metadata):
    metadata = of_kind(demo_metadata, "default")
    del metadata["tokenizer.ggml.pre"]
    assert disagreements(tokenizer_from_metadata(metadata), GOLDEN["ids"]["default"]) == []


# Text back


def test_byte_level_round_trip(demo_tokenizer):
    """Every piece comes back exactly, but for bytes that the vocabulary has no token for."""
    letters = json.loads(demo_tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    present = {demo_tokenizer.decode([i]) for token, i in letters.items() if len(token) == 1}
    missing = [chr(b) for b in range(128) if chr(b) not in present]
    assert len(missing) < 20  # control characters
    checked = 0
    for piece in PIECES:
        if not any(char in piece for char in missing):
            ids = demo_tokenizer(piece)["input_ids"]
            assert demo_tokenizer.decode(ids) == piece
            checked += 1
    assert checked > 425


def test_sentencepiece_round_trip():
    tokenizer = tokenizer_from_metadata(GOLDEN["sentencepiece"]["metadata"])
    special = ["<s>", "</s>", "<unk>", "<|user|>", "\u2581"]
    checked = 0
    for piece in PIECES:
        if piece and not any(token in piece for token in special):
            ids = tokenizer(piece)["input_ids"]
            assert ids[0] == 1  # BOS, which such files ask for unless they say otherwise
            assert tokenizer.decode(ids, skip_special_tokens=True) == piece
            checked += 1
    assert checked > 425


def test_special_tokens(demo_tokenizer):
    named = demo_tokenizer.special_tokens_map
    assert named == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.eos_token_id) == (IM_START, IM_END)
    assert len(demo_tokenizer) == 49152
    ids = demo_tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1]) == (IM_START, IM_END)
    assert demo_tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_control_looking_tokens_are_control_whatever_the_file_says(demo_metadata):
    types = list(demo_metadata["tokenizer.ggml.token_type"])
    types[IM_END] = 1
    changed = demo_metadata | {"tokenizer.ggml.token_type": types}
    assert tokenizer_from_metadata(changed)("a<|im_end|>")["input_ids"][-1] == IM_END


# BOS and chat template

MESSAGES = [{"role": "user", "content": "Hi there"}]


def test_exactly_one_start_a_turn_after_the_template(demo_tokenizer):
    text = demo_tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    direct = demo_tokenizer.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    # The file says add_bos_token false: encoding the text adds nothing either way.
    for ids in (
        direct,
        demo_tokenizer(text)["input_ids"],
        demo_tokenizer(text, add_special_tokens=False)["input_ids"],
    ):
        assert ids == direct
        assert ids[0] == IM_START and ids[1] != IM_START
        assert ids.count(IM_START) == 3 == text.count("<|im_start|>")  # system, user, assistant


def test_add_bos_and_add_eos_as_the_file_says(demo_metadata):
    plain = tokenizer_from_metadata(demo_metadata)("Hello")["input_ids"]
    for bos, eos in ((False, False), (True, False), (False, True), (True, True)):
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        tokenizer = tokenizer_from_metadata(demo_metadata | flags)
        assert tokenizer("Hello")["input_ids"] == [IM_START] * bos + plain + [IM_END] * eos
        assert tokenizer("Hello", add_special_tokens=False)["input_ids"] == plain
        chat = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
        assert chat[0] == IM_START and chat[1] != IM_START  # the template's own, no second one


def test_named_chat_templates(demo_metadata):
    changed = demo_metadata | {"tokenizer.chat_template.tool_use": "tools: {{ messages }}"}
    template = tokenizer_from_metadata(changed).chat_template
    assert template == {
        "default": demo_metadata["tokenizer.chat_template"],
        "tool_use": "tools: {{ messages }}",
    }
    without = {k: v for k, v in demo_metadata.items() if k != "tokenizer.chat_template"}
    assert tokenizer_from_metadata(without).chat_template is None


# Saved and read back


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", "sentencepiece"])
def test_saved_and_read_back(tmp_path, demo_metadata, kind):
    tokenizer = tokenizer_from_metadata(of_kind(demo_metadata, kind))
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for back in (
        AutoTokenizer.from_pretrained(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    ):
        assert back(PIECES)["input_ids"] == tokenizer(PIECES)["input_ids"]
        assert back.special_tokens_map == tokenizer.special_tokens_map
        assert back.chat_template == tokenizer.chat_template
        assert len(back) == len(tokenizer)


def test_the_model_type_beside_it_does_not_matter_to_the_plain_class(tmp_path, demo_tokenizer):
    """AutoTokenizer would put Qwen2's splitting in place of the file's here."""
    demo_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    back = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert disagreements(back, GOLDEN["ids"]["smollm"]) == []


# Bad input, refused by name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "jais-2"}, "pre-tokenizer 'jais-2'"),
        ({"model": "bert"}, "tokenizer 'bert'"),
        ({"model": None}, r"lacks 'tokenizer\.ggml\.model'"),
        ({"tokens": None}, r"lacks 'tokenizer\.ggml\.tokens'"),
        ({"merges": None}, r"lacks 'tokenizer\.ggml\.merges'"),
        ({"merges": ["ab"]}, "merge 'ab'"),
        ({"merges": ["a Q!"]}, "merge 'a Q!'"),
        ({"tokens": ["a", "b", "a"]}, "'a' occurs twice"),
        ({"tokens": []}, "is empty"),
        ({"tokens": [1, 2]}, "no list of str"),
        ({"token_type": [1, 1]}, "2 entries for 49152 tokens"),
        ({"bos_token_id": 49152}, "bos_token_id' 49152 is outside"),
        ({"bos_token_id": None, "add_bos_token": True}, "no bos_token_id"),
        ({"add_bos_token": 1}, "should be bool"),
        ({"model": "llama", "scores": [0.0] * 49152}, "'<0x00>' is missing"),
        ({"model": "llama"}, r"lacks 'tokenizer\.ggml\.scores'"),
    ],
)
def test_refused(demo_metadata, change, message):
    changed = demo_metadata | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    metadata = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_metadata(metadata, source="some.gguf")
