"""Runs a hypothesis state machine, the same steps in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(
    machine: type[RuleBasedStateMachine], *, examples: int, steps: int, case_seed: int = 0
) -> None:
    """Stops at the first failure, and prints its steps. It is not shrunk: ranks that hang cost
    minutes each time.
    """
    run_state_machine_as_test(
        seed(case_seed)(machine),
        settings=settings(
            phases=[Phase.generate],
            report_multiple_bugs=False,
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
