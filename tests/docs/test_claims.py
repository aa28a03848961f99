"""The numbers and names that the pages give are those of the code.

The tests of a module hold what its numbers do.  Here a number that changes in the code and not on a page, or
the other way round, is found.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

import laneway
from laneway import _admission, _decode_loop, _outbox, _registry, threads
from laneway._cli import main as program
from laneway._sources import CATALOGUE
from laneway.decoder import BatchPolicy, Sampling
from laneway.testing import check_plugin
from laneway_native import _gbnf, _grammar, _policy, _weights
from laneway_native.training import ARCHITECTURES, _trainer
from laneway_plugins import (
    _finetune_child,
    _finetune_formats,
    _loops,
    _nmt_package,
    _nmt_worker,
    _template_budget,
    _template_variables,
    completion,
    finetune,
    llama,
    nmt,
)
from tests.docs.pages import DOCS

OPTIONS: dict[str, Any] = {field.name: field.default for field in attrs.fields(llama.LlamaOptions)}
NMT: dict[str, Any] = {field.name: field.default for field in attrs.fields(nmt.NmtOptions)}
RETENTION = laneway.CacheRetention()
WORDS = {2: "two", 3: "three", 4: "four", 7: "seven"}


def size(name: str) -> str:
    """Of a model of the catalogue."""
    return f"{(CATALOGUE[name].size or 0) / 1e6:.0f} MB"


def ranges(name: str) -> str:
    """``low to high`` of a field of Sampling, as its validator has it."""
    found = []
    for value in (-100.0, -2.0, -1.0, 0.0, 0.01, 1.0, 2.0, 10.0, 20, 100.0, 1000.0):
        fields: dict[str, Any] = {name: int(value) if name == "top_logprobs" else value}
        try:
            Sampling(**fields)
        except laneway.InvalidRequestError:
            continue
        found.append(value)
    return f"{min(found):g} to {max(found):g}"


README = "../README.md"
EMBED, CONVERSATIONS, MODELS = "howto/embed.md", "howto/conversations.md", "howto/models.md"
FINETUNE, TRANSLATE, PLUGIN = "howto/finetune.md", "howto/translate.md", "howto/write-a-plugin.md"
DESIGN, TRAINING = "explanation/design.md", "explanation/training.md"
API, ERRORS, TESTING = "reference/api.md", "reference/errors.md", "reference/testing.md"

CLAIMS = [
    (README, f"at most `parallel` at once, {_admission.QUEUE_LIMIT} waiting, the next one refused"),
    (README, f"fetches a model of {size('smollm2')}"),
    ("tutorial/first-answers.md", f"fetches SmolLM2-135M-Instruct ({size('smollm2')})"),
    (EMBED, f"at most `queue_limit` of them ({_admission.QUEUE_LIMIT} by default)"),
    (EMBED, f"Once {_outbox.PAUSE_AT} events are unread, decoding of this request stops until half of them are read"),
    (EMBED, f"remembers an unknown id for {_registry.REMEMBERED_SECONDS:.0f} s"),
    (EMBED, f"together at most {_template_variables.MAX_SIZE >> 20} MiB"),
    (EMBED, f"one text of {_template_budget.MAX_VALUE >> 20} MiB more than the chat itself has"),
    (CONVERSATIONS, f"bounded to {(RETENTION.max_bytes or 0) >> 30} GiB together"),
    (CONVERSATIONS, f"to {WORDS[round((RETENTION.max_idle or 0) / 86400)]} days without use"),
    (MODELS, f"SmolLM2 135M Instruct, Q4_1, {size('smollm2')}"),
    (MODELS, f"Gemma 3 270M base, Q4_K_M, {size('gemma3-270m')}"),
    (MODELS, f"None gives each {llama.DEFAULT_WINDOW}, or what the model was trained on if that is less"),
    (MODELS, f"more than {_policy.MOST_UNIFIED_CELLS:,} cells"),
    (FINETUNE, " or ".join(", ".join(f"`{one}`" for one in sorted(_finetune_formats.SUFFIXES)).rsplit(", ", 1))),
    (FINETUNE, f"ends the process within {WORDS[round(_finetune_child.GRACE_SECONDS)]} seconds"),
    (TRANSLATE, f"count toward `parallel` and the {_admission.QUEUE_LIMIT} that may wait".replace("count", "counts")),
    (TRANSLATE, f"more than `longest` pieces ({NMT['longest']})"),
    (TRANSLATE, f"it is cut at {attrs.fields(_nmt_worker.Search).longest.default} pieces"),
    (TRANSLATE, f"more than {_nmt_package.MAX_RATIO} times the size of the file"),
    (TRANSLATE, f"micro-batch of at most {nmt.BEAM_BATCH} chunks"),
    (TRANSLATE, f"{_loops.TOKENS_FOR_EACH} tokens for each token of its text and {_loops.LEAST_TOKENS} more"),
    (TRANSLATE, f"after the same words {WORDS[_loops.LEAST_REPEATS]} times in a row"),
    (TRANSLATE, ", ".join(f"`{name}`" for name in _nmt_package._SENTENCEPIECE_FILES)),
    (DESIGN, f"(`chunk_target`, {BatchPolicy().chunk_target * 1000:.0f} ms by default)"),
    (DESIGN, f"about {OPTIONS['delivery_interval'] * 1000:.0f} ms (the option `delivery_interval`)"),
    (DESIGN, f"short work of the processor, {threads.THREADS} at a time"),
    (DESIGN, f"short work on files, {threads.THREADS} at a time"),
    (DESIGN, f"After {WORDS[_decode_loop.FAILED_STEPS_IN_A_ROW]} in a row"),
    (DESIGN, f"one text has at most {_template_budget.MAX_VALUE >> 20} MiB"),
    (DESIGN, f"one list {_template_budget.MAX_ENTRIES >> 10} Ki entries"),
    (DESIGN, f"{WORDS[_template_budget.MAX_TEXT // 1_000_000]} million characters, or four times the chat"),
    (DESIGN, f"pieces of {_weights.PIECE >> 20} MiB"),
    (DESIGN, f"at rest for {WORDS[round(_weights.AT_REST)]} seconds"),
    (TRAINING, f"passes are full ({_trainer.SMALLEST_PASS} tokens or more)"),
    (API, f"An id that no live request has is remembered for {_registry.REMEMBERED_SECONDS:.0f} s (C5)"),
    (API, f"{1} to {_admission.MAX_PARALLEL} (A2)"),
    (API, f"one string or up to {completion.MAX_STOP_STRINGS} that end the answer"),
    (API, f"at most {threads.THREADS} run at a time (`laneway.threads.THREADS`)"),
    (API, f"`temperature` {ranges('temperature')}, `top_p` and `min_p` {ranges('top_p')}"),
    (API, f"`frequency_penalty` and `presence_penalty` {ranges('presence_penalty')}"),
    (API, f"`repeat_penalty` {ranges('repeat_penalty')}, `top_logprobs` {ranges('top_logprobs')}"),
    (API, f"more than {_gbnf.MOST_CHARACTERS:,} characters, {_gbnf.MOST_RULES:,} rules"),
    (API, f"{_grammar.MOST_ELEMENTS:,} items or {_grammar.MOST_BEGINNINGS:,} beginnings of alternatives"),
    (API, f"may look at {_grammar.MOST_WORK // 1_000_000} million places in the grammar"),
    (API, f"take {_grammar.MOST_SECONDS} s of processor time"),
    (API, ", ".join(f"`{name}`" for name in finetune.MODULES)),
    (ERRORS, f"(`queue_limit`, {_admission.QUEUE_LIMIT} by default)"),
    (ERRORS, f"{WORDS[_decode_loop.FAILED_STEPS_IN_A_ROW]} in a row, and the model counts as failed"),
    (TESTING, f"most: int = {inspect.signature(check_plugin).parameters['most'].default},"),
]


def text_of(page: str) -> str:
    """A page on one line, so that a claim may run over the end of one."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "claim"), CLAIMS, ids=[f"{page}: {claim}" for page, claim in CLAIMS])
