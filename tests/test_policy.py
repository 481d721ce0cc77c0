"""Which pods start again after a failure, and after how long: Kubernetes' own figures, in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ridethrough.config import PodConfig
from ridethrough.errors import UsageError
from ridethrough.restart.policy import Policy, Restart

#: One failure: which pod, how long its container had run in s, whether the pod itself is lost.
Failure = tuple[int, float, bool]

MANY = 1000


def config(policy: str, **settings: object) -> PodConfig:
    return PodConfig.from_dict({"policy": policy, "time_scale": 1.0, "pod_restarts": MANY, **settings})


def answers(config: PodConfig, *failures: Failure) -> list[Restart | None]:
    policy = Policy(config)
    return [policy.failed(*failure) for failure in failures]


def delays(config: PodConfig, *failures: Failure) -> list[float]:
    return [answer.backoff_s for answer in answers(config, *failures) if answer]


# --- Kubernetes' figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("each", [0, 10, 20, 40, 80, 160, 300, 300, 300]),  # the kubelet's CrashLoopBackOff
        ("index", [10, 20, 40, 80, 160, 320, 360, 360, 360]),  # the Job controller's
        ("gang", [0] * 9),  # a JobSet has none
    ],
)
def test_each_failure_doubles_the_wait_up_to_a_most(policy: str, expected: list[float]) -> None:
    assert delays(config(policy), *[(1, 5.0, False)] * 9) == expected


@pytest.mark.parametrize("scale", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("policy", ["each", "index"])
def test_the_scale_shortens_every_wait_alike(policy: str, scale: float) -> None:
    plain = delays(config(policy), *[(0, 0.0, False)] * 8)
    scaled = delays(config(policy, time_scale=scale), *[(0, 0.0, False)] * 8)
    assert scaled == pytest.approx([delay * scale for delay in plain])


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_container_that_ran_for_ten_minutes_starts_afresh(scale: float) -> None:
    soon, late = (1, 600.0 * scale, False), (1, 600.1 * scale, False)
    got = delays(config("each", time_scale=scale), soon, soon, late, soon)
    assert got == pytest.approx([0.0, 10 * scale, 0.0, 10 * scale])


def test_the_job_controller_does_not_forget() -> None:
    assert delays(config("index"), *[(1, 5000.0, False)] * 4) == [10, 20, 40, 80]


def test_the_failures_of_one_pod_are_not_held_against_another() -> None:
    for policy, expected in (("each", [0, 0, 10, 10, 20]), ("index", [10, 10, 20, 20, 40])):
        order = [(0, 1.0, False), (1, 1.0, False), (1, 1.0, False), (0, 1.0, False), (0, 1.0, False)]
        assert delays(config(policy), *order) == expected


# --- which pods, and whether they are new ones -----------------------------------------------------------


def test_each_starts_the_container_again_in_its_pod() -> None:
    (answer,) = answers(config("each", pods=4, assumed_s=30), (2, 5.0, False))
    assert answer == Restart((2,), recreate=False, backoff_s=0.0, assumed_s=0.0)


def test_index_makes_that_pod_anew_and_no_other() -> None:
    (answer,) = answers(config("index", pods=4, assumed_s=30), (2, 5.0, False))
    assert answer == Restart((2,), recreate=True, backoff_s=10.0, assumed_s=30.0)


def test_gang_makes_all_pods_anew_at_once() -> None:
    (answer,) = answers(config("gang", pods=4, assumed_s=30), (2, 5.0, False))
    assert answer == Restart((0, 1, 2, 3), recreate=True, backoff_s=0.0, assumed_s=30.0)


def test_what_a_cluster_adds_is_for_new_pods_only_and_scaled_like_the_rest() -> None:
    """A container that starts again in its pod needs no scheduler, no image and no mount."""
    own = config("each", assumed_s=40, time_scale=0.1)
    kept, lost = answers(own, (0, 1.0, False), (1, 1.0, True))
    assert kept and not kept.recreate and kept.assumed_s == 0
    assert lost and lost.recreate and lost.assumed_s == pytest.approx(4.0)


def test_a_drained_pod_needs_a_new_one_and_that_has_no_history() -> None:
    """A node that is shut down takes its pod along, back-off and all: the new pod's container is a first."""
    got = answers(config("each"), (0, 1.0, False), (0, 1.0, True), (0, 1.0, False), (0, 1.0, False))
    assert [answer and answer.recreate for answer in got] == [False, True, False, False]
    assert [answer and answer.backoff_s for answer in got][2:] == [0.0, 10.0]


# --- the end of patience ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["each", "gang"])
@pytest.mark.parametrize("most", [0, 1, 6])
def test_restarts_are_counted_over_all_pods_and_used_up_for_good(policy: str, most: int) -> None:
    """A backoffLimit is one number for the job, whichever of its pods fail, and is never given back."""
    failures = [(number % 2, 1000.0, False) for number in range(most + 3)]
    got = answers(config(policy, pod_restarts=most), *failures)
    assert all(got[:most]) and got[most:] == [None] * 3


