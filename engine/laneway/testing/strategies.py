"""Hypothesis strategies for what an engine is asked, weighted towards the edges where engines break.

Needs Hypothesis.  Times are multiples of 1/64 s, which floats hold exactly: deadlines and steps then really meet in one
instant, again and again, instead of missing each other by a rounding error.
"""

from __future__ import annotations

import math

import attrs

from laneway.decoder import Sampling
from laneway.testing._decoder import SCRIPTED_POLICY
from laneway.testing._tokenizer import ScriptedTokenizer

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("laneway.testing.strategies needs Hypothesis: python -m pip install hypothesis") from error

__all__ = [
    "RequestShape",
    "batch_sizes",
    "deadlines",
    "max_tokens",
    "prompts",
    "request_shapes",
    "samplings",
    "step_seconds",
    "task_orders",
    "texts",
    "token_ids",
]


@attrs.frozen(kw_only=True)
class RequestShape:
    """One request, whichever operation it is for: a single one has one prompt, a batch as many as it likes."""

    prompts: tuple[tuple[int, ...], ...]
    """Tokens; each prompt shorter than the window."""
    sampling: Sampling
    max_tokens: int | None
    deadline: float | None
    """Seconds after which its caller gives up; None for never."""


def token_ids() -> st.SearchStrategy[int]:
    """Ordinary tokens of a :class:`ScriptedTokenizer`, from so few that prompts often share beginnings."""
    return st.sampled_from([ord(letter) for letter in "ab c."])


def prompts(
    window: int = 64, *, min_size: int = 1, max_size: int | None = None, chunk: int = SCRIPTED_POLICY.chunk_max
) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts that fit a slot of ``window`` tokens.

    Mostly short ones; often as long as one prefill chunk of ``chunk`` tokens or a token more or less, and often so long
    that one or two tokens are left for the answer.

    :param max_size: at most ``window - 1``, the default
    """
    top = window - 1 if max_size is None else max_size
    if not 1 <= min_size <= top < window:
        raise ValueError(f"prompts of {min_size} to {top} tokens are not all shorter than a window of {window}")
    edges = {min_size, chunk - 1, chunk, chunk + 1, 2 * chunk, window - 2, window - 1}
    lengths = st.one_of(
        st.integers(min_size, min(top, max(min_size, 5))),
        st.sampled_from(sorted(edge for edge in edges if min_size <= edge <= top)),
        st.integers(min_size, top),
    )
    # One drawn list, cut to the drawn length and repeated up to it: long prompts cost few choices and shrink well.
    return st.builds(_prompt, st.lists(token_ids(), min_size=1, max_size=6), lengths)


def texts(max_size: int = 24) -> st.SearchStrategy[str]:
    """Prompts as text, with characters of one to four bytes and text that looks like special tokens."""
    part = st.sampled_from(["a", "Hello", " world", "é", "€", "日本", "😀", "<|end|>", "\n", ""])
    return st.lists(part, min_size=1, max_size=max_size).map("".join).map(lambda text: text[:max_size] or "a")


def samplings(tokenizer: ScriptedTokenizer | None = None) -> st.SearchStrategy[Sampling]:
    """Samplings that a :class:`ScriptedDecoder` takes: greedy or drawn, some that never end, some with logprobs."""
    ends = (tokenizer or ScriptedTokenizer()).end_tokens
    endless = dict.fromkeys(ends, -math.inf)
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.none() | st.integers(0, 3),
        logit_bias=st.sampled_from([{}, {}, {}, endless]),
        logprobs=st.booleans(),
        top_logprobs=st.integers(0, 2),
    )


def max_tokens(window: int = 64) -> st.SearchStrategy[int | None]:
    """How long an answer may be: often one token, sometimes more than the window holds, sometimes no limit."""
    return st.one_of(st.just(1), st.integers(1, 8), st.sampled_from([window, 2 * window]), st.none())


def batch_sizes(slots: int = 4) -> st.SearchStrategy[int]:
    """Prompts in a batch: mostly one, fewer than slots, exactly as many, one more, or more than twice as many."""
    edges = {1, slots - 1, slots, slots + 1, 2 * slots + 1}
    return st.just(1) | st.sampled_from(sorted(edge for edge in edges if edge >= 1))


def step_seconds() -> st.SearchStrategy[float]:
    """What a decode step costs: nothing, or 1/64 to 1 s."""
    return st.sampled_from([0.0, 1 / 64, 1 / 8, 1.0])


def deadlines(longest: float = 8.0) -> st.SearchStrategy[float | None]:
    """Seconds until a caller gives up, 0 included; or None, for a caller who does not."""
    return st.none() | st.integers(0, int(longest * 64)).map(lambda ticks: ticks / 64)


def request_shapes(window: int = 64, slots: int = 4) -> st.SearchStrategy[RequestShape]:
    """Whole requests for a model with ``slots`` slots of ``window`` tokens."""
    sets = batch_sizes(slots).flatmap(
        lambda size: st.lists(prompts(window), min_size=size, max_size=size).map(tuple),
    )
    return st.builds(
        RequestShape,
        prompts=sets,
        sampling=samplings(),
        max_tokens=max_tokens(window),
        deadline=deadlines(),
    )


def task_orders() -> st.SearchStrategy[object]:
    """In which order Trio runs the tasks that could all run: draw one before a run begins, and ignore the value.

    Without it Trio makes the same choices in every example; with it they vary, and are found again with the example.
    """
    return st.random_module()


def _prompt(pattern: list[int], length: int) -> tuple[int, ...]:
    return tuple(pattern[index % len(pattern)] for index in range(length))
