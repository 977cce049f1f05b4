"""Retention: the steps that any rules keep, and each rule compared with its plain definition."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.retention import (
    BestN,
    EverySeconds,
    EverySteps,
    LatestN,
    Rule,
    Rules,
    SavedStep,
    retained,
)

metrics = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.sampled_from([0.0, 0.5, 1.0, -2.0]), max_size=2
)
rules_of_a_kind = st.lists(
    st.one_of(
        st.integers(1, 4).map(LatestN),
        st.integers(1, 7).map(EverySteps),
        st.sampled_from([0.5, 10.0, 1e6]).map(EverySeconds),
        st.builds(
            BestN,
            st.sampled_from(["loss", "accuracy"]),
            st.sampled_from(["min", "max"]),
            st.integers(0, 3),
        ),
    ),
    max_size=3,
).map(tuple)
all_rules = st.builds(Rules, rules_of_a_kind, rules_of_a_kind)


@st.composite
def histories(draw: st.DrawFn) -> list[SavedStep]:
    steps = draw(st.lists(st.integers(0, 30), unique=True, max_size=12))
    return [
        SavedStep(
            step, draw(st.sampled_from([0.0, 5.0, 11.0, 60.0])), draw(st.booleans()), draw(metrics)
        )
        for step in steps
    ]


def full(*steps: int, loss: dict[int, float] | None = None) -> list[SavedStep]:
    return [
        SavedStep(step, float(step), True, {"loss": loss[step]} if loss and step in loss else {})
        for step in steps
    ]


def only(*rules: Rule) -> Rules:
    return Rules(rules, rules)


@given(histories(), all_rules)
def test_the_latest_the_latest_full_and_the_best_are_kept(
    saved: list[SavedStep], rules: Rules
) -> None:
    stays = retained(saved, rules)
    assert set(stays) <= {item.step for item in saved}
    assert all(stays.values()), "each with its reasons"
    if saved:
        assert max(item.step for item in saved) in stays
    if any(item.full for item in saved):
        assert max(item.step for item in saved if item.full) in stays
    for rule in (*rules.full, *rules.model_only):
        measured = [
            item for item in saved if isinstance(rule, BestN) and rule.metric in item.metrics
        ]
        if measured and isinstance(rule, BestN):
            pick = min if rule.mode == "min" else max
            value = pick(item.metrics[rule.metric] for item in measured)
            assert (
                max(item.step for item in measured if item.metrics[rule.metric] == value) in stays
            )


@given(histories(), all_rules, rules_of_a_kind)
def test_another_rule_never_removes_more(
    saved: list[SavedStep], rules: Rules, more: tuple[Rule, ...]
) -> None:
    wider = Rules(
        rules.full + more if rules.full else (), rules.model_only + more if rules.model_only else ()
    )
    assert set(retained(saved, rules)) <= set(retained(saved, wider))


@given(histories(), all_rules)
def test_retention_is_stable(saved: list[SavedStep], rules: Rules) -> None:
    """Steps that were kept are kept again."""
    stays = retained(saved, rules)
    assert set(retained([item for item in saved if item.step in stays], rules)) == set(stays)


@given(histories(), all_rules, st.randoms(use_true_random=False))
def test_the_order_of_the_steps_does_not_matter(
    saved: list[SavedStep], rules: Rules, draw: object
) -> None:
    mixed = list(saved)
    draw.shuffle(mixed)  # type: ignore[attr-defined]
    assert retained(mixed, rules) == retained(saved, rules)


def test_no_rule_keeps_everything() -> None:
    assert retained(full(1, 2, 3), Rules((), ())) == {
        1: ("no rule",),
        2: ("no rule",),
        3: ("latest", "latest full", "no rule"),
    }
    assert retained([], only(LatestN(1))) == {}


def test_any_rule_keeps_a_step_and_is_named() -> None:
    saved = full(5, 10, 15, 20, 25, loss={5: 0.1, 15: 0.3})
    reasons = retained(saved, only(LatestN(2), EverySteps(10), BestN("loss", "min", 1)))
    assert reasons == {
        5: ("best 1 by loss", "best by loss"),
        10: ("every 10 steps",),
        20: ("latest 2", "every 10 steps"),
        25: ("latest", "latest full", "latest 2"),
    }


def test_every_seconds_counts_from_the_last_one_kept() -> None:
    saved = [
        SavedStep(step, float(seconds), True, {})
        for step, seconds in ((1, 0), (2, 50), (3, 60), (4, 119), (5, 121))
    ]
    assert set(retained(saved, only(EverySeconds(60.0)))) == {1, 3, 5}


def test_every_seconds_recovers_from_a_clock_that_was_ahead() -> None:
    saved = [
        SavedStep(step, float(seconds), True, {})
        for step, seconds in ((1, 0), (2, 90_000), (3, 60), (4, 100), (5, 121), (6, 122))
    ]
    assert set(retained(saved, only(EverySeconds(60.0)))) == {1, 2, 3, 5, 6}


def test_separate_limits_for_model_only_and_full() -> None:
    saved = [SavedStep(step, float(step), step % 4 == 0, {}) for step in range(1, 13)]
    assert set(retained(saved, Rules((LatestN(2),), (LatestN(3),)))) == {8, 12, 9, 10, 11}
    assert set(retained(saved, Rules((LatestN(1),), ()))) == {12, 1, 2, 3, 5, 6, 7, 9, 10, 11}


def test_protected_steps_are_kept() -> None:
    assert retained(full(1, 2, 3, 4), only(LatestN(1)), protected={2, 9})[2] == ("in use",)


def test_counted_step_takes_the_place_of_a_latest() -> None:
    saved = full(1, 2, 3, 4, 5)
    rules = Rules((LatestN(3),), (LatestN(3),), counted=frozenset({1}))
    assert sorted(retained(saved, rules)) == [1, 4, 5]
    assert sorted(retained(saved, replace(rules, counted=frozenset({4})))) == [3, 4, 5]
    assert sorted(retained(saved, replace(rules, full=(LatestN(1),)))) == [1, 5]
