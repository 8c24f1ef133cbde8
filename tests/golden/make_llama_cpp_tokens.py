"""Make `llama_cpp_tokens.json`: how llama.cpp tokenises some 440 pieces of text.

Run in an environment with llama-cpp-python, gguf and sentencepiece (nothing of this project's):

    python tests/golden/make_llama_cpp_tokens.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

What the file holds:
- `pieces`: the texts
- `ids`: pre-tokenizer name -> the ids of each piece with the demo model's vocabulary, its file
  saying that name (its own is smollm). For all but smollm the file says nothing of a BOS, so that
  each kind's default shows, and has more tokens:
- `digits`: added after the others, with merges to make them, so that groups of digits show
- `sentencepiece`: a vocabulary of 1000 tokens trained here on the novel in `examples/`, as a GGUF
  file's metadata has it, and the ids of each piece.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import gguf
import sentencepiece
from llama_cpp import Llama

HERE = Path(__file__).parent
NOVEL = HERE.parent.parent / "examples" / "pride_and_prejudice.txt"
OTHER_KINDS = ("gpt-2", "default", "llama-bpe", "smaug-bpe", "qwen2", "tekken")
VOCABULARY = 1000

CODE = '''
def mean(values: list[float], *, weights=None) -> float:
    """Weighted mean; 1.5e-3 == 0.0015, 0xFF_FF."""
    if not values:
        raise ValueError(f"no values: {values!r}")
    weights = weights or [1.0] * len(values)
\treturn sum(v * w for v, w in zip(values, weights)) / sum(weights)  # tabs\tand   spaces


class Cache(dict):
    def __getitem__(self, key):
        try:
            return super().__getitem__(key)
        except KeyError as e:
            self.misses += 1; return None

for i in range(10_000): print(i, end=",\\n" if i % 7 == 0 else " ")
x = {k: v**2 for k, v in enumerate("it's")}; assert x[0] <= 10 and x != {}, "can't"
'''
OTHERS = """
Hello world|Hello, world!|HELLO WORLD|hello|don't|DON'T|I'm you're he's we've they'll I'd|it'S
'tis
x's y't|'re 're're|l'été à l'école|naïve café Ångström|Straße GROẞ|Привет, мир! Как дела?
Ελληνικά και 123|שלום עולם|مرحبا بالعالم ١٢٣|नमस्ते दुनिया १२३|สวัสดีชาวโลก|你好，世界！
今天是2024年5月17日
日本語のテキストとカタカナ|한국어 텍스트 12개|中文English混排abc123|😀|😀😃😄
👨‍👩‍👧‍👦 family|🇫🇷🇩🇪|👍🏽 ok
e\u0301 (combining)|a\u0300b\u0301c|\u200bzero\u200bwidth|soft\u00adhyphen
non\u00a0breaking\u00a0space
\u2003em space|\u3000wide space|\ufeffbom|\ufffd replaced|\ue000 private|\u2028line\u2029paragraph
½ ⅓ ² ³ ①②③ Ⅷ Ⅻ|١٢٣٤٥|１２３４|1|12|123|1234|12345|123456789012|3.14159|1,000,000.50|-42|+7
1e10|0x1F
2024-05-17T10:20:30Z|192.168.0.1|50%|$9.99|€5|#1|No.5|v1.2.3|4x4|H2O|a1b2c3|1st 2nd 3rd
a\tb|\ta|\t\tb|a\nb|a\n\nb|a\r\nb|\r\n\r\n|\n|\n\n\n|\n \n|a \n b|a  \n  b|\x0b\x0c|a\x1cb
\x85next
 | a|  a|   a|a |a  |a   |a    b|  1|   1| 12|a 1|a  1|a   12  b|\n1|\n 1|\n  1|\t1|\t 1|a\t\t12
