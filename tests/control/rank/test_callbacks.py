"""Stop callbacks: all of them run, and one that fails is a failure."""

from __future__ import annotations

from hetero.control.rank.callbacks import run_callbacks


def raising(error: BaseException) -> object:
    def callback() -> None:
        raise error

    return callback


def test_callbacks_all_run_and_what_failed_is_returned() -> None:
    ran: list[int] = []
    failures = run_callbacks(
        [
            lambda: ran.append(1),
            raising(ValueError("on purpose")),  # type: ignore[list-item]
            raising(SystemExit(0)),  # type: ignore[list-item]  # done, as it says
            raising(SystemExit(3)),  # type: ignore[list-item]
            lambda: ran.append(2),
        ]
    )
    assert ran == [1, 2]
    assert [failure.summary for failure in failures] == [
        "a stop callback raised ValueError: on purpose",
        "a stop callback raised SystemExit: 3",
    ]
    assert "raise error" in failures[0].detail
