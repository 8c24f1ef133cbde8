"""The evaluations against slow references made with `forward`, and their refusals."""

import dataclasses
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import BOS_ID, TEMPLATE, tiny_config, tiny_params, tiny_tokenizer
from tokenizers import processors

from sparse_jax.caches import Dense
from sparse_jax.evaluate import (
    as_dict,
    cache_bytes,
    copy_recall,
    dense_bytes_bf16,
    describe,
    heat_map,
    needle,
    perplexity,
)
from sparse_jax.evaluate.copying import copy_prompts
from sparse_jax.evaluate.needle import hidden_answers, needle_prompts
from sparse_jax.evaluate.perplexity import windows
from sparse_jax.evaluate.recall import RecallResult, Trial, chat_parts, haystack
from sparse_jax.evaluate.scoring import Rows, score
from sparse_jax.inference import forward

CONFIG = tiny_config(num_layers=1)  # half the compile time, and the layers are not tested here
TOKENIZER = tiny_tokenizer()


def decoded(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


TEXT = (
    "It rained all night. The road was gone by morning, and nobody came up it! Was it a pity? "
    "The old house stood where it had always stood.\n"
) * 12
IDS = np.asarray(TOKENIZER.encode(TEXT, add_special_tokens=False), np.int32)

# float32 on both sides; forward and the cached path sum in different orders.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@dataclass(frozen=True)
class Forgetful(Dense):
    """Dense, but at the end of the prompt everything is wiped: what it kept is zeros."""

    def finish_prefill(self, config, state, room):
        wiped = jax.tree.map(jnp.zeros_like, (state.keys, state.values))
        return dataclasses.replace(state, keys=wiped[0], values=wiped[1])


def forward_nll(params, ids: list[int], answer: int) -> tuple[np.ndarray, np.ndarray]:
    """NLL and argmax for the last `answer` of a row of ids, from the oracle without a cache."""
    tokens = jnp.asarray([ids], jnp.int32)
    logits = forward(params, tokens, jnp.asarray([len(ids)], jnp.int32), config=CONFIG)[0]
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)[-answer - 1 : -1]
    return -log_p[np.arange(answer), ids[-answer:]], log_p.argmax(-1)


# --- perplexity ---


@settings(max_examples=200, deadline=None)
@given(
    context=st.integers(2, 40),
    stride=st.integers(1, 40),
    extra=st.integers(0, 100),
    most=st.one_of(st.none(), st.integers(1, 60)),
)
def test_windows_predict_each_token_once_with_enough_before_it(context, stride, extra, most):
    stride = min(stride, context)
    tokens = context + extra
    found = windows(tokens, context, stride, most)
    predicted = [at for part in found for at in range(part.scored, part.end)]
    assert predicted == sorted(set(predicted))
    assert all(part.end - part.start <= context for part in found)
    assert all(part.scored - part.start == max(context - stride, 1) for part in found)
    reachable = range(max(context - stride, 1), tokens)
    if stride == context:  # the first token of each window has nothing before it
        reachable = [at for at in reachable if at % stride]
    assert predicted == list(reachable)[:most]


@pytest.mark.parametrize(
    ("context", "stride", "max_tokens", "batch"),
    [(32, 8, 30, 3), (32, 32, None, 4), (48, None, 40, 1), (40, 1, 5, 2)],
)
def test_perplexity_equals_forward_on_each_window(params, context, stride, max_tokens, batch):
    ids = IDS[:290]
    result = perplexity(
        params,
        ids,
        config=CONFIG,
        method=Dense(page=16),
        context=context,
        stride=stride,
        max_tokens=max_tokens,
        batch=batch,
        progress=False,
    )
    step = context // 4 if stride is None else stride
    nll = []
    for start in range(0, len(ids), step):
        window = ids[start : start + context].tolist()
        new = len(window) - max(context - step, 1)
        if new > 0:
            nll += forward_nll(params, window, new)[0].tolist()
    nll = nll[:max_tokens]
    assert result.tokens == len(nll)
    assert result.nll == pytest.approx(np.mean(nll), abs=TOLERANCE)
    assert result.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=TOLERANCE * 2)
    assert result.cache_bytes_bf16 == 2 * 2 * 16 * 2 * context


def test_perplexity_goes_through_what_the_cache_kept(params):
    def nll(method):
        return perplexity(
            params, IDS[:64], config=CONFIG, method=method, context=32, stride=8, progress=False
        ).nll

    assert abs(nll(Dense()) - nll(Forgetful())) > 0.01


