"""Hide a fact in a long text, ask a real model for it, and say what the answer cost.

    make demo        or        python examples/demo.py --tokens 4096

The model is SmolLM2-135M-Instruct, fetched the first time; the text is the beginning of "Pride and
Prejudice". Exit status 1 if the answer does not hold the fact.
"""

import argparse
import sys
from pathlib import Path

from sparse_jax import (
    Dense,
    SamplingParams,
    encode_chat,
    encode_text,
    fetch_demo_model,
    generate_timed,
    load_model,
    pad_prompts,
)

TEXT = Path(__file__).with_name("pride_and_prejudice.txt")
FACT = "483920"
LINE = f"\n\nThe secret number is {FACT}.\n\n"
QUESTION = "\n\nWhat is the secret number mentioned in the text above?"
NEW = 32  # tokens of the answer at most
DEPTH = 0.4  # where in the text the fact stands


def main() -> int:
    parser = argparse.ArgumentParser(description="Find a fact in a long text.")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text (default 4096)")
    args = parser.parse_args()

    model = load_model(fetch_demo_model(progress=True))
    tokenizer, config = model.tokenizer, model.config
    ids = encode_text(tokenizer, TEXT.read_text(encoding="utf-8"))
    if not 100 <= args.tokens <= len(ids):
        parser.error(f"--tokens {args.tokens}: the text has {len(ids)}; give 100 to {len(ids)}")
    at = int(DEPTH * args.tokens)
    text = tokenizer.decode(ids[:at]) + LINE + tokenizer.decode(ids[at : args.tokens])
    prompt = encode_chat(tokenizer, [{"role": "user", "content": text + QUESTION}])

    print(f"{TEXT.name}: {args.tokens} tokens, the fact {DEPTH:.0%} into them; asking", flush=True)
    tokens, lengths = pad_prompts([prompt])
    out, timings = generate_timed(
        model.params, tokens, lengths, config=config, cache=Dense(),
        sampling=SamplingParams(max_new_tokens=NEW), capacity=len(prompt) + NEW,
    )  # fmt: skip
    new = out.tokens[0, : int(out.lengths[0])].tolist()
    answer = tokenizer.decode(new, skip_special_tokens=True)
    print(f"\nquestion  {QUESTION.strip()}")
    print(f"answer    {answer}\n")
    print(f"prefill   {timings.prefill_rate:8.1f} tokens/s over {timings.prefill_tokens} tokens")
    print(f"decode    {timings.decode_rate:8.1f} tokens/s over {timings.decode_tokens} tokens")
    print(f"cache     {out.cache.nbytes:,} bytes for {out.cache.capacity} tokens")
    print(f"compiled  in {timings.compile_seconds:.1f} s (not counted above)")
    if FACT not in answer:
        print(f"the answer does not hold {FACT}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
