"""Laws of launching: the watchdog's limits, and which exceptions are the runner's."""

from __future__ import annotations

import pytest

from streamserve.engine.echo import EchoRunner
from streamserve.engine.in_flight import FIRST_STEPS_SECONDS
from streamserve.engine.plan import Flight, StepPlan, StepResult
from tests.support.engines.cores import Drive, request, sampling
from tests.support.engines.desk import teach
from tests.support.engines.runners import DyingRunner, SmallRunner, WrappedRunner


def limits(flights: list[Flight]) -> list[float | None]:
    return [flight.seconds_allowed for flight in flights]


@pytest.mark.parametrize("overlap", [False, True])
def test_watchdog_is_armed_for_each_call_of_the_runner(overlap: bool) -> None:
    """It is armed before launch and before collect, and disarmed at the end of a step."""
    flights: list[Flight] = []
    drive = Drive(overlap=overlap, on_step=flights.append)
    drive.add(request(1, sampling=sampling(max_tokens=3)))
    drive.step()
    armed = [FIRST_STEPS_SECONDS]
    assert limits(flights) == ([*armed, None] if overlap else [*armed, *armed, None])
    drive.run()
    assert limits(flights)[-1] is None


def test_watchdog_limit_comes_from_the_step_time_model() -> None:
    """Eight times what is expected, and never less than `step_seconds`."""
    flights: list[Flight] = []
    drive = Drive(on_step=flights.append, step_seconds=0.5, max_step_seconds=9.0, num_blocks=200)
    teach(drive.core.scheduler.step_time, base=0.01, per_token=0.01)
    drive.run(request(1, range(200), sampling=sampling(max_tokens=2)))
    allowed = [seconds for seconds in limits(flights) if seconds is not None]
    assert allowed[0] == pytest.approx(8 * (0.01 + 200 * 0.01), rel=0.1)
    assert allowed[-1] == 0.5


def test_watchdog_uses_the_costliest_token_until_there_is_a_model() -> None:
    """Decoding teaches no step-time model; a hang is still noticed long before two minutes."""

    class Slow(WrappedRunner):
        def launch(self, plan: StepPlan) -> object:
            drive.clock.advance(0.25)
            return super().launch(plan)

    flights: list[Flight] = []
    drive = Drive(runner=Slow(EchoRunner()), on_step=flights.append, step_seconds=0.5)
    drive.run(request(1, range(4), sampling=sampling(max_tokens=3)))
    allowed = [seconds for seconds in limits(flights) if seconds is not None]
    assert allowed[0] == FIRST_STEPS_SECONDS
    assert allowed[-1] == pytest.approx(8 * 0.25)


def test_a_sequence_that_lost_its_engine_gets_more_time() -> None:
    """Four times as much for each loss: a step that is slow on a weak CPU is not killed again and again."""
    flights: list[Flight] = []
    drive = Drive(on_step=flights.append, step_seconds=0.5, num_blocks=200)
    teach(drive.core.scheduler.step_time, base=0.01, per_token=0.001)
    drive.add(request(1, num_losses=1), request(2))
    drive.run()
    assert max(seconds for seconds in limits(flights) if seconds is not None) == 4 * 0.5


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_in_flight_is_reported_before_it_runs(overlap: bool) -> None:
    """The streams of all uncollected steps; none of them once they are collected."""
    flights: list[Flight] = []
    drive = Drive(overlap=overlap, on_step=flights.append)
    drive.add(request(1, stream_id="a"), request(2, range(40, 60), stream_id="b", sampling=sampling(max_tokens=3)))
    drive.step()
    assert flights[0].stream_ids == {"a", "b"}
    assert flights[-1].stream_ids == ({"a", "b"} if overlap else set())
    drive.run()
    assert flights[-1].stream_ids == set()


def test_a_failed_step_stays_reported() -> None:
    """The process ends by it: the streams in flight then are the possible cause."""
    flights: list[Flight] = []
    drive = Drive(runner=DyingRunner(EchoRunner(), at_step=1), on_step=flights.append)
    drive.add(request(1, stream_id="a"))
    drive.step()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        drive.step()
    assert (flights[-1].seconds_allowed, flights[-1].stream_ids) == (None, {"a"})


def test_runner_exception_ends_the_engine() -> None:
    """It passes through `step` unchanged: the process is replaced, and no pool is."""
    drive = Drive(runner=DyingRunner(EchoRunner(), at_step=1))
    drive.add(request(1))
    drive.step()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        drive.step()
    assert drive.core.stats.quarantines == 0


def test_exception_at_collect_ends_the_engine() -> None:
    """The same where the device reports it at collect."""

    class Dying(WrappedRunner):
        def collect(self, handle: object) -> StepResult:
            raise RuntimeError("the device fell off the bus")

    drive = Drive(runner=Dying(EchoRunner()))
    drive.add(request(1))
    with pytest.raises(RuntimeError, match="fell off the bus"):
        drive.step()


def test_steps_that_failed_teach_nothing_about_time() -> None:
    """Only what was collected is noted."""
    noted: list[int] = []
    drive = Drive(runner=SmallRunner(EchoRunner(), lambda plan: plan.step_id == 0))
    step_time = drive.core.scheduler.step_time
    note = step_time.note
    step_time.note = lambda plan, seconds: (noted.append(plan.step_id), note(plan, seconds))[1]  # type: ignore[method-assign]
    drive.run(request(1, sampling=sampling(max_tokens=1)))
    assert noted == [1, 2]
