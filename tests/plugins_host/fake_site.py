"""Distributions that are not installed: modules and ``.dist-info`` folders in a directory on ``sys.path``."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from laneway import Operation, Prepared, _plugins


@attrs.frozen
class FakeSite:
    """A ``site-packages`` of a test's own."""

    path: Path

    def add(
        self,
        distribution: str,
        modules: Mapping[str, str],
        entry_points: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        raw: str | None = None,
        metadata: bool = True,
    ) -> None:
        """A distribution with these modules (name to source); ``raw`` is an ``entry_points.txt`` as it stands."""
        for name, source in modules.items():
            assert name not in sys.modules, f"{name} would hide what the test writes"
            (self.path / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata:
            text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
        if raw is None:
            lines = (f"{name} = {value}\n" for name, value in (entry_points or {}).items())
            raw = "[laneway]\n" + "".join(lines)
        (info / "entry_points.txt").write_text(raw, encoding="utf-8")
        importlib.invalidate_caches()

    def plugin(self, name: str, source: str, **more: Any) -> None:
        """A distribution ``laneway-NAME`` with the module ``laneway_NAME`` and an entry point NAME."""
        module = f"laneway_{name.replace('-', '_')}"
        self.add(f"laneway-{name}", {module: source}, {name: module}, **more)


@contextmanager
def fake_site(tmp_path: Path) -> Iterator[FakeSite]:
    """A site on ``sys.path``, no built-in plugins, no variables, and everything as before in the end."""
    path = tmp_path / "site"
    path.mkdir()
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        patch.setattr(_plugins, "DEFAULT_PLUGINS", ())
        for variable in ("LANEWAY_PLUGINS", "LANEWAY_DISABLE_PLUGINS", "LANEWAY_TRACE_PLUGINS", "LANEWAY_DEBUG"):
            patch.delenv(variable, raising=False)
        try:
            yield FakeSite(path)
        finally:
            _plugins.trace_logger.setLevel(logging.NOTSET)
            for name in set(sys.modules) - before:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(path)):
                    del sys.modules[name]


@attrs.frozen
class EchoRequest:
    text: str = ""


async def prepare(model: Any, request: EchoRequest) -> Prepared:
    return Prepared(payload=request.text)


async def handler(ctx: Any, prepared: Prepared) -> object:
    return prepared.payload


def operation(kind: str, **more: Any) -> Operation:
    """An operation of this kind that answers with what it was asked."""
    settings: dict[str, Any] = {"request_type": EchoRequest, "prepare": prepare, "handler": handler, **more}
    return Operation(kind=kind, **settings)


SHOUT = """
    import laneway
    from tests.plugins_host.fake_site import operation

    @laneway.hookimpl
    def laneway_plugin():
        return laneway.PluginSpec(name="shout", operations=[operation("shout")])
"""
"""The source of a plugin without fault."""
