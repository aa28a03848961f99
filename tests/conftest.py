"""Settings for all tests.

Hypothesis profiles, picked by the environment variable ``LANEWAY_HYPOTHESIS_PROFILE``:

- ``dev``: 50 examples, the default; where ``CI`` is set they are the same in every run, so that a change fails for its
  own faults alone.
- ``ci``: 500 examples of 50 steps, the blob of a failure printed.
- ``long``: ``LANEWAY_EXAMPLES`` examples (``make stateful EXAMPLES=20000``).

A test must not set ``max_examples`` itself, or it would take part in none of them.
"""

from __future__ import annotations

import os

import hypothesis

# ggml would fork a debugger when it aborts, and a test that waits for one looks like a hang.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

# Examples that run a whole Trio loop take as long as they take: a deadline would only measure the machine.
_common = hypothesis.settings(deadline=None)
hypothesis.settings.register_profile("dev", _common, max_examples=50, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.register_profile("ci", _common, max_examples=500, stateful_step_count=50, print_blob=True)
hypothesis.settings.register_profile(
    "long",
    _common,
    max_examples=int(os.environ.get("LANEWAY_EXAMPLES", "20000")),
    stateful_step_count=50,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("LANEWAY_HYPOTHESIS_PROFILE", "dev"))