def test_perplexity_of_uniform_logits_is_the_vocabulary(params):
    silent = {**params, "lm_head": jax.tree.map(jnp.zeros_like, params["lm_head"])}
    result = perplexity(
        silent, IDS[:64], config=CONFIG, method=Dense(), context=32, stride=8, progress=False
    )
    assert result.perplexity == pytest.approx(CONFIG.vocab_size, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"context": 4096}, ValueError, "context=4096"),
        ({"context": 1}, ValueError, "context=1 "),
        ({"stride": 0}, ValueError, "stride=0"),
        ({"stride": -4}, ValueError, "stride=-4"),
        ({"stride": 33}, ValueError, "stride=33"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"batch": 0}, ValueError, "batch=0"),
        ({"tokens": IDS[:31]}, ValueError, "31 tokens, fewer than context=32"),
        ({"tokens": []}, ValueError, "at least one"),
        ({"tokens": [[1, 2]]}, ValueError, "one row"),
        ({"tokens": [1.0] * 64}, TypeError, "float"),
        ({"tokens": [259] * 64}, ValueError, "259"),
        ({"tokens": [-1] * 64}, ValueError, "-1"),
    ],
)
def test_perplexity_refuses(change, error, says):
    arguments = {"tokens": IDS[:64], "context": 32, "stride": 8} | change
    # No parameters at all: it must be refused before they are looked at.
    with pytest.raises(error, match=says):
        perplexity({}, config=CONFIG, method=Dense(), progress=False, **arguments)


# --- scoring, the protocol under all three ---

CONTEXT = [IDS[:20].tolist(), IDS[40:57].tolist(), IDS[100:113].tolist()]
ASKED = [IDS[20:27].tolist(), IDS[60:61].tolist(), IDS[120:124].tolist()]
ANSWER = [IDS[200:203].tolist(), IDS[210:214].tolist(), IDS[220:221].tolist()]


@pytest.mark.parametrize("question_seen", [False, True])
@pytest.mark.parametrize("chunk", [None, 7])
def test_scores_of_padded_rows_equal_forward_on_each(params, question_seen, chunk):
    scores = score(
        params,
        Rows.of(CONTEXT),
        Rows.of(ASKED),
        Rows.of(ANSWER),
        config=CONFIG,
        method=Dense(page=16),
        question_seen=question_seen,
        chunk=chunk,
    )
    for row, parts in enumerate(zip(CONTEXT, ASKED, ANSWER, strict=True)):
        size = len(parts[2])
        nll, best = forward_nll(params, sum(parts, []), size)
        np.testing.assert_allclose(scores.nll[row, :size], nll, atol=TOLERANCE)
        np.testing.assert_array_equal(scores.predicted[row, :size], best)
        assert not scores.nll[row, size:].any()


def test_the_question_is_compressed_only_where_it_is_seen(params):
    def nll(method, seen):
        parts = Rows.of(CONTEXT), Rows.of(ASKED), Rows.of(ANSWER)
        return score(params, *parts, config=CONFIG, method=method, question_seen=seen).nll

    np.testing.assert_allclose(nll(Dense(), False), nll(Dense(), True), atol=TOLERANCE)
    # The answer's first logits come from the prompt itself where the question was seen.
    np.testing.assert_allclose(nll(Forgetful(), True)[:, 0], nll(Dense(), True)[:, 0], atol=1e-6)
    assert abs(nll(Forgetful(), False)[:, 0] - nll(Dense(), False)[:, 0]).max() > 0.01
    assert abs(nll(Forgetful(), True)[:, 1] - nll(Forgetful(), False)[:, 1]).max() > 0.01


# --- needle and copy recall ---


def test_needle_prompts_hold_the_needle_at_its_depth():
    prompts = needle_prompts(
        IDS, TOKENIZER, lengths=(500, 900), depths=(0.0, 0.5, 1.0), kind="number", seed=3
    )
    assert [(p.length, p.depth) for p in prompts] == [
        (length, depth) for length in (500, 900) for depth in (0.0, 0.5, 1.0)
    ]
    for prompt in prompts:
        context = decoded(prompt.context)
        answer = decoded(prompt.answer)
        needle_line = f"\n\nRemember this: the secret number is{answer}.\n\n"
        assert context.count(needle_line) == 1
        at = context.index(needle_line)
        before = context[:at].removeprefix("<bos><turn>user\n")
        assert prompt.depth in (0, 1) or before[-1] in ".!?\n"
        text = len(context) - len("<bos><turn>user\n") - len(needle_line)
        # A sentence boundary lies at most half of the longest sentence (55 bytes) away.
        assert abs(len(before) - prompt.depth * text) <= 28
        whole = [*prompt.context, *prompt.question, *prompt.answer]
        assert len(whole) == prompt.length
        assert whole.count(BOS_ID) == 1
        assert decoded(whole).endswith(
            "\n\nWhat is the secret number mentioned in the text above?<eos>\n<turn>assistant\n"
            f"The secret number is{answer}"
        )