def test_a_number_is_the_one_of_the_code(page: str, claim: str) -> None:
    assert claim in text_of(page)


def test_both_figures_of_penalties_have_one_range() -> None:
    assert ranges("frequency_penalty") == ranges("presence_penalty")
    assert ranges("min_p") == ranges("top_p")


def test_keys_that_are_passed_over_are_listed() -> None:
    (listed,) = re.findall(r"The keys (.*?) are passed over", text_of(FINETUNE))
    assert set(re.findall(r"`(\w+)`", listed)) == _finetune_formats._ABOUT


def test_every_scope_is_explained_to_authors_of_plugins() -> None:
    page = (DOCS / PLUGIN).read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {scope.value for scope in laneway.Scope}
    assert {use.value for use in laneway.Use} <= set(re.findall(r"`(\w+)`", page.split("`use` says")[1]))


@pytest.mark.parametrize("page", [PLUGIN, FINETUNE])
def test_the_wait_without_a_bound_is_told_with_what_to_do_about_it(page: str) -> None:
    text = text_of(page)
    for told in ("without a bound", "deadline around", "`queue_timeout`", "second copy of the model", "contract.md#a5"):
        assert told in text


def test_architectures_that_can_be_trained_are_listed() -> None:
    (listed,) = re.findall(r"Architectures (.*?), in one GGUF file", text_of(TRAINING))
    assert set(re.findall(r"`(\w+)`", listed)) == set(ARCHITECTURES)


