"""Sampling as :class:`laneway.decoder.Sampling` says it, in plain Python: what the C code is compared with.

Written from the docstring, slowly and without a thought for speed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import attrs

from laneway.decoder import Sampling

_MASK = 2**64 - 1


def float32(value: float) -> float:
    """The nearest float of 32 bits."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


class Random:
    """xoshiro256++ with a state from splitmix64."""

    def __init__(self, seed: int) -> None:
        self.state = []
        for _ in range(4):
            seed = (seed + 0x9E3779B97F4A7C15) & _MASK
            z = seed
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
            self.state.append(z ^ (z >> 31))

    def next(self) -> float:
        s = self.state
        result = (_rotated((s[0] + s[3]) & _MASK, 23) + s[0]) & _MASK
        t = (s[1] << 17) & _MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = _rotated(s[3], 45)
        return (result >> 11) * 2.0**-53


def _rotated(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & _MASK


@attrs.define
class Reference:
    """One sequence's sampler.  ``pick`` answers with every token that is right: at a border, rounding may decide."""

    sampling: Sampling
    prompt: Sequence[int]
    end_tokens: frozenset[int] = frozenset()
    """Those are never penalised."""
    answer: list[int] = attrs.field(factory=list)
    random: Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        assert self.sampling.seed is not None
        self.random = Random(self.sampling.seed)

    def adjusted(self, logits: Sequence[float]) -> list[float]:
        """Bias, then the repeat penalty, then the other two, each token's result rounded to 32 bits."""
        out = list(logits)
        for token, bias in self.sampling.logit_bias:
            out[token] = float32(out[token] + bias)
        if self.sampling.repeat_penalty != 1.0:
            touched = set(self.prompt) | set(self.answer)
        else:
            touched = set(self.answer)
        for token in touched - self.end_tokens:
            logit = out[token]
            if self.sampling.repeat_penalty != 1.0:
                logit = logit / self.sampling.repeat_penalty if logit > 0 else logit * self.sampling.repeat_penalty
            count = self.answer.count(token)
            if count:
                logit -= self.sampling.frequency_penalty * count + self.sampling.presence_penalty
            out[token] = float32(logit)
        return out

    def kept(self, logits: Sequence[float], *, top_p: float) -> list[int]:
        """The tokens that the three cuts leave, likeliest first."""
        temperature = self.sampling.temperature
        allowed = [token for token, logit in enumerate(logits) if logit > -math.inf]
        order = sorted(allowed, key=lambda token: (-logits[token], token))
        if self.sampling.top_k:
            order = order[: self.sampling.top_k]
        largest = logits[order[0]]
        weights = [math.exp((logits[token] - largest) / temperature) for token in order]
        if top_p < 1:
            share = top_p * math.fsum(weights)
            total, length = 0.0, 0
            while length < len(order) and (length == 0 or total < share):
                total += weights[length]
                length += 1
            order, weights = order[:length], weights[:length]
        if self.sampling.min_p > 0:
            order = [token for token, weight in zip(order, weights, strict=True) if weight >= self.sampling.min_p]
        return order

    def pick(self, logits: Sequence[float]) -> set[int]:
        """The token that comes next, and its neighbour where 32 bits cannot tell which."""
        adjusted = self.adjusted(logits)
        if self.sampling.temperature == 0:
            return {max(range(len(adjusted)), key=lambda token: (adjusted[token], -token))}
        draw = self.random.next()
        right = set()
        for top_p in self._top_ps():
            tokens = sorted(self.kept(adjusted, top_p=top_p))
            largest = max(adjusted[token] for token in tokens)
            weights = [math.exp((adjusted[token] - largest) / self.sampling.temperature) for token in tokens]
            target = draw * math.fsum(weights)
            margin = 1e-5 * math.fsum(weights)
            total = 0.0
            for token, weight in zip(tokens, weights, strict=True):
                if total - margin <= target <= total + weight + margin:
                    right.add(token)
                total += weight
        return right

    def _top_ps(self) -> list[float]:
        top_p = self.sampling.top_p
        return [top_p] if top_p >= 1 else [max(0.0, top_p - 1e-6), top_p, min(top_p + 1e-6, 0.9999999)]

    def logprobs(self, logits: Sequence[float]) -> list[float]:
        """Natural logarithms of the model's own distribution."""
        largest = max(logits)
        log_sum = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
        return [logit - log_sum for logit in logits]