def test_a_chat_has_one_bos_whoever_writes_it():
    silent = tiny_tokenizer()
    silent.chat_template = TEMPLATE.removeprefix("<bos>")
    silent.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    for tokenizer in (TOKENIZER, silent):
        before, after = chat_parts(tokenizer, " Why?", "Since")
        assert [*before, *after].count(BOS_ID) == 1
        assert tokenizer.decode(before) == "<bos><turn>user\n"
        assert tokenizer.decode(after) == " Why?<eos>\n<turn>assistant\nSince"


def test_a_bos_of_the_text_does_not_come_to_stand_in_the_chat():
    ids = haystack([BOS_ID, *IDS.tolist()], TOKENIZER, CONFIG)
    np.testing.assert_array_equal(ids, haystack(IDS, TOKENIZER, CONFIG))
    assert BOS_ID not in ids and len(ids) == len(IDS)


def test_copy_prompts_ask_for_a_passage_of_the_text():
    prompts = copy_prompts(
        IDS, TOKENIZER, lengths=(600,), depths=(0.0, 0.4, 1.0), passage=50, cue=10
    )
    for prompt in prompts:
        context, question = decoded(prompt.context), decoded(prompt.question)
        answer = decoded(prompt.answer)
        cue = question[-10:]
        assert question.count(cue) == 2 and cue + answer in context
        assert len(prompt.answer) == 50
        assert (
            len(context)
            + len(question)
            + len(answer)
            - context.count("<bos>") * 4
            - (context.count("<turn>") + question.count("<turn>")) * 5
            - question.count("<eos>") * 4
            == 600
        )


@pytest.mark.parametrize(("kind", "seen", "batch"), [("word", False, 2), ("number", True, 3)])
def test_needle_equals_forward(params, kind, seen, batch):
    grid = {"lengths": (300, 420), "depths": (0.0, 0.3, 0.9)}
    result = needle(
        params,
        IDS,
        config=CONFIG,
        tokenizer=TOKENIZER,
        method=Dense(),
        kind=kind,
        question_seen=seen,
        batch=batch,
        progress=False,
        **grid,
    )
    prompts = needle_prompts(IDS, TOKENIZER, kind=kind, seed=0, **grid)
    assert result.question_seen is seen and len(result.trials) == 6
    for trial, prompt in zip(result.trials, prompts, strict=True):
        whole = [*prompt.context, *prompt.question, *prompt.answer]
        nll, best = forward_nll(params, whole, len(prompt.answer))
        assert (trial.length, trial.depth) == (prompt.length, prompt.depth)
        assert trial.nll == pytest.approx(nll.mean(), abs=TOLERANCE)
        right = best == np.asarray(prompt.answer)
        assert trial.hit == right.all() and trial.accuracy == pytest.approx(right.mean())
    assert result.hits == sum(trial.hit for trial in result.trials)
    assert result.nll == pytest.approx(np.mean([trial.nll for trial in result.trials]))
    assert result.cache_bytes_bf16 == dense_bytes_bf16(CONFIG, 420)
    assert result.cache_bytes >= 2 * result.cache_bytes_bf16  # float32


def test_copy_recall_equals_forward(params):
    grid = {"lengths": (400,), "depths": (0.0, 1.0), "passage": 40, "cue": 8}
    result = copy_recall(
        params,
        IDS,
        config=CONFIG,
        tokenizer=TOKENIZER,
        method=Dense(),
        progress=False,
        **grid,
    )
    for trial, prompt in zip(result.trials, copy_prompts(IDS, TOKENIZER, **grid), strict=True):
        whole = [*prompt.context, *prompt.question, *prompt.answer]
        assert trial.nll == pytest.approx(forward_nll(params, whole, 40)[0].mean(), abs=TOLERANCE)


def test_a_hit_is_what_greedy_decoding_writes(params):
    context, asked = CONTEXT[0], ASKED[0]
    greedy: list[int] = []
    for _ in range(4):
        logits = forward(
            params,
            jnp.asarray([[*context, *asked, *greedy]], jnp.int32),
            jnp.asarray([27 + len(greedy)], jnp.int32),
            config=CONFIG,
        )
        greedy.append(int(logits[0, -1].argmax()))
    other = [*greedy[:2], (greedy[2] + 1) % 256, greedy[3]]
    scores = score(
        params,
        Rows.of([context] * 2),
        Rows.of([asked] * 2),
        Rows.of([greedy, other]),
        config=CONFIG,
        method=Dense(),
    )
    assert scores.predicted[0].tolist() == greedy
    assert scores.predicted[1, :3].tolist() == greedy[:3]


