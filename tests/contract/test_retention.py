"""Retention as a pure choice: what may go, for any set of checkpoints."""

from hypothesis import given
from hypothesis import strategies as st

from supervise_hooks.contract.manifest import Metric
from supervise_hooks.contract.retention import Kept, Retention, choose_best, choose_prunable

RUN = "mine"

_metrics = st.none() | st.builds(Metric, name=st.just("loss"), value=st.floats(allow_nan=True), mode=st.just("min"))
_kept = st.builds(
    Kept,
    path=st.uuids().map(str),
    step=st.integers(0, 50),
    run_id=st.sampled_from([RUN, RUN, "theirs"]),
    whole=st.booleans(),
    metric=_metrics,
)
_lists = st.lists(_kept, max_size=12, unique_by=lambda kept: kept.path)
_policies = st.builds(Retention, keep_last=st.integers(-1, 5), keep_every=st.none() | st.integers(1, 20))


def _whole(step: int, **fields: object) -> Kept:
    return Kept(**({"path": str(step), "step": step, "run_id": RUN, "whole": True} | fields))  # type: ignore[arg-type]


def _pruned(checkpoints: list[Kept], policy: Retention, in_use: frozenset[str] = frozenset()) -> list[str]:
    return [path for path, _ in choose_prunable(checkpoints, policy, RUN, in_use)]


@given(_lists, _policies, st.data())
def test_what_must_stay_is_never_prunable(checkpoints: list[Kept], policy: Retention, data: st.DataObject) -> None:
    """C64, C66, C69: not the newest whole one, not another run's, not one that is not proved, not one in use, not the best."""
    in_use = (
        frozenset(data.draw(st.lists(st.sampled_from([c.path for c in checkpoints]), max_size=3))) if checkpoints else frozenset()
    )
    doomed = set(_pruned(checkpoints, policy, in_use))
    ours = [c for c in checkpoints if c.run_id == RUN and c.whole]
    assert doomed <= {c.path for c in ours}
    assert not doomed & in_use
    if ours:
        newest = max(c.step for c in ours)
        assert {c.path for c in ours if c.step == newest} - doomed
        best = choose_best(ours)
        assert best is None or best.path not in doomed
    left = [c for c in ours if c.path not in doomed]
    assert len(left) >= min(len(ours), max(1, policy.keep_last))
    assert all(c.step % policy.keep_every for c in ours if c.path in doomed) if policy.keep_every else True


@given(_lists, _policies)
def test_nothing_older_than_what_goes_was_in_the_last_ones(checkpoints: list[Kept], policy: Retention) -> None:
    """C65: by step, as a number: no checkpoint goes while more than `keep_last` whole ones are not newer or equal."""
    ours = [c for c in checkpoints if c.run_id == RUN and c.whole]
    steps = {c.path: c.step for c in ours}
    for path in _pruned(checkpoints, policy):
        assert sum(c.step >= steps[path] for c in ours if c.path != path) >= max(1, policy.keep_last)


@given(_lists, _policies)
def test_pruning_twice_prunes_nothing_more(checkpoints: list[Kept], policy: Retention) -> None:
    """What one pruning left, the next one leaves too: nothing erodes."""
    doomed = set(_pruned(checkpoints, policy))
    assert _pruned([c for c in checkpoints if c.path not in doomed], policy) == []


def test_steps_are_compared_as_numbers() -> None:
    """C65: 900, 1000, 1100 are newer than 99, whatever their text sorts like."""
    assert _pruned([_whole(step) for step in (1000, 99, 1100, 900, 98)], Retention(keep_last=3)) == ["98", "99"]


def test_higher_steps_of_another_run_push_nothing_out() -> None:
    """C69: leftovers of steps 500 to 700 from an earlier run count for nothing and stay."""
    checkpoints = [_whole(step, run_id="earlier") for step in (500, 600, 700)] + [_whole(100)]
    assert _pruned(checkpoints, Retention(keep_last=1)) == []


def test_unproved_newer_ones_push_nothing_out() -> None:
    """C64, C66: a newer save that failed or is in flight does not cost the last whole one."""
    checkpoints = [_whole(20), _whole(30, whole=False), _whole(40, whole=False)]
    assert _pruned(checkpoints, Retention(keep_last=1)) == []


def test_the_best_is_the_best_number_and_never_nan() -> None:
    """C55: NaN is no best; of equals the newest; `min` and `max` each by their sense."""
    losses = [
        _whole(step, metric=Metric("loss", value, "min"))
        for step, value in ((1, 3.0), (2, 1.0), (3, float("nan")), (4, 1.0), (5, 2.0))
    ]
    best = choose_best(losses)
    assert best is not None
    assert best.step == 4
    assert "4" not in _pruned(losses, Retention(keep_last=1))
    scores = [_whole(step, metric=Metric("acc", value, "max")) for step, value in ((1, 0.5), (2, 0.9), (3, 0.1))]
    best = choose_best(scores)
    assert best is not None
    assert best.step == 2
    assert choose_best([_whole(1), _whole(2, whole=False, metric=Metric("acc", 9.0, "max"))]) is None