...|!!!|?!|--|---|____|====|****|a.b.c|a,b;c:d|(a)[b]{c}|<a>|</a>|<div class="x">1</div>|&amp;
a&b|a|b
"quoted"|'single'|“curly”|‘one’ it’s|«guillemets»|`code`|~/path/to_file.txt|C:\\\\dir
https://a.b/c?d=1&e=2#f
snake_case|camelCase|PascalCase|SCREAMING_CASE|kebab-case|XMLHttpRequest|iPhone15Pro|aBcDeF|ABCdef
ǅungla ǆ Ǆ|ªº ordinal|ⅷ ⅸ|ʰʲ modifier|ſ long s|'ſ|K kelvin|İstanbul ıi|ﬁ ligature|Ω ohm
<|im_start|>|<|im_end|>|<|im_start|>user\nhi<|im_end|>\n|a<|im_end|>b|<|im_start|><|im_start|>
<|endoftext|>|x <|endoftext|> y| <|im_start|> |<|im_start|>1|<|im_start| >|<|im_start
<|im_end|>|<repo_name>
<s>|</s>|<unk>|<s>a</s>|a <s> b|<|user|>|hi<|user|>there <|user|> now|<0x0A>|<0x41>|\u2581
a\u2581b
\x00|\x01\x02|\x7f|a\x00b|\x1b[31mred\x1b[0m|\u0378 unassigned|𝔘𝔫𝔦𝔠𝔬𝔡𝔢|𐍈 gothic|∑∫√∞≈≠≤≥|→←↑↓|™®©
Zürich 8001|¿Qué?|¡Hola!|ñandú|Łódź|Đà Nẵng|ə|ŋ|ʃ|ﷺ|ﬀ|Æsop|Œuvre|ð þ|Ü
""".strip()


def pieces() -> list[str]:
    rng = random.Random(0)
    novel, code = NOVEL.read_text(encoding="utf-8"), CODE
    found = [""]
    for line in OTHERS.split("\n"):
        # A bar inside a special token does not separate.
        for part in line.replace("<|", "<\0").replace("|>", "\0>").split("|"):
            part = part.replace("\0", "|")
            found.append(part.encode("utf-8").decode("unicode_escape")
                         if part.isascii() and "\\" in part else part)  # fmt: skip
    found += [" " * n for n in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)]
    found += [" " * n + "x" for n in (2, 3, 4, 7, 8, 9, 16)]
    found += ["\n" * n for n in (2, 4, 5)] + ["\t" * n + "7" for n in (1, 2, 3)]
    found += [c * n for c in "a-=.1" for n in (2, 3, 5, 8, 13)]
    found += code.strip("\n").split("\n")
    found.append(code)
    for size in (20, 60, 200):
        for _ in range(15):
            at = rng.randrange(len(novel) - size)
            found.append(novel[at : at + size])
    for alphabet in (
        "a1 ", "aB 1\n", "a'sStTrRvVmMlLdD ", "1٣½Ⅷ x", " \n\t\r1a", "é ß\u0301 Ω1", "你好 1a，。",
        "😀a 1\u200d", ".,!?-_ a1\n", "<|im_start|>\n ", " \u00a0\u3000a1", "'re ve ll S",
    ):  # fmt: skip
        for _ in range(12):
            found.append("".join(rng.choice(alphabet) for _ in range(rng.randrange(2, 14))))
    return list(dict.fromkeys(found))


def tokenised(metadata: dict, texts: list[str]) -> list[list[int]]:
    """Ids of each text by llama.cpp, from a file that holds this metadata and no tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            if key == "general.architecture":
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model = Llama(str(path), vocab_only=True, verbose=False)
        # `add_bos` lets the file's flags decide; `special` lets special tokens be recognised.
        return [model.tokenize(t.encode("utf-8"), add_bos=True, special=True) for t in texts]


def sentencepiece_metadata() -> dict:
    """A Llama-like vocabulary: BPE, byte fallback, digits apart, one user-defined token."""
    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            input=str(NOVEL), model_prefix=f"{folder}/m", model_type="bpe", vocab_size=VOCABULARY,
            byte_fallback=True, split_digits=True, normalization_rule_name="identity",
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            character_coverage=1.0, user_defined_symbols=["<|user|>"], num_threads=1,
        )  # fmt: skip
        model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/m.model")
    types = []
    for i in range(model.get_piece_size()):
        if model.is_unknown(i):
            types.append(2)
        elif model.is_control(i):
            types.append(3)
        elif model.is_byte(i):
            types.append(6)
        else:
            types.append(4 if model.id_to_piece(i) == "<|user|>" else 1)
    size = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in size],
        "tokenizer.ggml.token_type": types,
    }


def main(path: Path) -> None:
    texts = pieces()
    demo = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()
            if not key.startswith("GGUF.")}  # fmt: skip
    sizes = {key: value for key, value in demo.items() if key.startswith("llama.")}
    digits = [f"{n:02}" for n in range(100)] + [f"{n:03}" for n in range(1000)]
    more = {"tokens": digits, "token_type": [1] * len(digits),
            "merges": [f"{token[:-1]} {token[-1]}" for token in digits]}  # fmt: skip
    ids = {"smollm": tokenised(demo, texts)}
    for kind in OTHER_KINDS:
        changed = demo | {"tokenizer.ggml.pre": kind}
        del changed["tokenizer.ggml.add_bos_token"]
        for key, values in more.items():
            changed[f"tokenizer.ggml.{key}"] = changed[f"tokenizer.ggml.{key}"] + values
        ids[kind] = tokenised(changed, texts)
    spm = sentencepiece_metadata()
    result = {
        "made_with": {name: version(name) for name in ("llama_cpp_python", "sentencepiece")},
        "pieces": texts,
        "digits": digits,
        "ids": ids,
        "sentencepiece": {"metadata": spm, "ids": tokenised(sizes | spm, texts)},
    }
    target = HERE / "llama_cpp_tokens.json"
    target.write_text(json.dumps(result, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{target}: {len(texts)} pieces, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
