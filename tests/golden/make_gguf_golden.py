"""Make `smollm2_gguf_sha256.json`: what transformers makes of the demo model's GGUF, as hashes.

Run in an environment with torch, transformers and gguf (none of this project's is needed):

    python tests/golden/make_gguf_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The file maps each parameter's name to the SHA-256 of its float32 values, little-endian, row by row
in the shape that `state_dict` gives it ([out, in] for linear layers).
"""
# pyright: reportMissingImports=false

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers


def main(gguf: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    hashes = {
        name: hashlib.sha256(value.detach().numpy().astype("<f4", copy=False).tobytes()).hexdigest()
        for name, value in sorted(model.named_parameters())  # names a tied embedding once
    }
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    target = Path(__file__).with_name("smollm2_gguf_sha256.json")
    target.write_text(json.dumps({"made_with": made_with, "sha256": hashes}, indent=0) + "\n")
    print(f"{target}: {len(hashes)} tensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
