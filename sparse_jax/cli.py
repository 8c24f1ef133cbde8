"""The command line, `sparse-jax`: the only module that imports everything.

Every command checks its input before any work; an error is one line on standard error and exit
status 1. With --json, standard output holds one JSON object and nothing else.
"""

import argparse
import dataclasses
import difflib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_jax.caches import Dense
from sparse_jax.caches.base import Cache, CacheMethod, context_limit
from sparse_jax.config import ModelConfig

if TYPE_CHECKING:
    from sparse_jax.loading import Model

METHODS: dict[str, type] = {"dense": Dense}
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    # transformers, imported later for its tokenizers, would say that it found no torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s"
    )
    try:
        args.run(args)
    except (ValueError, TypeError, OSError) as error:
        print(f"sparse-jax: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="sparse-jax", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="say what is being done")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    fetch = commands.add_parser("fetch-demo-model", help="get SmolLM2-135M-Instruct, once")
    fetch.add_argument("dir", nargs="?", help="where to (default: the user's cache directory)")
    fetch.set_defaults(run=run_fetch)

    convert = commands.add_parser("convert", help="turn a checkpoint into another layout")
    convert.add_argument("source", help="Hugging Face, Meta or Orbax directory, or .gguf file")
    convert.add_argument("target", help="directory to write")
    convert.add_argument("--to", choices=("orbax", "hf"), default="orbax")
    convert.add_argument("--dtype", choices=DTYPES, help="convert the parameters to it")
    convert.add_argument("--overwrite", action="store_true", help="replace a converted model")
    convert.set_defaults(run=run_convert)

    info = commands.add_parser("info", help="a model's config, parameters and cache bytes")
    _model_options(info)
    info.set_defaults(run=run_info)

    generate = commands.add_parser("generate", help="continue a prompt")
    _model_options(generate)
    _method_options(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE")
    generate.add_argument("--prompt-tokens", type=int, help="use the prompt's first N tokens")
    generate.add_argument("--chat", action="store_true", help="put it in the chat template")
    generate.add_argument("--max-new-tokens", type=int, required=True)
    _sampling_options(generate)
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk with a chat model; each turn feeds new tokens")
    _model_options(chat)
    _method_options(chat)
    chat.add_argument("--system", help="the system message")
    chat.add_argument("--context", type=int, help="tokens the conversation may have")
    chat.add_argument("--max-new-tokens", type=int, default=512)
    _sampling_options(chat)
    chat.set_defaults(run=run_chat)

    evaluate = commands.add_parser("eval", help="measure quality through a cache")
    tasks = evaluate.add_subparsers(required=True, metavar="TASK")
    perplexity = tasks.add_parser("perplexity", help="of a text, teacher-forced")
    _eval_options(perplexity, several=False)
    perplexity.add_argument("--stride", type=int, help="tokens predicted in each window")
    perplexity.add_argument("--max-tokens", type=int, help="predict at most so many")
    perplexity.set_defaults(run=run_perplexity)
    needle = tasks.add_parser("needle", help="find a word or number hidden in a text")
    needle.add_argument("--kind", choices=("word", "number"), default="word")
    needle.set_defaults(run=run_needle)
    copy = tasks.add_parser("copy", help="repeat a passage of a text")
    copy.set_defaults(run=run_copy)
    for task in (needle, copy):
        _eval_options(task, several=True)
        task.add_argument("--depths", type=float, nargs="+", help="0 (start) to 1 (end)")
        task.add_argument("--plot", metavar="FILE.png", help="write a heat map")
        task.add_argument(
            "--question-seen", action="store_true", help="ask before the cache compresses"
        )
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="directory or .gguf file")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the file's")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _method_options(parser: argparse.ArgumentParser) -> None:
    """--method, and one option for each field of each method."""
    group = parser.add_argument_group("cache method")
    group.add_argument("--method", default="dense", metavar="NAME", help=", ".join(METHODS))
    seen: set[str] = set()
    for name, method in METHODS.items():
        for field in dataclasses.fields(method):
            if field.name not in seen:
                seen.add(field.name)
                flag = "--" + field.name.replace("_", "-")
                group.add_argument(flag, type=int, dest=f"method_{field.name}", help=f"of {name}")


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    for name in ("top-p", "min-p", "repetition-penalty"):
        group.add_argument(f"--{name}", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")


def _eval_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    _model_options(parser)
    _method_options(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="plain text, UTF-8")
    parser.add_argument(
        "--context", type=int, required=True, nargs="+" if several else None, metavar="N"
    )
    parser.add_argument("--batch", type=int, default=1, help="rows at a time")


def run_fetch(args: argparse.Namespace) -> None:
    from sparse_jax.loading import fetch_demo_model

    print(fetch_demo_model(args.dir, progress=True))


def run_convert(args: argparse.Namespace) -> None:
    from sparse_jax.loading import check_free, export_hf, load_model, save_model

    if args.to == "hf" and args.overwrite:
        raise ValueError("--overwrite works for --to orbax only; remove the directory first")
    check_free(args.target, args.overwrite)
    model = load_model(args.source, dtype=args.dtype, progress=True)
    if args.to == "hf":
        export_hf(args.target, model)
    else:
        save_model(args.target, model, overwrite=args.overwrite)
    print(args.target)


def run_info(args: argparse.Namespace) -> None:
    import jax

    from sparse_jax.loading import load_model

    model = load_model(args.model, dtype=args.dtype)
    leaves = jax.tree.leaves(model.params)
    config = model.config
    dtype = leaves[0].dtype
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    result = {
        "config": dataclasses.asdict(config),
        "parameters": sum(leaf.size for leaf in leaves),
        "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
        "dtype": str(dtype),
        "cache_bytes_per_token": elements * dtype.itemsize,
        "cache_bytes_per_token_bf16": elements * 2,
    }
    lines = [f"{name}: {value}" for name, value in result.pop("config").items()]
    if args.json:
        result = {"config": dataclasses.asdict(config), **result}
    _report(args, result, "\n".join([*lines, *(f"{k}: {v:,}" if isinstance(v, int) else f"{k}: {v}"
                                               for k, v in result.items())]))  # fmt: skip


def run_generate(args: argparse.Namespace) -> None:
    from sparse_jax.chat import encode_chat, encode_text
    from sparse_jax.generation import generate_timed
    from sparse_jax.prompts import pad_prompts

    method, sampling = _method(args), _sampling(args)
    text = args.prompt if args.prompt_file is None else _read(args.prompt_file)
    model = _load(args)
    if args.chat:
        ids = encode_chat(model.tokenizer, [{"role": "user", "content": text}])
    else:
        ids = encode_text(model.tokenizer, text)
    if args.prompt_tokens is not None:
        if not 1 <= args.prompt_tokens <= len(ids):
            raise ValueError(
                f"--prompt-tokens {args.prompt_tokens}: the prompt has {len(ids)} tokens; give "
                f"1 to {len(ids)}"
            )
        ids = ids[: args.prompt_tokens]
    tokens, lengths = pad_prompts([ids])
    out, timings = generate_timed(
        model.params, tokens, lengths, config=_at(model.config, len(ids) + args.max_new_tokens),
        cache=method, sampling=sampling,
    )  # fmt: skip
    new = out.tokens[0, : int(out.lengths[0])].tolist()
    answer = model.tokenizer.decode(new, skip_special_tokens=True)
    result = {
        "text": answer,
        "tokens": new,
        "prompt_tokens": len(ids),
        "prefill_tokens_per_s": timings.prefill_rate,
        "decode_tokens_per_s": timings.decode_rate,
        "compile_s": timings.compile_seconds,
        "cache_bytes": out.cache.nbytes,
    }
    _report(args, result, answer)
    if not args.json:
        print(
            f"[{len(ids)} prompt tokens at {timings.prefill_rate:.1f}/s, {len(new)} new at "
            f"{timings.decode_rate:.1f}/s, compiled in {timings.compile_seconds:.1f} s, cache "
            f"{out.cache.nbytes:,} bytes]",
            file=sys.stderr,
        )


def run_chat(args: argparse.Namespace) -> None:
    from sparse_jax.chat import encode_chat, new_part

    method, sampling = _method(args), _sampling(args)
    model = _load(args)
    capacity = args.context or context_limit(model.config)
    config = _at(model.config, capacity)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    encode_chat(model.tokenizer, [{"role": "user", "content": "-"}])  # has it a template at all?
    cache: Cache | None = None
    while True:
        try:
            text = input("" if args.json else "> ").strip()
        except EOFError:
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        ids = encode_chat(model.tokenizer, messages)
        fed = ids
        if cache is not None:
            cache, fed = new_part(cache, ids)
        answer, cache = _turn(args, model, config, cache or method, fed, sampling, capacity)
        messages.append({"role": "assistant", "content": answer})


def _turn(
    args, model: "Model", config: ModelConfig, cache, fed: list[int], sampling, capacity: int
):
    """One answer, printed as it comes (with --json, as one object a turn)."""
    from sparse_jax.generation import stream
    from sparse_jax.prompts import pad_prompts

    tokens, lengths = pad_prompts([fed])
    keep = None if isinstance(cache, Cache) else capacity
    new: list[int] = []
    shown, text, last = "", "", None
    for last in stream(
        model.params, tokens, lengths, config=config, cache=cache, sampling=sampling, capacity=keep
    ):
        new += last.tokens[0].tolist()
        text = model.tokenizer.decode(new, skip_special_tokens=True)
        # A character may be spread over several tokens: wait until it is whole.
        if not args.json and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    assert last is not None
    if args.json:
        print(json.dumps({"text": text, "tokens": new, "fed_tokens": len(fed)}), flush=True)
    else:
        print(text[len(shown) :])
    return text, last.cache


def run_perplexity(args: argparse.Namespace) -> None:
    from sparse_jax.evaluate.perplexity import perplexity
    from sparse_jax.evaluate.report import as_dict, describe

    method, model, ids = _eval_inputs(args)
    result = perplexity(
        model.params, ids, config=_at(model.config, args.context), method=method,
        context=args.context, stride=args.stride, max_tokens=args.max_tokens, batch=args.batch,
    )  # fmt: skip
    _report(args, as_dict(result), describe(result))


def run_needle(args: argparse.Namespace) -> None:
    from sparse_jax.evaluate.needle import needle

    _run_recall(args, needle, kind=args.kind)


def run_copy(args: argparse.Namespace) -> None:
    from sparse_jax.evaluate.copying import copy_recall

    _run_recall(args, copy_recall)


def _run_recall(args: argparse.Namespace, task, **options) -> None:
    from sparse_jax.evaluate.report import as_dict, describe, heat_map

    if args.plot and not args.plot.endswith(".png"):
        raise ValueError(f"--plot {args.plot}: the heat map is a PNG; end the name in .png")
    method, model, ids = _eval_inputs(args)
    if args.depths is not None:
        options["depths"] = args.depths
    result = task(
        model.params, ids, config=_at(model.config, max(args.context)), tokenizer=model.tokenizer,
        method=method, lengths=args.context, question_seen=args.question_seen, batch=args.batch,
        **options,
    )  # fmt: skip
    if args.plot:
        heat_map(result, args.plot)
    _report(args, as_dict(result), describe(result))


def _eval_inputs(args: argparse.Namespace) -> tuple[CacheMethod, "Model", list[int]]:
    from sparse_jax.chat import encode_text

    method, text = _method(args), _read(args.text)
    model = _load(args)
    return method, model, encode_text(model.tokenizer, text)


def _load(args: argparse.Namespace) -> "Model":
    from sparse_jax.loading import load_model

    model = load_model(args.model, dtype=args.dtype)
    if model.tokenizer is None:
        raise ValueError(f"{args.model}: no tokenizer there; put tokenizer.json beside the weights")
    return model


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error.reason} at {error.start})") from None


def _at(config: ModelConfig, length: int) -> ModelConfig:
    """The config for a text that may grow beyond the trained context (`dynamic` RoPE only)."""
    return config.at_context(length) if length > config.max_positions else config


def _method(args: argparse.Namespace) -> CacheMethod:
    """The cache method that --method and its options describe."""
    if args.method not in METHODS:
        near = difflib.get_close_matches(args.method, METHODS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"--method {args.method}: unknown; there are {', '.join(METHODS)}{hint}")
    method = METHODS[args.method]
    known = {field.name for field in dataclasses.fields(method)}
    options = {
        name.removeprefix("method_"): value
        for name, value in vars(args).items()
        if name.startswith("method_") and value is not None
    }
    for name in options.keys() - known:
        raise ValueError(f"--{name.replace('_', '-')}: not an option of --method {args.method}")
    return method(**options)


def _sampling(args: argparse.Namespace) -> Any:
    from sparse_jax.sampling import SamplingParams

    return SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, min_p=args.min_p, repetition_penalty=args.repetition_penalty,
        seed=args.seed, eos_ids=() if args.ignore_eos else None,
    )  # fmt: skip


def _report(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    print(json.dumps(result) if args.json else text)
