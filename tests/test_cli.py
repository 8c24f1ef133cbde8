"""The command line on a tiny model: the forms that scripts call, and one-line refusals."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny_chat import tiny_config, tiny_params, tiny_tokenizer

from sparse_jax.cli import main
from sparse_jax.loading import Model, fetch_demo_model, load_model, save_model

CONFIG = tiny_config(num_layers=1)
TEXT = Path(__file__).parent.parent / "examples" / "pride_and_prejudice.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli") / "model"
    save_model(path, Model(CONFIG, tiny_params(CONFIG), tiny_tokenizer()))
    return str(path)


def answer(capsys, *argv: str) -> dict:
    """The one JSON object that a command prints."""
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *argv: str) -> str:
    assert main(list(argv)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sparse-jax: ") and captured.err.count("\n") == 1
    return captured.err


def test_info_counts_parameters_and_cache_bytes(model, capsys):
    found = answer(capsys, "info", "--model", model)
    elements = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
    assert found["cache_bytes_per_token"] == 4 * elements
    assert found["cache_bytes_per_token_bf16"] == 2 * elements
    loaded = load_model(model)
    assert found["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))


def test_generate_prints_the_promised_object(model, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("it is a truth universally acknowledged")
    found = answer(capsys, "generate", "--model", model, "--prompt-file", str(file),
                   "--prompt-tokens", "9", "--max-new-tokens", "5", "--ignore-eos",
                   "--method", "dense", "--page", "16")  # fmt: skip
    assert {"text", "tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "cache_bytes"} <= set(
        found
    )
    assert len(found["tokens"]) == 5 and found["prompt_tokens"] == 9
    assert found["prefill_tokens_per_s"] > 0 and found["decode_tokens_per_s"] > 0


@pytest.mark.parametrize(
    "task, options, wanted",
    [
        ("perplexity", ["--stride", "8", "--max-tokens", "16"], {"nll", "perplexity", "tokens"}),
        ("needle", ["--depths", "0.5", "--kind", "number"], {"hits", "trials", "nll"}),
        ("copy", ["--depths", "0.5", "--question-seen"], {"hits", "trials", "nll"}),
    ],
)
def test_evaluations_print_the_promised_object(model, capsys, task, options, wanted):
    context = "64" if task == "perplexity" else "400"
    found = answer(capsys, "eval", task, "--model", model, "--text", str(TEXT), "--context",
                   context, *options)  # fmt: skip
    assert wanted | {"cache_bytes", "cache_bytes_bf16"} <= set(found)


def test_convert_goes_there_and_back(model, capsys, tmp_path):
    there, back = tmp_path / "hf", tmp_path / "orbax"
    assert main(["convert", model, str(there), "--to", "hf"]) == 0
    assert main(["convert", str(there), str(back)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(back)
    same = jax.tree.map(
        lambda a, b: bool(jnp.array_equal(a, b)), load_model(model).params, load_model(back).params
    )
    assert all(jax.tree.leaves(same))
    assert "exists; choose another" in refusal(capsys, "convert", str(there), str(back))


def test_the_demo_model_is_fetched_once(demo_gguf, capsys):
    assert main(["fetch-demo-model"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert fetch_demo_model() == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


@pytest.mark.parametrize(
    "options, named",
    [
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens = 0"),
        (["--prompt", "", "--max-new-tokens", "4"], "empty"),
        (["--prompt", "a", "--max-new-tokens", "4", "--method", "dens"], "did you mean dense?"),
        (["--prompt", "a", "--max-new-tokens", "4", "--page", "0"], "page = 0"),
        (["--prompt", "a", "--max-new-tokens", "4", "--top-k", "3"], "top_k = 3 has no effect"),
        (["--prompt", "a", "--max-new-tokens", "99999"], "beyond the model's context"),
        (["--prompt", "ab", "--max-new-tokens", "4", "--prompt-tokens", "999"], "the prompt has"),
        (["--prompt-file", "nowhere.txt", "--max-new-tokens", "4"], "nowhere.txt"),
    ],
)
def test_generate_refuses_by_name(model, capsys, options, named):
    assert named in refusal(capsys, "generate", "--model", model, *options)


def test_other_refusals_by_name(model, capsys, tmp_path):
    assert "nowhere" in refusal(capsys, "info", "--model", "nowhere")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 " * 500)
    evaluation = ["eval", "perplexity", "--model", model, "--context", "64", "--text"]
    assert "not UTF-8" in refusal(capsys, *evaluation, str(latin))
    assert "stride=65" in refusal(capsys, *evaluation, str(TEXT), "--stride", "65")
    needle = ["eval", "needle", "--model", model, "--text", str(TEXT), "--context", "400"]
    assert "end the name in .png" in refusal(capsys, *needle, "--plot", "map.pdf")


def test_a_tokenizer_without_template_can_not_chat(capsys, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    path = tmp_path / "plain"
    save_model(path, Model(CONFIG, tiny_params(CONFIG), tokenizer))
    assert "no chat template" in refusal(capsys, "chat", "--model", str(path))


def test_chat_feeds_only_what_is_new(model):
    program = Path(sys.executable).with_name("sparse-jax")
    ran = subprocess.run(
        [program, "chat", "--model", model, "--json", "--max-new-tokens", "4"],
        input="one two\nthree\n", text=True, capture_output=True, check=True, timeout=300,
    )  # fmt: skip
    first, second = map(json.loads, ran.stdout.splitlines())
    assert len(first["tokens"]) >= 1
    # Were the whole conversation fed again, it would be at least both turns long.
    assert second["fed_tokens"] < 2 * first["fed_tokens"] + len(first["tokens"])
