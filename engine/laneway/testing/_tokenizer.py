"""A small vocabulary that can be read back, with borders of tokens inside characters.

Pure: no trio, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laneway.decoder import InvalidRequestError, Written

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BEGIN = "<|begin|>"
END = "<|end|>"
TURN = "<|turn|>"
TURN_END = "<|turn_end|>"

SCRIPTED_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|turn_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""The chat template of :class:`ScriptedTokenizer`: jinja2, one ``<|turn|>`` ... ``<|turn_end|>`` a message."""

# What an answer is made of, besides letters: whole words, whole characters, and pieces that end or begin inside one.
_ANSWER_PIECES = (
    b" the",
    b" a",
    b"ing",
    b"\n\n",
    "é".encode(),
    " €".encode(),
    "日本".encode(),
    "😀".encode(),
    b"caf\xc3",  # "caf" and the first half of an e acute ...
    b"\xa9 ",  # ... and its second half
    b" \xe2\x82",  # two thirds of a euro sign ...
    b"\xac.",  # ... and the rest
    b"\xf0\x9f",  # half of an emoji ...
    b"\x98\x80!",  # ... and the other half
)
_PROMPT_PIECES = (b"system\n", b"user\n", b"assistant\n", b"Hello", b" world")
_SPECIAL = (BEGIN, END, TURN, TURN_END)


class ScriptedTokenizer:
    """Implements :class:`laneway.decoder.Tokenizer` with 256 byte tokens, some longer pieces and four special tokens.

    Every text can be tokenised and read back.  Some pieces end in the middle of a UTF-8 character, and they are taken
    where they fit (the longest piece wins), so that text is cut where an engine must not cut it.  Both ``<|end|>`` and
    ``<|turn_end|>`` end an answer.

    :param chat_template: jinja2 text, or None for a model that knows no chats
    :param bos: whether a prompt begins with ``<|begin|>``
    :param user_defined: texts of user-defined tokens, which follow the special ones
    """

    def __init__(
        self,
        *,
        chat_template: str | None = SCRIPTED_CHAT_TEMPLATE,
        bos: bool = True,
        user_defined: Sequence[str] = (),
    ) -> None:
        if not all(user_defined) or len({*_SPECIAL, *user_defined}) < len(_SPECIAL) + len(user_defined):
            raise ValueError(f"user-defined tokens are texts that differ from each other and from {_SPECIAL}")
        pieces = [bytes([byte]) for byte in range(256)]
        pieces.extend(_ANSWER_PIECES)
        pieces.extend(_PROMPT_PIECES)
        self._pieces = tuple(pieces)
        self._specials = {text: len(pieces) + index for index, text in enumerate(_SPECIAL)}
        first = len(pieces) + len(_SPECIAL)
        self._special_ids = frozenset(self._specials.values())
        self._user_defined = {text: first + index for index, text in enumerate(user_defined)}
        self._whole_texts = {token: text for text, token in (self._specials | self._user_defined).items()}
        # The longest is looked for first, as llama.cpp does.
        self._by_length = sorted(self._whole_texts, key=lambda token: -len(self._whole_texts[token].encode()))
        self._ids = {piece: token for token, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))
        self._chat_template = chat_template
        self._bos = bos

    def __repr__(self) -> str:
        return f"<laneway.testing.ScriptedTokenizer {self.size} tokens>"

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        return len(self._pieces) + len(self._whole_texts)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids of ``<|end|>`` and ``<|turn_end|>``."""
        return frozenset((self._specials[END], self._specials[TURN_END]))

    @property
    def user_defined(self) -> Mapping[str, int]:
        """What the constructor was given, by text."""
        return self._user_defined

    @property
    def chat_template(self) -> str | None:
        """What the constructor was given."""
        return self._chat_template

    @property
    def answer_tokens(self) -> tuple[int, ...]:
        """What a scripted decoder makes answers of: small letters, space, full stop, and the longer pieces, some of
        them not whole characters."""
        letters = [ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz ."]
        return (*letters, *(self._ids[piece] for piece in _ANSWER_PIECES))

    def special_text(self, name: str) -> str:
        """The text of ``bos`` or ``eos``."""
        return {"bos": BEGIN if self._bos else "", "eos": END}.get(name, "")

    def tokenize(self, text: str, *, bos: bool = True, special: bool | Written = False) -> list[int]:
        """Tokens of ``text``: at each place the longest piece that fits.

        Raises :class:`InvalidRequestError` for text that has no UTF-8 form (lone surrogates).
        """
        tokens = [self._specials[BEGIN]] if bos and self._bos else []
        for start, end, token in self._partition(text, special):
            if token is None:
                tokens.extend(self._plain(text[start:end]))
            else:
                tokens.append(token)
        return tokens

    def _partition(self, text: str, special: bool | Written) -> list[tuple[int, int, int | None]]:
        """``text`` cut into whole tokens and what lies between them: ``(start, end, token or None)``, in order."""
        parts: list[tuple[int, int, int | None]] = [(0, len(text), None)]
        for token in self._by_length:
            whole = self._whole_texts[token]
            guarded = token in self._special_ids or (isinstance(special, Written) and token in special.markers)
            if guarded and special is False:
                continue
            spans = iter(special.spans if guarded and isinstance(special, Written) else ((0, len(text)),))
            span = next(spans, None)
            rest: list[tuple[int, int, int | None]] = []
            for start, end, taken in parts:
                at = start
                while taken is None and span is not None:
                    found = text.find(whole, max(at, span[0]), min(end, span[1]))
                    if found >= 0:
                        rest.extend([(at, found, None), (found, found + len(whole), token)])
                        at = found + len(whole)
                    elif span[1] < end:
                        span = next(spans, None)
                    else:
                        break
                rest.append((at, end, taken))
            parts = [part for part in rest if part[0] < part[1]]
        return parts

    def piece(self, token: int) -> bytes:
        """The bytes of ``token``; empty for the special ones.  Raises IndexError beyond the vocabulary."""
        if not 0 <= token < self.size:
            raise IndexError(f"token {token} is not in the vocabulary of {self.size}")
        if token < len(self._pieces):
            return self._pieces[token]
        return b"" if token in self._special_ids else self._whole_texts[token].encode()

    def text(self, tokens: Iterable[int]) -> str:
        """The text that ``tokens`` make, each broken character as one U+FFFD; special tokens are left out."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def name(self, token: int) -> str:
        """How ``token`` is shown to people: the text of special tokens, else its bytes."""
        return self._whole_texts.get(token) or repr(self.piece(token))[1:]

    def _plain(self, text: str) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text has no UTF-8 form: {error}") from None
        tokens, at = [], 0
        while at < len(data):
            length = min(self._longest, len(data) - at)
            while data[at : at + length] not in self._ids:
                length -= 1
            tokens.append(self._ids[data[at : at + length]])
            at += length
        return tokens
