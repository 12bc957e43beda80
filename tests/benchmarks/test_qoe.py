"""Laws of `benchmarks.qoe`: what it calls capacity, a bound and a result."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("scipy", reason="needs scipy: pip install -r benchmarks/requirements.txt")

from benchmarks.qoe.bounds import bounds
from benchmarks.qoe.contenders import FCFS, IN_TIME, OURS, contenders
from benchmarks.qoe.machines import MACHINES, StepCost, machine_of
from benchmarks.qoe.report import draw
from benchmarks.qoe.results import Job, Results
from benchmarks.qoe.score import Score, score
from benchmarks.qoe.simulation import REPORT_STEP, Simulation
from benchmarks.qoe.workload import BURST_AT, BURST_EVERY, BURST_SECONDS, FLOODER, Workload
from streamserve.clients import engine_run

CPU = machine_of("cpu", 16)


@pytest.mark.parametrize("seats", [16, 64])
@pytest.mark.parametrize("name", list(MACHINES))
def test_one_load_fills_the_machine(name: str, seats: int) -> None:
    """The prices of the requests of 1x add up to about the time in which they come."""
    machine = machine_of(name, seats)
    work = sum(machine.price(visit) for visit in Workload(load=1.0).draw(1, machine.capacity, 200.0))
    assert 180 < work < 220


def test_a_price_is_what_the_engine_takes_for_an_answer_alone() -> None:
    """With batches of one, a request's price and the base of its prefill are the time of a run with it alone."""
    visit = replace(Workload(load=1.0).draw(3, CPU.capacity, 20.0)[0], arrives_at=0.0, prompt_len=100)
    simulation = Simulation(CPU, contenders()[FCFS].config, [visit], acks=contenders()[FCFS].acks)
    simulation.run()
    expected = CPU.price(visit, batch=1) + CPU.cost.base
    assert simulation.clock.now == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("load", [1.5, pytest.param(3.0, marks=pytest.mark.proof)])
def test_no_contender_passes_a_bound(load: float) -> None:
    """Served by heads and by work stay below the bounds of the same requests."""
    visits = Workload(load=load).draw(1, CPU.capacity, 15.0)
    most = bounds(CPU, visits)
    for name in (OURS, IN_TIME):
        simulation = Simulation(CPU, contenders()[name].config, visits, acks=contenders()[name].acks)
        simulation.run()
        result = score(simulation, CPU)
        assert result.served <= most.heads + 1e-6
        assert result.by_work <= most.work + 1e-6


def test_more_intervals_never_raise_a_bound() -> None:
    """A grid that holds the intervals of another has bounds that are as high or lower."""
    visits = Workload(load=2.0).draw(1, CPU.capacity, 60.0)
    coarse, fine = bounds(CPU, visits, 10.0), bounds(CPU, visits, 2.5)
    assert fine.heads <= coarse.heads + 1e-6
    assert fine.work <= coarse.work + 1e-6
    assert fine.neutral <= coarse.neutral + 1e-9
    assert fine.neutral < fine.heads < 1


def test_memory_lowers_neutral() -> None:
    """Without end it changes nothing; the less there is, the fewer are served, and to be careful costs some more."""
    visits = Workload(load=2.0).draw(1, CPU.capacity, 30.0)
    by_blocks = [bounds(replace(CPU, num_blocks=number), visits) for number in (1 << 40, 1024, 512)]
    assert by_blocks[0].held == pytest.approx(by_blocks[0].neutral, abs=1e-5)
    assert by_blocks[0].held > by_blocks[1].held + 0.01 > by_blocks[2].held + 0.04
    for one in by_blocks:
        assert one.careful < one.held < one.neutral + 1e-5


def test_readers_that_fit_one_after_the_other() -> None:
    """Two slow readers that the machine serves at once, and the memory only if it computes one of them ahead."""
    visit = Workload(load=1.0).draw(1, CPU.capacity, 20.0)[0]
    both = [replace(visit, number=n, arrives_at=1.0, pace=1.0, prompt_len=100, answer_len=100) for n in (0, 1)]
    cost = StepCost(base=0.0, sequence=0.49, token=0.0, position=0.0, pair=0.0)
    wide, narrow = (bounds(replace(CPU, cost=cost, num_blocks=number), both) for number in (14, 7))
    assert (wide.neutral, narrow.neutral) == (1.0, 1.0)
    assert wide.held == pytest.approx(1.0, abs=1e-5)
    assert 0.5 < narrow.held < 0.99


def test_the_shares_of_the_time_are_the_whole() -> None:
    """Useful, late, stalled, recomputed and idle time add up to 1, under a load with all of them and without."""
    for load, is_idle in ((0.2, True), (2.0, False)):
        visits = Workload(load=load).draw(2, CPU.capacity, 20.0)
        simulation = Simulation(CPU, contenders()[OURS].config, visits)
        simulation.run()
        time = simulation.runner.usage.shares(simulation.readings)
        assert time.useful + time.late + time.stalled + time.recomputed + time.idle == pytest.approx(1.0)
        assert (time.idle > 0.1) == is_idle


def test_a_burst_multiplies_arrivals() -> None:
    """In a burst five times as many requests come a second as outside."""
    visits = Workload(load=1.0, has_bursts=True).draw(1, 20.0, 4 * BURST_EVERY)
    inside = sum(
        visit.arrives_at > BURST_AT and (visit.arrives_at - BURST_AT) % BURST_EVERY < BURST_SECONDS for visit in visits
    )
    rate = inside / (4 * BURST_SECONDS)
    assert 4 < rate / ((len(visits) - inside) / (4 * (BURST_EVERY - BURST_SECONDS))) < 6


def test_a_flood_leaves_the_others_as_they_are() -> None:
    """The visits of the other tenants are those of the same load without a flood."""
    calm = Workload(load=0.8)
    flooded = replace(calm, flood=1.2).draw(1, 8.0, 30.0)
    others = [visit for visit in flooded if visit.tenant != FLOODER]
    assert others == calm.draw(1, 8.0, 30.0)
    assert len({visit.number for visit in flooded}) == len(flooded) > len(others)


def test_results_are_kept(tmp_path: Path) -> None:
    """A job that has run is in the file, and is not run again; another seed is."""
    job = Job(machine=CPU, workload=Workload(load=1.0), seconds=5.0, seed=1, contender=FCFS)
    first = Results(tmp_path / "results")
    assert list(first.run([job], 1)) == [job]
    again = Results(tmp_path / "results")
    other = replace(job, seed=2)
    assert list(again.run([job, other], 1)) == [other]
    assert isinstance(again.get(job), Score)
    assert again.get(job) == first.get(job)


def test_the_labels_of_a_chart_do_not_overlap() -> None:
    """The chart is well-formed, and names of lines that end together are a line's height apart."""
    series = {name: [(1.0, 0.9), (2.0, share)] for name, share in (("a", 0.02), ("b", 0.01), ("c & d", 0.0))}
    tree = ElementTree.fromstring(draw("title", "note", series, {"at most": [(1.0, 1.0), (2.0, 0.0)]}))
    names = [element for element in tree.iter() if element.get("class") == "name"]
    assert [name.text for name in names] == ["at most 0 %", "a 2 %", "b 1 %", "c & d 0 %"]
    heights = sorted(float(name.get("y", "nan")) for name in names)
    assert min(after - before for before, after in pairwise(heights)) > 13


def test_positions_are_reported_in_the_steps_of_the_streams() -> None:
    """A simulated reader's position is reported as often as a stream reports it."""
    assert REPORT_STEP == engine_run._STEP
