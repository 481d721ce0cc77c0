"""The check of the machine: what it says, when it warns, when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from ridethrough import machine
from ridethrough.doctor import NVRX, Check, examine, explain_nvrx, format_checks


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Check]:
    return {check.name: check for check in examine(tmp_path_factory.mktemp("runs"))}


def test_this_machine_is_examined_and_can_run(checks: dict[str, Check]) -> None:
    asked = {
        "python",
        "torch",
        "nvidia-resiliency-ext",
        "gpu",
        "cores",
        "memory",
        "/dev/shm",
        "port",
        "pods",
        "disk",
        "fsync",
    }
    assert checks.keys() == asked
    assert [check for check in checks.values() if check.status == "fail"] == []
    assert all(check.found for check in checks.values())
    assert all(check.advice for check in checks.values() if check.status == "warn")


def test_it_names_the_installed_versions(checks: dict[str, Check]) -> None:
    versions = machine.versions()
    assert checks["torch"].found == versions["torch"]
    assert checks["nvidia-resiliency-ext"].found.startswith(f"{versions['nvidia-resiliency-ext']} on ")
    assert str(versions["python"]) in checks["python"].found


def test_it_leaves_nothing_in_the_folder_and_makes_none(tmp_path: Path) -> None:
    found = {check.name: check for check in examine(tmp_path / "not/yet")}
    assert str(tmp_path) in found["disk"].found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_a_failure() -> None:
    """/proc refuses new files, to root as well."""
    found = {check.name: check for check in examine("/proc/runs")}
    assert found["fsync"].status == "fail" and "/proc fails" in found["fsync"].found


@pytest.mark.parametrize(
    ("installed", "python", "glibc", "said"),
    [
        (
            "0.4.1",
            "3.11",
            "2.36",
            ["0.5.0 (needs glibc 2.39)", "0.6.0 (needs glibc 2.39)", "0.7.0 (needs Python 3.12)"],
        ),
        ("0.4.1", "3.12", "2.36", ["0.5.0 (needs glibc 2.39)", "0.7.0 (needs glibc 2.39)"]),
        ("0.6.0", "3.11", "2.39", ["0.7.0 (needs Python 3.12)"]),
        ("0.4.1", "3.12", None, ["no glibc", "0.7.0 (needs glibc 2.39)"]),
    ],
)
def test_it_says_why_pip_took_that_nvrx(
    installed: str, python: str, glibc: str | None, said: list[str]
) -> None:
    check = explain_nvrx(installed, python, glibc)
    assert check.status == "ok"
    assert [text for text in said if text not in check.found] == []
    assert f"In {installed}: " in check.advice and "This machine can have" not in check.advice


def test_it_says_when_a_newer_nvrx_could_be_had() -> None:
    assert "This machine can have 0.7.0." in explain_nvrx("0.4.1", "3.12", "2.39").advice
    assert "This machine can have 0.6.0." in explain_nvrx("0.4.1", "3.10", "2.39").advice
    assert explain_nvrx("0.7.0", "3.12", "2.39").found == "0.7.0 on Python 3.12, glibc 2.39"


def test_an_older_nvrx_than_the_books_is_a_warning() -> None:
    assert explain_nvrx("0.3.0", "3.11", "2.36").status == "warn"


def test_a_later_nvrx_than_known_is_taken_for_the_newest_known() -> None:
    check = explain_nvrx("0.9.0", "3.12", "2.39")
    assert check.status == "ok" and NVRX[-1].lacks in check.advice


def test_the_table_is_at_most_100_columns_wide() -> None:
    text = format_checks([Check("nvidia-resiliency-ext", "warn", "found " * 40, "advice " * 40)])
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("warn  nvidia-resiliency-ext  found")


def test_the_machine_is_described_without_names() -> None:
    about = machine.about(["ridethrough", "run"])
    assert about["command"] == ["ridethrough", "run"]
    assert about["machine"]["memory_bytes"] > 1 << 28 and about["machine"]["cores"] > 0
    assert about["machine"].keys() == {"platform", "cpu", "cores", "memory_bytes"}
    assert about["versions"].keys() >= {"python", "glibc", "ridethrough", "torch", "nvidia-resiliency-ext"}
