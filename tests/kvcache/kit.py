"""A scripted model with a cache directory, and conversations on it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio

import laneway
from laneway import CacheReport, Sampling
from laneway._kvcache._keys import path_of
from laneway._kvcache._locks import FileLock
from laneway.testing import ScriptedLoader
from laneway_plugins import completion
from laneway_plugins.completion import Completion
from tests.plugins.scripted import STEP as STEP
from tests.plugins.scripted import Scripted

MODEL = "model"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}

_Result = TypeVar("_Result")


def threads_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let what goes to worker threads happen on the spot, so that virtual time says in which order things come."""

    async def run_sync(function: Callable[..., _Result], *args: Any, **how: Any) -> _Result:
        await trio.lowlevel.checkpoint()
        return function(*args)

    patch.setattr(trio.to_thread, "run_sync", run_sync)
    patch.setattr(trio.from_thread, "check_cancelled", lambda: None)


@contextlib.contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """Nobody may look into ``folder``: a real mode would not keep root out."""
    inside = str(folder)

    def denying(function: Callable[..., Any], *, itself: bool) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **how: Any) -> Any:
            name = "" if isinstance(path, int) else os.fsdecode(path)
            if name.startswith(inside + os.sep) or (itself and name == inside):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            return function(path, *args, **how)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat", "open", "mkdir", "listdir", "unlink", "rmdir", "utime"):
            patch.setattr(os, name, denying(getattr(os, name), itself=name == "listdir"))
        yield


@attrs.define
class Talk:
    """A conversation: what has been said, and how the last answer's cache ended."""

    model: laneway.Model
    kv_cache: str | bool | None
    messages: list[dict[str, str]] = attrs.field(factory=lambda: [{"role": "system", "content": "Be brief."}])

    async def say(self, text: str, **how: Any) -> Completion:
        """One turn, which becomes part of the conversation if it ends well."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = await completion.complete(self.model, messages, kv_cache=self.kv_cache, **{**GREEDY, **how})
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def report(answer: Completion) -> CacheReport:
    """What became of the cache."""
    assert answer.stats.cache is not None
    return answer.stats.cache


def cold(s: Scripted, messages: list[dict[str, str]], **how: Any) -> tuple[int, ...]:
    """The tokens of the last message, which is an answer, as a sequence alone would get them."""
    template = "".join(f"<|turn|>{m['role']}\n{m['content']}<|turn_end|>\n" for m in messages[:-1])
    prompt = s.tokenizer.tokenize(template + "<|turn|>assistant\n", special=True)
    settings = {**GREEDY, **how}
    max_tokens = settings.pop("max_tokens")
    return s.decoder.expected(prompt, Sampling(**settings), max_tokens).tokens


@attrs.frozen
class Directory:
    """The files of a cache directory."""

    top: Path

    @property
    def kv(self) -> Path:
        return self.top / "kv"

    def file(self, key: str, model: str = MODEL) -> Path:
        return self.kv / path_of(key, model)

    def files(self) -> dict[str, bytes]:
        """Everything in there, temporary files and locks included."""
        return {
            str(path.relative_to(self.kv)): path.read_bytes() for path in sorted(self.kv.rglob("*")) if path.is_file()
        }

    def folders(self) -> list[str]:
        """The directories that hold nothing, but for that of the locks."""
        return [
            str(path.relative_to(self.kv))
            for path in sorted(self.kv.rglob("*"))
            if path.is_dir() and not any(path.iterdir()) and path.name != "locks"
        ]

    @contextlib.contextmanager
    def held(self, path: Path) -> Iterator[None]:
        """Hold a file's lock, as another process would."""
        lock = FileLock(self.kv.resolve(), path)
        assert lock.try_enter()
        try:
            yield
        finally:
            lock.leave()


@asynccontextmanager
async def cached(top: Path, parallel: int = 1, *, name: str = MODEL, **options: Any) -> AsyncIterator[Scripted]:
    """A model whose caches lie below ``top``, for the length of a block."""
    # What is found in memory would be no proof of what is found on the disk.
    settings = {
        "prefix_cache": False,
        "seconds_per_step": 0.0,
        "end_every": None,
        "context_size": 600 * parallel,
        **options,
    }
    loader = ScriptedLoader(**settings)
    async with laneway.open_engine(plugins=[loader.plugin], cache_dir=top) as engine:
        model = await engine.load_model("scripted:model", parallel, name=name)
        yield Scripted(engine, model, loader.decoders["scripted:model"])
    loader.assert_idle()
    for decoder in loader.decoders.values():
        decoder.assert_obeyed()
