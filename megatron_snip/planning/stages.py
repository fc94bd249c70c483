"""Stages that have floors of their own and something in common: price the common part.

A limit on changes or an overall least gain couples the stages. Relaxing everything at once
(`lagrangian.py`) leaves a gap in every stage; relaxing only what couples them leaves one in all:

    L(lambda_0, mu) = sum over stages of min { cost + mu changes - lambda_0 gain : floor kept }
                      + lambda_0 least - mu max_changes

with every stage's minimum found exactly by its own search. Each evaluation also yields one
assignment a stage (a proposal). Choosing one proposal a stage under the common constraints is a
small menu again: its dual gives the next prices, its solution a new incumbent (column generation,
Dantzig and Wolfe 1960). It ends when the bound meets the dual of the proposals.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from megatron_snip.planning.cpsat import Effort
from megatron_snip.planning.lagrangian import Prices
from megatron_snip.planning.menu import Line, Menu, stage_menus
from megatron_snip.planning.search import EXACT, Search, SolverSettings
from megatron_snip.planning.table import Floats, Ints

_MAX_ROUNDS = 16


class CoupledSearch(Search):
    """A search in a menu with stage floors and common constraints."""

    def __init__(self, menu: Menu, starts: list[Ints]) -> None:
        super().__init__(menu, starts)
        self._stages = stage_menus(menu)
        self._proposals: list[list[Ints]] = [[self.best[s.linears]] for s in self._stages]
        self._evaluated = -math.inf
        self._slack = np.zeros(len(self.best))

    def improve(self, work: float, solver: SolverSettings, good_gap: float = 0.0) -> float:
        """Price the common constraints, then solve what is still open as a whole."""
        used = self._generate(work, solver, good_gap)
        left = solver.deadline.left()
        if self.optimal or self.gap <= good_gap or used >= work or left <= 0:
            return used
        keep = self.open_choices(self._slack + (self.loss - self._evaluated))
        effort = Effort(left, work - used, solver.workers, solver.seed, good_gap)
        return used + self.solve_core(keep, True, effort)

    def _generate(self, work: float, solver: SolverSettings, good_gap: float) -> float:
        """Generate proposals until the bound cannot grow; return deterministic seconds used."""
        prices, used = self.dual.prices, 0.0
        for _ in range(_MAX_ROUNDS):
            used += self._evaluate(prices, (work - used) / 2, solver)
            master = self._master()
            # The first proposals together are the first incumbent, which holds.
            choice = Search(master, [np.zeros(len(self._stages), dtype=np.int64)])
            used += choice.improve((work - used) / 2, solver)
            self.learn(self._assemble(choice.best))
            self._judge()
            limit = choice.dual
            done = limit.bound - self.bound <= EXACT * abs(limit.bound)
            if self.optimal or self.gap <= good_gap or done:
                break
            if used >= work or solver.deadline.left() <= 0:
                break
            prices = limit.prices
        return used

    def _evaluate(self, prices: Prices, work: float, solver: SolverSettings) -> float:
        """Solve every stage at common prices; learn proposals, bound and reduced costs."""
        menu, used = self.menu, 0.0
        bounds, slack = self._paid(prices), np.empty(len(self.best))
        reduced = np.empty_like(menu.cost)
        for stage, proposals in zip(self._stages, self._proposals, strict=True):
            priced = replace(stage, cost=self._priced_cost(stage, prices))
            search = Search(priced, proposals, self.tolerance / len(self._stages))
            used += search.improve(max(work - used, 0.0) / len(self._stages), solver)
            bounds.append(search.bound)
            slack[stage.linears] = search.bound - search.dual.bound
            reduced[stage.linears] = search.dual.reduced
            if not any((search.best == known).all() for known in proposals):
                proposals.append(search.best)
        bound = math.fsum(bounds) - 1e-14 * math.fsum(map(abs, bounds))
        if bound > self._evaluated:
            self._evaluated, self._slack = bound, slack
            self.dual = replace(self.dual, reduced=reduced)
            self.raise_bound(bound)
        return used

    def _common_prices(self, prices: Prices) -> list[float]:
        """Return the prices of the common lines, in their order."""
        limited = [math.isfinite(self.menu.least), math.isfinite(self.menu.max_changes)]
        both = (prices.overall, prices.change)
        return [price for price, used in zip(both, limited, strict=True) if used]

    def _paid(self, prices: Prices) -> list[float]:
        lines = zip(self._common_prices(prices), self.menu.common_lines, strict=True)
        return [price * line.threshold for price, line in lines]

    def _priced_cost(self, stage: Menu, prices: Prices) -> Floats:
        cost = stage.cost
        lines = zip(self._common_prices(prices), self.menu.common_lines, strict=True)
        for price, line in lines:
            if price > 0:
                cost = cost - price * line.coefficients[stage.linears]
        return cost

    def _master(self) -> Menu:
        """Return the menu whose linears are stages and whose choices are proposals."""
        count = max(map(len, self._proposals))
        shape = (len(self._stages), count)
        cost = np.full(shape, np.inf)
        sums = [np.zeros(shape, dtype=np.int64) for _ in self.menu.common_lines]
        for p, (stage, proposals) in enumerate(zip(self._stages, self._proposals, strict=True)):
            for j, columns in enumerate(proposals):
                cost[p, j] = stage.loss(columns)
                for line, row in zip(self.menu.common_lines, sums, strict=True):
                    row[p, j] = line.coefficients[stage.linears, columns].sum()
        everyone = np.arange(len(self._stages))
        lines = tuple(
            Line(everyone, row, line.threshold)
            for row, line in zip(sums, self.menu.common_lines, strict=True)
        )
        limits_gain = math.isfinite(self.menu.least)
        limits_changes = math.isfinite(self.menu.max_changes)
        return Menu(
            linears=everyone,
            cost=cost,
            lines=lines,
            num_common=len(lines),
            gain=sums[0].astype(np.float64) if limits_gain else np.zeros(shape),
            changed=-sums[-1].astype(np.float64) if limits_changes else np.zeros(shape),
            stage=np.zeros(len(self._stages), dtype=np.int64),
            floors=np.array([-math.inf]),
            least=self.menu.least,
            max_changes=self.menu.max_changes,
        )

    def _assemble(self, choice: Ints) -> Ints:
        columns = self.best.copy()
        for stage, proposals, j in zip(self._stages, self._proposals, choice, strict=True):
            columns[stage.linears] = proposals[int(j)]
        return columns
