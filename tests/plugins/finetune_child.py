"""A training process that trains nothing, for tests of how processes are treated.  Its job says what it does.

    python finetune_child.py

Standard library only, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO


def say(event: str, **fields: Any) -> None:
    """Report an event."""
    write(sys.stdout, json.dumps({"event": event, **fields}))


def write(stream: TextIO, text: str) -> None:
    """A line that is seen at once."""
    stream.write(text + "\n")
    stream.flush()


def main() -> None:
    """One training, as ``job["how"]`` says."""
    job = json.loads(sys.stdin.readline())
    told = threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            told.set()
        if job["how"] != "deaf":
            os._exit(7)

    threading.Thread(target=listen, daemon=True).start()
    say("started", steps=3, start_step=0, base="f32", parameters=1)
    how = job["how"]
    if how == "look":
        try:
            score = Path("/proc/self/oom_score_adj").read_text().strip()
        except OSError:
            score = ""
        write(sys.stderr, f"{os.environ.get('GGML_NO_BACKTRACE')} {sys.path[0] == os.getcwd()} {score}")
        return
    if how == "abort":
        write(sys.stderr, "GGML_ASSERT(false) failed")
        os.kill(os.getpid(), signal.SIGABRT)
    if how == "garbage":
        write(sys.stdout, "no event at all")
    if how == "talkative":
        sys.stderr.write("log\n" * 200_000)
        sys.stderr.flush()
    if how in ("garbage", "forever", "deaf"):
        while True:
            time.sleep(60)
    for step in range(1, 4):
        say("step", epoch=0, step=step, loss=1.0 / step, learning_rate=0.1, tokens=10, seconds=0.1)
        if how == "pausing" and step == 2:
            told.wait()
            say("paused", step=step)
            return
    Path(job["output"]).write_bytes(b"GGUF")
    say("done", step=3, adapter=job["output"])


if __name__ == "__main__":
    main()
