"""Data files to tokens, by a model's own tokenizer and template."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import trio

from laneway import InvalidRequestError, Model
from laneway_plugins._finetune_data import (
    Chat,
    Example,
    Faults,
    Marked,
    Parts,
    Render,
    close_answers,
    decode,
    ending_at,
    mark,
    masked,
    parse_chats,
    pieces,
    split,
    windows,
)
from laneway_plugins._finetune_formats import looks_like_chats
from laneway_plugins._messages import Message
from laneway_plugins._prompts import rendered_to_tokens, template_of, text_to_tokens
from laneway_plugins._templates import Rendered

log = logging.getLogger("laneway.finetune")

Format = Literal["auto", "text", "chat"]
"""Of a data file; ``auto``: chats if it is JSON, by its content or its name, else text."""

OffLoop = Callable[..., Awaitable[Any]]
"""Runs a function that blocks, with its arguments, beside the event loop."""


_CHATS_AT_ONCE = 16
"""How many are written out in one go beside the event loop."""


@attrs.frozen
class Dataset:
    """What is learned, and what the learning is measured with."""

    train: tuple[Example, ...] = attrs.field(repr=False)
    validation: tuple[Example, ...] = attrs.field(default=(), repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(example.tokens) for example in (*self.train, *self.validation))


@attrs.frozen(kw_only=True)
class Reader:
    """How data files are read for one model.  ``length``: the tokens of the longest sequence."""

    model: Model
    length: int
    format: Format
    truncate: bool
    off_loop: OffLoop

    async def read(self, path: Path, validation: float | Path | None, seed: int) -> Dataset:
        """The data of a file, and of another or of a share of it to measure with.

        Raises :class:`InvalidRequestError` for what is wrong with them, lines by their numbers.
        """
        examples = await self._examples(path, "dataset")
        if validation is None:
            return Dataset(tuple(examples))
        if isinstance(validation, Path):
            return Dataset(tuple(examples), tuple(await self._examples(validation, "validation")))
        train, measured = split(examples, validation, seed)
        return Dataset(tuple(train), tuple(measured))

    async def _examples(self, path: Path, field: str) -> list[Example]:
        try:
            data: bytes = await self.off_loop(path.read_bytes)
        except OSError as error:
            raise InvalidRequestError(f"{path}: {error.strerror or error}", field) from error
        try:
            text: str = await self.off_loop(decode, data, path.name)
            chats = self.format == "chat"
            if self.format == "auto":
                chats = await self.off_loop(looks_like_chats, text, path.suffix)
            if chats:
                return await self._chats(await self.off_loop(parse_chats, text, path.name), path.name)
            return await self._text(text, path.name)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, field) from error

    async def _text(self, text: str, name: str) -> list[Example]:
        examples = windows(await text_to_tokens(self.model, text), self.length)
        if not examples:
            raise InvalidRequestError(f"{name}: there is nothing in it to learn")
        return examples

    async def _chats(self, chats: Sequence[Chat], name: str) -> list[Example]:
        if not self.model.tokenizer.chat_template:
            raise InvalidRequestError(
                f"{name}: model {self.model.name!r} has no chat template, so it cannot be trained on chats; "
                "train it on plain text"
            )
        of_model = await template_of(self.model)

        def render(messages: Sequence[Message], asking: bool) -> Rendered:
            return of_model.template.render(messages, generation_prompt=asking)

        faults = Faults(name, len(chats), chats[0].unit)
        closing = await self._closing(render, of_model.markers)
        examples = []
        answers = unclosed = 0
        for start in range(0, len(chats), _CHATS_AT_ONCE):
            some = chats[start : start + _CHATS_AT_ONCE]
            # A template takes a while, and others have work to do meanwhile.
            for chat, found in zip(some, await self.off_loop(_mark_each, render, some), strict=True):
                try:
                    if isinstance(found, InvalidRequestError):
                        raise found
                    for marked in found:
                        parts, open_ones = close_answers(
                            await self._tokens(marked, of_model.markers),
                            self.model.tokenizer.end_tokens,
                            closing,
                            self._is_blank,
                        )
                        answers += len(marked.spans)
                        unclosed += open_ones
                        tokens, mask = masked(parts, self.model.tokenizer.end_tokens)
                        examples.append(self._fit(Example(tokens, mask, chat.line)))
                except InvalidRequestError as error:
                    faults.add(chat.line, error.reason)
        faults.check()
        if unclosed:
            log.warning(
                "%s: the chat template of model %r writes nothing that ends an answer behind %d of %d answers, so the "
                "adapter may never learn to end; give max_tokens or stop strings when you use it, or train on plain "
                "text with the end token in it",
                name,
                self.model.name,
                unclosed,
                answers,
            )
        return examples

    async def _closing(self, render: Render, markers: frozenset[int]) -> list[int]:
        """What the template writes behind an answer when another turn follows, up to the token that ends the answer."""
        answered = (Message("user", "a"), Message("assistant", "b"))
        try:
            short: Rendered = await self.off_loop(render, answered, False)
            long: Rendered = await self.off_loop(render, (*answered, Message("user", "c")), False)
        except InvalidRequestError:
            return []  # such a chat is not for this template
        if not long.text.startswith(short.text):
            return []
        tokens = await rendered_to_tokens(self.model, short, markers)
        more = await rendered_to_tokens(self.model, long, markers)
        if more[: len(tokens)] != tokens:
            return []
        return ending_at(more[len(tokens) :], self.model.tokenizer.end_tokens, self._is_blank)

    def _is_blank(self, token: int) -> bool:
        return self.model.tokenizer.piece(token).isspace()

    def _fit(self, example: Example) -> Example:
        if len(example.tokens) > self.length:
            if not self.truncate:
                raise InvalidRequestError(
                    f"the chat has {len(example.tokens)} tokens and context_length is {self.length}; "
                    "raise that, shorten the chat, or cut its end off with truncate=True"
                )
            example = Example(example.tokens[: self.length], example.mask[: self.length], example.line)
            if not example.counted:
                raise InvalidRequestError(
                    f"the first {self.length} tokens hold nothing of an answer; raise context_length, or leave it out"
                )
        if not example.counted:
            raise InvalidRequestError("the answers make no tokens: there is nothing to learn")
        return example

    async def _tokens(self, marked: Marked, markers: frozenset[int]) -> Parts:
        rendered = marked.rendered
        whole = await rendered_to_tokens(self.model, rendered, markers)
        borders = [0]
        for place in (place for span in marked.spans for place in span):
            # There may be hundreds, and what is tokenised in no time is tokenised without a turn for others.
            await trio.lowlevel.checkpoint()
            before = whole
            if place < len(rendered.text):
                before = await rendered_to_tokens(self.model, rendered.cut(0, place), markers)
            if whole[: len(before)] != before or len(before) < borders[-1]:
                # A token reaches over the border.  The model will be shown the text before it alone, so this is where
                # tokens have to end.
                return await self._apart(marked, markers)
            borders.append(len(before))
        borders.append(len(whole))
        return [(whole[start:end], bool(index % 2)) for index, (start, end) in enumerate(itertools.pairwise(borders))]

    async def _apart(self, marked: Marked, markers: frozenset[int]) -> list[tuple[list[int], bool]]:
        parts: list[tuple[list[int], bool]] = []
        for piece, answer in pieces(marked):
            if parts:
                tokens = await self.model.tokenize(piece.text, bos=False, special=piece.special(markers))
            else:
                tokens = await rendered_to_tokens(self.model, piece, markers)
            parts.append((tokens, answer))
        return parts


def _mark_each(render: Render, chats: Sequence[Chat]) -> list[list[Marked] | InvalidRequestError]:
    def each(chat: Chat) -> list[Marked] | InvalidRequestError:
        try:
            return mark(render, chat.messages)
        except InvalidRequestError as error:
            return error

    return [each(chat) for chat in chats]
