"""The rounds: contenders take turns with the same loads, and another contender begins each round."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from statistics import median

from benchmarks.peers.quiet import MAX_OTHERS, Moment, Noise, look
from benchmarks.peers.readers import Client, Failed, Figures
from benchmarks.peers.results import Results, at_once
from benchmarks.peers.servers import Contender
from benchmarks.qoe_http.readers import Prompts
from benchmarks.support.machine import progress

LOADS = ("streams", "long", "mixed", "prefix", "arrivals")
_LOAD_OF_ARRIVALS = 0.5  # of what the middle contender answers with all its streams at once
_SAMPLE_SECONDS, _SETTLE_SECONDS = 2.0, 120.0
_REST_SECONDS, _MOST_REST_SECONDS = 0.5, 15.0
Loads = list[tuple[str, Callable[[Client], Awaitable[Figures]]]]


class Busy(Exception):
    """Other programs run."""


class Rounds:
    """One run over all contenders; what it finds goes to `results`.

    A round in which others took CPU counts for nothing and is repeated, as often as there are rounds; then, or if it
    does not get quiet before a round, `run` raises Busy. With `--busy` every round counts, and the results say so.
    """

    def __init__(
        self, contenders: list[Contender], prompts: Prompts, results: Results, options: argparse.Namespace
    ) -> None:
        self.contenders = contenders
        self.prompts = prompts
        self.results = results
        self.options = options
        self._rate: float | None = options.rate

    async def run(self) -> None:
        """Measure all rounds. Raises Busy."""
        for contender in self.contenders:
            await self._turn(contender, [], "warm")
        num_rounds, num_tries = 0, 0
        while num_rounds < self.options.rounds:
            await self._settle()
            began = self._look()
            found = await self._round(num_tries)
            noise = self._look().noise_since(began)
            num_tries += 1
            if noise.is_quiet or self.options.busy:
                self._note(noise)
                num_rounds += 1
                for name, load, figures in found:
                    self.results.add(name, load, figures)
            elif num_tries >= 2 * self.options.rounds:
                raise Busy(f"In {num_tries - num_rounds} of {num_tries} rounds: {noise}")

    async def _settle(self) -> None:
        """Wait until the machine does nothing while nothing is asked of it. Raises Busy."""
        for _ in range(int(_SETTLE_SECONDS / _SAMPLE_SECONDS)):
            began = self._look()
            await asyncio.sleep(_SAMPLE_SECONDS)
            noise = self._look().noise_since(began)
            if noise.is_quiet or self.options.busy:
                return
            progress(f"waiting for a quiet machine: {noise}")
        raise Busy(f"After {_SETTLE_SECONDS:.0f} s: {noise}")

    async def _rest(self) -> None:
        """Wait until no contender computes: a server that has just answered may look for more work for seconds."""
        for _ in range(int(_MOST_REST_SECONDS / _REST_SECONDS)):
            before = self._look()
            await asyncio.sleep(_REST_SECONDS)
            now = self._look()
            if now.own - before.own <= MAX_OTHERS * (now.at - before.at):
                return
            progress("waiting for the contender before to rest")

    def _note(self, noise: Noise) -> None:
        self.results.noise.append(str(noise))
        self.results.is_quiet &= noise.is_quiet

    def _look(self) -> Moment:
        return look([session for contender in self.contenders for session in contender.sessions.values()])

    async def _round(self, number: int) -> list[tuple[str, str, Figures]]:
        """Return what each contender showed with each load."""
        found = await self._turns(number, self._loads())
        if "arrivals" in self.options.loads:
            rate = self._rate = self._rate or self._half_load(found)
            load = f"arrivals, {rate:.2f} a second"
            found += await self._turns(number, [(load, lambda client: client.arrivals(rate, str(number)))])
        return found

    async def _turns(self, number: int, loads: Loads) -> list[tuple[str, str, Figures]]:
        """Give the loads to every contender; each round begins with the next."""
        first = number % max(1, len(self.contenders))
        found = []
        for contender in self.contenders[first:] + self.contenders[:first]:
            await self._rest()
            progress(f"round {number + 1}, {contender.name}")
            figures = await self._turn(contender, loads, str(number))
            found += [(contender.name, load, measured) for load, measured in figures]
        return found

    def _loads(self) -> Loads:
        """Return the chosen loads by the names that the report has, but for the open loop."""
        lengths = self.options.lengths
        loads: Loads = []
        if "streams" in self.options.loads:
            loads += [(at_once(k), lambda client, k=k: client.at_once(k)) for k in self.options.streams]
        if "long" in self.options.loads:
            loads.append((f"a prompt of {lengths.long} tokens", lambda client: client.long_prompt()))
        if "mixed" in self.options.loads:
            name = f"{lengths.mixed} tokens beside {lengths.beside} streams"
            loads.append((name, lambda client: client.mixed()))
        if "prefix" in self.options.loads:
            loads.append((f"{lengths.long} shared tokens", lambda client: client.prefix()))
        return loads

    async def _turn(self, contender: Contender, loads: Loads, seed: str) -> list[tuple[str, Figures]]:
        """Return what a contender showed, after it is warm again; one that fails is left out from now on."""
        client = Client(contender, self.prompts, self.options.lengths, f"{seed} {contender.name}")
        found, load = [], "warm"
        try:
            await client.warm()
            for load, measure in loads:
                found.append((load, await measure(client)))
        except* Failed as failures:
            self._leave_out(contender, f"{load}: {_leaf(failures)}")
        return found

    def _leave_out(self, contender: Contender, reason: str) -> None:
        self.results.missing[contender.name] = reason
        progress(f"{contender.name} is left out: {reason}")
        self.contenders = [one for one in self.contenders if one is not contender]

    def _half_load(self, found: list[tuple[str, str, Figures]]) -> float:
        """Return the arrivals a second that are half of what the middle contender answers, by this round."""
        load = at_once(self.options.streams[-1])
        speeds = [figures["tokens_per_second"] for _, name, figures in found if name == load]
        if not speeds:
            return 0.5
        return _LOAD_OF_ARRIVALS * median(speeds) / self.options.lengths.answer


def _leaf(failures: BaseExceptionGroup[Failed]) -> BaseException:
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
