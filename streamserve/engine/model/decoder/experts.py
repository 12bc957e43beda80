"""The experts of a layer: a router, and feed-forward parts of which each token takes a few.

    shares, chosen = the largest of router(norm?(x))
    y = norm?(sum of shares * down(act(gate) * up))        [gate | up] = gate_up(norm?(x))

Torch computes them expert by expert, or the native library in one call (`native_experts.py`). Engine thread.

Shapes: T packed tokens, C hidden size, I an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm

from streamserve.engine.model.decoder.adapters import DOWN, GATE_UP, of_expert
from streamserve.engine.model.decoder.parts import ACTIVATION, Norm, gated, route
from streamserve.engine.model.decoder.spec import ExpertsSpec
from streamserve.engine.model.linear.base import Linear

# Maps an expert's part, its inputs and its outputs to the outputs with what an adapter adds.
Change = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


def _unchanged(_part: str, _inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return outputs


@dataclass(slots=True, kw_only=True)
class Experts:
    """A router, and for each expert its two linear layers. `activation` is a name of `parts.ACTIVATION`."""

    spec: ExpertsSpec
    router: torch.Tensor  # (num_experts, C)
    router_bias: torch.Tensor | None  # (num_experts,)
    gate_up: list[Linear]
    down: list[Linear]
    activation: str
    router_scale: torch.Tensor | None = None  # (C,) of the router's input, which is normalised then
    expert_scale: torch.Tensor | None = None  # (num_experts,) of an expert's weight
    eps: float = 0.0
    dense_norm: Norm | None = None  # of the dense part's output
    norm: Norm | None = None  # of the experts' input
    after_norm: Norm | None = None  # of the experts' output
    native: Callable[[torch.Tensor], torch.Tensor] | None = None  # what computes all of it in one call

    def __call__(self, tokens: torch.Tensor, changes: Sequence[tuple[Change, torch.Tensor]] = ()) -> torch.Tensor:
        """Map (T, C) to (T, C). `changes` are those of the step's adapters, each with its rows (n,).

        These rows are computed once more, with torch: a neighbour with an adapter changes no bit of the others.
        """
        out = self._compute(tokens, None) if self.native is None else self.native(tokens)
        for change, rows in changes:
            out[rows] = self._compute(tokens[rows], change)
        return out

    def _compute(self, tokens: torch.Tensor, change: Change | None) -> torch.Tensor:
        shares, chosen = self._route(tokens)
        if self.norm is not None:
            tokens = self.norm(tokens)
        out = self._combine(tokens, shares, chosen, change or _unchanged)
        return out if self.after_norm is None else self.after_norm(out)

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.router_scale is not None:
            tokens = rms_norm(tokens, tokens.shape[-1:], None, self.eps) * self.router_scale
        logits = linear(tokens, self.router, self.router_bias)
        shares, chosen = route(logits, self.spec.num_taken, self.spec.routing)
        return shares if self.expert_scale is None else shares * self.expert_scale[chosen], chosen

    def _combine(
        self, tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, change: Change
    ) -> torch.Tensor:
        """Sum what each token's experts give, in the order of their numbers. shares, chosen (T, num_taken)."""
        places = chosen.flatten()
        order = places.argsort(stable=True)  # (T * num_taken,), grouped by expert
        rows, shares = order // self.spec.num_taken, shares.flatten()[order, None]
        out, begin = torch.zeros_like(tokens), 0
        for expert, count in enumerate(torch.bincount(places, minlength=self.spec.num_experts).tolist()):
            if count:
                own = slice(begin, begin + count)
                inputs = tokens[rows[own]]
                inner = self._gate(change(of_expert(GATE_UP, expert), inputs, self.gate_up[expert](inputs)))
                outputs = change(of_expert(DOWN, expert), inner, self.down[expert](inner))
                out.index_add_(0, rows[own], outputs * shares[own])
                begin += count
        return out

    def _gate(self, both: torch.Tensor) -> torch.Tensor:
        if self.spec.clamp is None:
            return gated(both, ACTIVATION[self.activation])
        limit, alpha = self.spec.clamp
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
