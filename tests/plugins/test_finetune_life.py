"""The life cycle of trainings against a small model of it.

Whatever is done in whatever order, the state is the one that the table of the how-to promises, the lane is free, and a
completed training has the whole curve.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal
from unittest import mock

import attrs
import hypothesis.strategies as st
import trio
import trio.testing
from hypothesis import event, given

from laneway import FinetuneError, InferenceCancelledError
from laneway_plugins import finetune
from laneway_plugins.finetune import Loss
from tests.plugins.finetune_trainer import STEP_SECONDS, ScriptedChild, ScriptedTrainer, loss_of, on_the_loop
from tests.plugins.test_finetune import Bench, bench

STEPS = 4
EVERY = 2
"""Steps between checkpoints."""

End = Literal["result", "pause", "cancel", "leave", "die"]


@attrs.frozen
class Act:
    """Begin a training, anew or from where it was, and end it after so many whole steps, in the midst of the next one.

    Or begin it in the other way, which is refused; or throw away what there is.
    """

    how: Literal["right", "wrong", "discard"]
    end: End
    steps: int


acts = st.lists(
    st.builds(
        Act,
        st.sampled_from(["right"] * 6 + ["wrong", "discard"]),
        st.sampled_from(["result", "pause", "pause", "cancel", "leave", "leave", "die"]),
        st.integers(0, STEPS),
    ),
    min_size=2,
    max_size=8,
)


@attrs.define
class Expected:
    """What there is."""

    checkpoint: int | None = None
    adapter: bool = False
    cancelled: bool = False

    @property
    def state(self) -> str:
        if self.checkpoint is not None:
            return "paused"
        if self.cancelled:
            return "cancelled"
        return "completed" if self.adapter else "idle"

    def follow(self, act: Act) -> str:
        """What the training is in the end, as its run says."""
        start = self.checkpoint or 0
        reached = start + act.steps
        self.cancelled = False
        if act.end == "result" or reached >= STEPS or (act.end == "pause" and reached + 1 >= STEPS):
            self.checkpoint, self.adapter = None, True
            return "completed"
        if act.end == "pause":
            self.checkpoint = reached + 1
            return "paused"
        if act.end == "cancel":
            self.checkpoint, self.cancelled = None, True
            return "cancelled"
        regular = reached - reached % EVERY
        if regular > start:
            self.checkpoint = regular
        return "failed" if act.end == "die" else "left"


async def carry_out(b: Bench, act: Act, *, resumed: bool) -> str:
    """Do it, and tell what the run says."""

    async def dying(child: ScriptedChild) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.train)
            await trio.sleep((act.steps + 0.5) * STEP_SECONDS)
            child.die(9)
            await trio.sleep_forever()

    b.trainer.behave = dying if act.end == "die" and act.steps < STEPS else ScriptedChild.train
    opening = b.resume() if resumed else b.start(checkpoint_every=EVERY)
    try:
        async with opening as training:
            await training.admitted()
            if act.end in ("result", "die"):
                return (await training.result()).state
            await trio.sleep((act.steps + 0.5) * STEP_SECONDS)
            if act.end == "leave" and training.state == "running":
                return "left"
            if act.end == "pause":
                assert await training.pause() == (await training.result()).state
            elif act.end == "cancel":
                training.cancel()
            result = await training.result()
            if result.state == "completed":
                assert result.curve == tuple(Loss(step, loss_of(step)) for step in range(1, STEPS + 1))
            return result.state
    except InferenceCancelledError:
        return "cancelled"
    except FinetuneError as error:
        if "SIGKILL" not in str(error):
            raise
        return "failed"


async def live(actions: list[Act], folder: Path) -> None:
    expected = Expected()
    async with bench(finetune._trainer, folder) as b:  # type: ignore[arg-type]
        for act in actions:
            resumed = expected.checkpoint is not None
            if act.how == "wrong":
                event(f"{'start' if resumed else 'resume'} refused")
                try:
                    async with b.start() if resumed else b.resume():
                        raise AssertionError(f"not refused in state {expected.state}")
                except FinetuneError:
                    pass
            elif act.how == "discard":
                finetune.discard(b.output)
                expected.checkpoint, expected.cancelled = None, False
            else:
                end = expected.follow(act)
                event(f"{'resume' if resumed else 'start'} ends {end}")
                assert await carry_out(b, act, resumed=resumed) == end
            await b.assert_free()
            told = finetune.state(b.output)
            assert told.state == b.state() == expected.state
            if expected.checkpoint is not None:
                assert (told.step, told.steps) == (expected.checkpoint, STEPS)
            assert b.output.exists() is expected.adapter


@given(acts)
def test_every_life_is_as_the_table_says(actions: list[Act]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(finetune, "_trainer", ScriptedTrainer(steps=STEPS)),
        mock.patch.object(finetune, "_off_loop", on_the_loop),
    ):
        trio.run(live, actions, Path(folder), clock=trio.testing.MockClock(autojump_threshold=0))
