from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from laneway.decoder import Sampling
from laneway.testing import GuestRun, ScriptedDecoder, ScriptedTokenizer, strategies


@given(st.data(), st.integers(3, 80))
def test_prompts_fit_the_window(data: st.DataObject, window: int) -> None:
    prompt = data.draw(strategies.prompts(window))
    assert 1 <= len(prompt) < window
    assert data.draw(strategies.prompts(window, min_size=2, max_size=2))[1:]
    ScriptedDecoder(window=window).open(0, Sampling(), prompt)


@pytest.mark.parametrize("length", [16, 17, 63])
def test_prompts_reach_the_edges(length: int) -> None:
    # Found within a few hundred draws, or `find` raises.
    found = find(strategies.prompts(64), lambda prompt: len(prompt) == length, settings=settings(max_examples=500))
    assert len(found) == length


def test_prompts_that_cannot_fit_are_refused() -> None:
    for options in [{"min_size": 0}, {"max_size": 64}, {"min_size": 3, "max_size": 2}]:
        with pytest.raises(ValueError, match="shorter than a window of 64"):
            strategies.prompts(64, **options)


@given(strategies.samplings(), strategies.texts())
def test_samplings_and_texts_are_taken(sampling: Sampling, text: str) -> None:
    decoder = ScriptedDecoder()
    decoder.check(sampling)
    assert text
    assert ScriptedTokenizer().tokenize(text, special=True)


@given(strategies.request_shapes(window=20, slots=3))
def test_shapes_fit_their_model(shape: strategies.RequestShape) -> None:
    assert 1 <= len(shape.prompts) <= 7
    assert all(1 <= len(prompt) < 20 for prompt in shape.prompts)
    assert shape.max_tokens is None or 1 <= shape.max_tokens <= 40
    assert shape.deadline is None or (shape.deadline * 64).is_integer()


def test_batches_go_over_the_slots() -> None:
    assert find(strategies.batch_sizes(4), lambda size: size > 4) == 5
    assert find(strategies.batch_sizes(1), lambda size: size > 2) == 3
    assert find(strategies.step_seconds(), lambda seconds: seconds > 0) in (1 / 64, 1 / 8, 1.0)


def test_task_orders_vary_and_repeat() -> None:
    orders: dict[object, tuple[int, ...]] = {}

    @given(strategies.task_orders())
    def order(drawn: object) -> None:
        ran: list[int] = []

        async def note(number: int) -> None:
            ran.append(number)

        with GuestRun() as run:
            run.step(lambda: [run.start_soon(note, number) for number in range(5)])
        assert orders.setdefault(repr(drawn), tuple(ran)) == tuple(ran)

    order()
    assert len(set(orders.values())) > 5


@pytest.mark.parametrize("module", ["strategies", "machines"])
def test_without_hypothesis_only_these_are_missed(module: str) -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import laneway.testing as testing\n"
        "testing.ScriptedDecoder(); testing.GuestRun().close()\n"
        "try:\n"
        f"    import laneway.testing.{module}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"laneway.testing.{module} needs Hypothesis: python -m pip install hypothesis\n"