def test_needle_answers_depend_on_the_seed_alone():
    one, two = hidden_answers("word", 5, 1), hidden_answers("word", 5, 2)
    assert one == hidden_answers("word", 5, 1) != two
    assert len(set(hidden_answers("word", 20, 0))) == 20
    assert all(100_000 <= int(number) < 1_000_000 for number in hidden_answers("number", 9, 0))


NEEDLE = {"lengths": (300,), "depths": (0.5,)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "sentence"}, "kind='sentence'"),
        ({"depths": ()}, "empty grid"),
        ({"lengths": ()}, "empty grid"),
        ({"depths": (0.5, 1.5)}, "depth 1.5"),
        ({"lengths": (300, 5000)}, "context=5000"),
        ({"lengths": (60,)}, "length=60"),
        ({"lengths": (900,), "tokens": IDS[:200]}, "200 tokens"),
        ({"batch": 0}, "batch=0"),
        ({"tokenizer": tiny_tokenizer(chat=False)}, "no chat template"),
    ],
)
def test_needle_refuses(change, says):
    arguments = {"tokens": IDS, "tokenizer": TOKENIZER} | NEEDLE | change
    with pytest.raises(ValueError, match=says):
        needle({}, config=CONFIG, method=Dense(), progress=False, **arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"passage": 0}, "passage=0"),
        ({"cue": 0}, "cue=0"),
        ({"lengths": (200,)}, "length=200 is too short"),
        ({"depths": (-0.1,)}, "depth -0.1"),
        ({"tokenizer": tiny_tokenizer(chat=False)}, "no chat template"),
    ],
)
def test_copy_recall_refuses(change, says):
    arguments = {"tokens": IDS, "tokenizer": TOKENIZER} | NEEDLE | change
    with pytest.raises(ValueError, match=says):
        copy_recall({}, config=CONFIG, method=Dense(), progress=False, **arguments)


# --- bytes and reports ---


def test_bytes_of_a_cache_and_of_the_dense_one():
    tree = {"k": jnp.zeros((2, 3), jnp.bfloat16), "n": (jnp.zeros(5, jnp.int32),)}
    assert cache_bytes(tree) == 2 * 3 * 2 + 5 * 4
    assert cache_bytes(jax.eval_shape(lambda: tree)) == 32
    # SmolLM2: 30 layers, 3 KV heads of 64: 23 040 bytes a token.
    smol = tiny_config(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576)
    assert dense_bytes_bf16(smol, 1) == 23_040
    assert dense_bytes_bf16(smol, 100, rows=2) == 4_608_000
    with pytest.raises(ValueError, match="-1"):
        dense_bytes_bf16(smol, -1)


def result_of_four() -> RecallResult:
    trials = tuple(
        Trial(length, depth, hit, float(hit), nll, " falcon", " falcon" if hit else " a")
        for length, depth, hit, nll in [
            (1024, 0.0, True, 0.125),
            (1024, 1.0, True, 0.25),
            (4096, 0.0, False, 3.5),
            (4096, 1.0, True, 0.0),
        ]
    )
    return RecallResult(trials, False, 1000, 2000)


def test_the_table_is_a_grid():
    assert describe(result_of_four()).splitlines() == [
        "depth  1024 tokens  4096 tokens",
        "-------------------------------",
        "   0%    hit 0.125   miss 3.500",
        " 100%    hit 0.250    hit 0.000",
        "  all    2/2 0.188    1/2 1.750",
        "3/4 hits, nll 0.9688, accuracy 0.750, question not seen by the cache",
        "cache 1,000 bytes, 50.0% of dense bf16 (2,000)",
    ]


def test_json_holds_the_totals_and_every_cell(params):
    plain = json.loads(json.dumps(as_dict(result_of_four())))
    assert plain["hits"] == 3 and plain["trials"] == 4 and plain["nll"] == 0.96875
    assert plain["cache_bytes"] == 1000 and plain["cache_bytes_bf16"] == 2000
    assert [cell["hit"] for cell in plain["cells"]] == [True, True, False, True]
    result = perplexity(
        params, IDS[:64], config=CONFIG, method=Dense(), context=32, stride=8, progress=False
    )
    plain = json.loads(json.dumps(as_dict(result)))
    assert plain["tokens"] == 40 and plain["perplexity"] == pytest.approx(np.exp(plain["nll"]))
    assert "perplexity" in describe(result) and "40 tokens" in describe(result)


def test_the_heat_map_is_a_png(tmp_path):
    path = tmp_path / "map.png"
    heat_map(result_of_four(), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000
    with pytest.raises(ValueError, match=r"map\.jpg does not end in \.png"):
        heat_map(result_of_four(), tmp_path / "map.jpg")
