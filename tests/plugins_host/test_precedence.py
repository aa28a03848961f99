"""Any list of plugins gives what the rule says: the first keeps a name, a later claimant is left out whole."""

from __future__ import annotations

from typing import Any

import attrs
import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway import Loader, PluginSpec, _plugins
from laneway._plugins import PluginHost
from tests.plugins_host.fake_site import operation


@attrs.frozen
class Options:
    pass


async def load(source: Any, parallel: int, options: Options) -> Any:
    raise NotImplementedError


NAMES = st.sampled_from(["a", "b", "c", "d"])
SOME = st.lists(NAMES, max_size=2)


@given(plugins=st.lists(st.tuples(NAMES, SOME, SOME, SOME), max_size=6))
def test_the_earlier_stays_and_the_later_goes_whole(
    plugins: list[tuple[str, list[str], list[str], list[str]]],
) -> None:
    taken: set[tuple[str, str]] = set()
    loaded = []
    specs = []
    for name, kinds, loaders, commands in plugins:
        parts = [
            ("name", name),
            *(("kind", kind) for kind in kinds),
            *(("loader", loader) for loader in loaders),
            *(("command", command) for command in commands),
        ]
        try:
            spec = PluginSpec(
                name=name,
                operations=[operation(kind) for kind in kinds],
                loaders=[Loader(name=x, accepts=lambda source: True, load=load, options_type=Options) for x in loaders],
                commands=[click.Command(command) for command in commands],
            )
        except ValueError:
            assert len(set(parts)) < len(parts)  # named twice in itself: refused before there is a spec
            continue
        fine = len(set(parts)) == len(parts) and taken.isdisjoint(parts)
        if fine:
            taken.update(parts)
        specs.append(spec)
        loaded.append(fine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plugins, "DEFAULT_PLUGINS", ())
        patch.setenv("LANEWAY_PLUGINS", "")
        host = PluginHost.load(specs, announce=False)

    records = [record for record in host.records if record.origin == "given"]
    assert [record.state == "loaded" for record in records] == loaded
    accepted = [spec for spec, fine in zip(specs, loaded, strict=True) if fine]
    assert dict(host.operations) == {made.kind: made for spec in accepted for made in spec.operations}
    assert list(host.loaders) == [made for spec in accepted for made in spec.loaders]
    assert dict(host.commands) == {made.name: made for spec in accepted for made in spec.commands}
