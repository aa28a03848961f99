"""The budget within which a machine has to find a seeded fault."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def budget(max_examples: int, *, derandomize: bool = False) -> settings:
    """Settings of their own, whatever the profile: they bound how rare the state may be in which a fault shows.

    Finding is enough; shrinking would only cost time.
    """
    return settings(
        max_examples=max_examples,
        stateful_step_count=50,
        phases=[Phase.generate],
        derandomize=derandomize,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