def test_the_settings_of_the_optimiser_are_those_of_the_page() -> None:
    names = ("beta1", "beta2", "epsilon", "most_norm")
    targets = ", ".join(f"given.{name}" for name in names)
    (given,) = re.findall(rf"{re.escape(targets)} = (.*)", inspect.getsource(_trainer))
    *betas, norm = given.split(", ")
    claim = f"**AdamW** ({', '.join(betas)}) with decoupled weight decay, on a gradient whose length is cut to"
    assert f"{claim} {float(norm):g}." in text_of(TRAINING)


def test_eight_answers_together_take_the_share_of_the_time_that_is_promised() -> None:
    """The README's ratio is the one of the benchmarks: ``job, s`` of one sequence, and of eight."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", (DOCS / "benchmarks.md").read_text(encoding="utf-8"), re.MULTILINE)
    seconds = {int(count): float(cells.split("|")[3]) for count, cells in rows if cells.count("|") == 9}
    (promised,) = re.findall(r"eight answers together take ([\d.]+) of the time", text_of(README))
    assert promised == f"{seconds[8] / (8 * seconds[1]):.2f}"


def test_what_a_checked_plugin_runs_on_is_the_one_of_the_page() -> None:
    (shown,) = re.findall(r"`(parallel=2, context_size=[^`]*)`", text_of(TESTING))
    options = dict(part.split("=") for part in shown.split(", "))
    source = inspect.getsource(inspect.getmodule(check_plugin) or check_plugin)
    found = {name: re.findall(rf'"{name}": ([^,}}\n]+)', source) for name in options}
    assert {name: [value.replace(" ", "") for value in values] for name, values in found.items()} == {
        name: [value] for name, value in options.items()
    }


def help_of(*names: str) -> str:
    """The help of a command on one line."""
    done = CliRunner().invoke(program, [*names, "--help"], prog_name="laneway")
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


HELP = {field.name: field.default for field in attrs.fields(finetune.FinetuneRequest)}
PLAIN = ("rank", "epochs", "context_length", "batch", "learning_rate", "schedule", "warmup", "weight_decay", "seed")


@pytest.mark.parametrize("name", [*PLAIN, "checkpoint_every"])
def test_the_help_of_finetune_has_the_defaults_of_the_request(name: str) -> None:
    option = re.escape(f"--{name.replace('_', '-')} ")
    (shown,) = re.findall(rf"{option}(?:(?! --).)*?\(default: ([^)]*)\)", help_of("finetune"))
    assert shown == str(HELP[name])


def test_the_help_of_finetune_tells_of_defaults_that_are_worked_out() -> None:
    text = help_of("finetune")
    assert "(default: twice the rank)" in text
    request = finetune.FinetuneRequest(dataset="data.jsonl", output="a.gguf", rank=5)
    assert (request.alpha, request.scaling) == (None, 10.0)
    assert HELP["base"] == "auto"
    assert "(default: native)" in text
    assert HELP["modules"] is None
    assert HELP["format"] == "auto"


def test_the_help_of_prune_has_the_bounds_of_automatic_caches() -> None:
    text = help_of("cache", "prune")
    assert f"(default: {(RETENTION.max_bytes or 0) >> 30} GiB)" in text
    assert f"(default: {(RETENTION.max_idle or 0) / 86400:.0f}d)" in text


def test_the_help_of_run_has_the_default_of_sampling() -> None:
    assert f"(default: {Sampling().temperature})" in help_of("run")