def test_each_index_has_restarts_of_its_own() -> None:
    """`backoffLimitPerIndex`: one pod that uses up its restarts takes none from the others."""
    got = answers(config("index", pod_restarts=2), *[(0, 1.0, False)] * 3, (1, 1.0, False))
    assert [answer is not None for answer in got] == [True, True, False, True]


# --- laws ------------------------------------------------------------------------------------------------

FAILURES = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2000), st.booleans()), max_size=12)
CONFIGS = st.builds(
    PodConfig,
    pods=st.just(4),
    policy=st.sampled_from(["each", "index", "gang"]),
    pod_restarts=st.integers(0, 12),
    time_scale=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    assumed_s=st.sampled_from([0.0, 45.0]),
)


@given(CONFIGS, FAILURES)
def test_whatever_fails_the_answer_is_within_bounds(config: PodConfig, failures: list[Failure]) -> None:
    got = answers(config, *failures)
    counted = [pod if config.policy == "index" else 0 for pod, _, _ in failures]
    granted = sum(min(counted.count(one), config.pod_restarts) for one in set(counted))
    assert sum(answer is not None for answer in got) == granted
    for answer, (pod, _, gone) in zip(got, failures, strict=True):
        if answer is None:
            continue
        assert pod in answer.pods and set(answer.pods) <= set(range(config.pods))
        assert len(answer.pods) == (config.pods if config.policy == "gang" else 1)
        assert 0 <= answer.backoff_s <= 360 * config.time_scale
        assert answer.assumed_s == (config.assumed_s * config.time_scale if answer.recreate else 0)
        assert answer.recreate or not gone


@given(CONFIGS, FAILURES, st.integers(0, 3))
def test_a_pod_waits_as_it_would_if_it_were_alone(
    config: PodConfig, failures: list[Failure], pod: int
) -> None:
    assume(config.policy != "gang")
    config = replace(config, pod_restarts=MANY)
    among = [answer for answer in answers(config, *failures) if answer and answer.pods == (pod,)]
    assert among == answers(config, *[failure for failure in failures if failure[0] == pod])


@given(CONFIGS, FAILURES)
def test_the_scale_changes_the_pace_and_nothing_else(config: PodConfig, failures: list[Failure]) -> None:
    scale = config.time_scale
    assume(all(abs(ran_s - 600) > 1e-3 for _, ran_s, _ in failures))
    fast = answers(config, *[(pod, ran_s * scale, gone) for pod, ran_s, gone in failures])
    real = answers(replace(config, time_scale=1.0), *failures)
    for one, other in zip(fast, real, strict=True):
        assert (one is None) == (other is None)
        if one and other:
            assert (one.pods, one.recreate) == (other.pods, other.recreate)
            assert one.backoff_s == pytest.approx(other.backoff_s * scale)
            assert one.assumed_s == pytest.approx(other.assumed_s * scale)


# --- figures that make no sense --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pods": 0}, "pods: 0 must be in 1 to 64"),
        ({"pods": 65}, "pods: 65 must be in 1 to 64"),
        ({"pod_restarts": -1}, "pod_restarts: -1 must be in 0 to 1,000"),
        ({"max_restarts": -1}, "max_restarts: -1 must be in 0 to 1,000"),
        ({"time_scale": 0.0}, "time_scale: 0.0 must be above 0 and at most 10"),
        ({"time_scale": float("nan")}, "time_scale: nan must be above 0 and at most 10"),
        ({"assumed_s": -1}, "assumed_s: -1 must be in 0 to 1,000,000"),
        ({"outage_s": float("nan")}, "outage_s: nan must be in 0 to 1,000,000"),
        ({"grace_s": float("inf")}, "grace_s: inf must be in 0 to 1,000,000"),
        ({"shm_mb": 0}, "shm_mb: 0 must be in 1 to 1,048,576"),
        ({"policy": "all"}, "policy: 'all' is not one of each, index, gang"),
        ({"launcher": "slurm"}, "launcher: 'slurm' is not one of torchrun"),
        ({"isolation": "vm"}, "isolation: 'vm' is not one of auto, namespaces, processes"),
        ({"share_store": "no"}, "share_store = 'no' should be of type bool"),
        ({"pods": True}, "pods = True should be of type int"),
        ({"backoff": 1}, "'backoff' is not a setting; known: assumed_s"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_a_sentence(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        PodConfig.from_dict(settings, "job.toml")
    assert str(raised.value).startswith("job.toml: ") and message in str(raised.value)


def test_settings_survive_a_file() -> None:
    made = PodConfig(pods=4, policy="gang", assumed_s=45, share_store=True)
    assert PodConfig.from_dict(made.to_dict()) == made


def test_pods_share_the_ranks_equally() -> None:
    assert PodConfig(pods=2).share(8) == 4
    with pytest.raises(UsageError, match="pods: 3 ranks cannot be shared equally by 2 pods"):
        PodConfig(pods=2).share(3)
