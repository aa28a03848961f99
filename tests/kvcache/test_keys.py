"""Keys: which of them there are, and which file each names.  Rule K5, and what K2 needs of it."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from laneway import CacheKeyError
from laneway._kvcache import _files
from laneway._kvcache._keys import MAX_NAME, NAMED, check_key, check_model, folder_of, path_of

REFUSED = [
    ("", "empty"),
    (".", "no name"),
    ("..", "no name"),
    ("...", "cut off"),
    ("/etc/passwd", "absolute"),
    ("/", "absolute"),
    ("\\\\server\\share", "backslash"),
    ("a\\b", "backslash"),
    ("C:", "drive letter"),
    ("c:chat", "drive letter"),
    ("C:/chat", "drive letter"),
    ("chat\0", "'\\\\x00'"),
    ("chat\n", "'\\\\n'"),
    ("chat\x7f", "'\\\\x7f'"),
    ("chat\u2028", "u2028"),
    ("\ud800", "ud800"),
    ("chat.", "cut off"),
    ("chat ", "cut off"),
    (" chat", "cut off"),
    ("con", "device"),
    ("NUL", "device"),
    ("nul.txt", "device"),
    ("Com1", "device"),
    ("lpt9.kv", "device"),
    ("x" * 257, "257 characters"),
    ("\N{GRINNING FACE}" * 20, "more than 200 bytes"),
]


@pytest.mark.parametrize(("key", "reason"), REFUSED)
def test_K5_a_key_that_names_no_file_inside_is_refused(key: str, reason: str) -> None:
    with pytest.raises(CacheKeyError, match=reason):
        check_key(key)
    with pytest.raises(CacheKeyError):
        path_of(key, "model")


@pytest.mark.parametrize(("part", "reason"), [*REFUSED, ("a//b", "part of it is empty")])
@pytest.mark.parametrize("form", ["users/{}", "users/{}/chat", "{}/chat"])
def test_K5_so_is_a_nested_key_with_such_a_part(form: str, part: str, reason: str) -> None:
    with pytest.raises(CacheKeyError):
        path_of(form.format(part), "model")


@pytest.mark.parametrize("key", [None, 5, b"chat", Path("chat"), True])
def test_K5_a_key_is_a_str(key: object) -> None:
    with pytest.raises(CacheKeyError, match="a key is a str"):
        check_key(key)


@pytest.mark.parametrize("model", ["", "  ", ".", "..", "../x", "a/../b", "/x", "x/", "a\\..\\b", "x\0", "x" * 300])
def test_K5_a_model_that_could_mean_more_than_a_file_is_refused(model: str) -> None:
    with pytest.raises(CacheKeyError):
        check_model(model)
    with pytest.raises(CacheKeyError):
        path_of("chat", model)


@pytest.mark.parametrize(
    ("key", "model", "path"),
    [
        ("chat-1", "smollm2", "named/chat-1/=smollm2.kv"),
        ("users/42/chat", "smollm2", "named/users/42/chat/=smollm2.kv"),
        ("Chat", "SmolLM2", "named/chat/=smollm2.kv"),
        ("chat?", "org/model:x", "named/chat%3f/=org%2fmodel%3ax.kv"),
        ("=x.kv", "m", "named/%3dx.kv/=m.kv"),
        ("100%", "m", "named/100%25/=m.kv"),
        ("Größe", "m", "named/gr%c3%b6sse/=m.kv"),
    ],
)
def test_what_a_key_and_a_model_name(key: str, model: str, path: str) -> None:
    assert path_of(key, model) == path


keys = st.text(min_size=1, max_size=8) | st.from_regex(
    r"[a-zA-Z0-9._ :=%-]{1,20}(/[a-zA-Z0-9._-]{1,20}){0,3}", fullmatch=True
)


def _path(key: str, model: str = "m") -> str:
    try:
        return path_of(key, model)
    except CacheKeyError:
        assume(False)
        raise AssertionError from None


@given(keys)
def test_K5_whatever_is_taken_lies_inside_and_is_a_name_everywhere(key: str) -> None:
    path = PurePosixPath(_path(key))
    assert path.parts[0] == NAMED
    assert len(path.parts) == 2 + len(check_key(key))
    for part in path.parts:
        assert part not in (".", "..")
        assert part.isascii()
        assert part == part.lower()
        assert part[-1] not in ". "
        assert len(part) <= MAX_NAME + len("=.kv")
        assert not set(part) & set('\\:*?"<>|\0 ')
    assert os.path.normpath(f"/root/{path}") == f"/root/{path}"


@given(keys, keys)
@example("Chat", "chat")
@example("e\u0301t\u00e9", "\u00e9te\u0301")
@example("a", "a/=m.kv")
@example("a=", "a%3d")
def test_K2_two_keys_share_a_path_if_and_only_if_a_disk_could_take_them_for_one(one: str, two: str) -> None:
    def seen(key: str) -> str:
        return unicodedata.normalize("NFC", unicodedata.normalize("NFC", key).casefold())

    assert (_path(one) == _path(two)) == (seen(one) == seen(two))


@given(keys, keys)
def test_no_key_is_in_the_way_of_another(one: str, two: str) -> None:
    # A file of one key is no directory of another.
    assert not PurePosixPath(_path(two)).is_relative_to(_path(one)) or _path(one) == _path(two)
    assert not folder_of(two).startswith(_path(one) + "/")


# Links.


def test_K2_a_link_and_what_it_leads_to_are_one_place(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "named/chat-1").mkdir(parents=True)
    (root / "named/alias").symlink_to("chat-1")
    places = {_files.place(root, NAMED, path_of(key, "m"), key) for key in ("chat-1", "alias", "Alias", "CHAT-1")}
    assert places == {root / "named/chat-1/=m.kv"}


@pytest.mark.parametrize("target", ["..", "../..", "/", "../automatic", "../../outside"])
def test_K5_a_link_that_leads_out_is_refused(tmp_path: Path, target: str) -> None:
    root = tmp_path.resolve() / "kv"
    (root / "named").mkdir(parents=True)
    (root / "automatic").mkdir()
    (tmp_path / "outside").mkdir()
    (root / "named/alias").symlink_to(target)
    with pytest.raises(CacheKeyError, match="leads out"):
        _files.place(root, NAMED, path_of("alias", "m"), "alias")


def test_K5_a_link_to_the_directory_of_all_keys_does_not_widen_a_deletion(tmp_path: Path) -> None:
    root = tmp_path.resolve() / "kv"
    (root / "named").mkdir(parents=True)
    (root / "named/alias").symlink_to(".")
    with pytest.raises(CacheKeyError, match="leads out"):
        _files.place(root, NAMED, folder_of("alias"), "alias")


def test_K5_a_link_that_leads_round_in_circles_is_refused(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "named/chat").mkdir(parents=True)
    (root / "named/chat/=m.kv").symlink_to("=m.kv")
    with pytest.raises(CacheKeyError, match="circles"):
        _files.place(root, NAMED, path_of("chat", "m"), "chat")
