"""The other side of `dense.py`: Hugging Face transformers on torch, in an environment of its own.

Started by `dense.py` with that environment's Python. Reads one JSON request a line on standard
input, answers with one JSON line of seconds on standard output, and is idle in between, so that
both sides are measured in turn on a quiet machine.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, StaticCache

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


def load(gguf: str, dtype: str):
    path = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
    )
    return model.eval()


@torch.no_grad()
def prefill(model, ids, new: int, static: bool):
    cache = None
    if static:
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + new)
    started = time.perf_counter()
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started, out.past_key_values


@torch.no_grad()
def decode(model, cache, steps: int):
    token = torch.ones((1, 1), dtype=torch.long)
    started = time.perf_counter()
    for _ in range(steps):
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    return time.perf_counter() - started


def main() -> None:
    model, cache, loaded = None, None, None
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "prefill":
            if loaded != request["dtype"]:
                model, loaded = load(request["gguf"], request["dtype"]), request["dtype"]
            cache = None
            ids = torch.tensor([request["ids"]])
            seconds, cache = prefill(model, ids, request["room"], request["static"])
        else:
            seconds = decode(model, cache, request["steps"])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
