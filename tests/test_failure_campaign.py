"""Each allocation, copy, collective and file operation inside each lifecycle call fails once.

The points are enumerated, not sampled: a run in which nothing fails counts them, then there is one
run for each, with an engine of its own. On two ranks a point takes longest, and most are those of
one rank over again: there every third is tried, and each collective; ``make campaign`` tries all.
After each failure

- the error is the planned one, or torch's report of it;
- the record equals the census, and placement and whereabouts are those found;
- the values are those found, bit for bit, if the call is one that changes none. An optimizer step
  or a load that fails half way leaves values half changed, which is not placement's to undo: they
  are put back in place, as a trainer would do it from a checkpoint;
- the next training step gives the loss, the gradient norm and the values that it gives a twin to
  which nothing happened, bit for bit.

A failure that does not reach the caller is absorbed: it is counted and named in the report, and
everything else is checked all the same.

On two ranks both fail at the same point; what one rank's failure does to others is tested in
test_agreement.py. File operations are an exception: ranks have files of their own, so they fail on
one rank at a time, and the checkpoint tells the other.

What fails is planned in two places: ``sim.failing`` for the device, and ``failing_files`` for the
operating system's calls beneath a checkpoint. One that fails to remove what is no longer needed is
absorbed: the next save removes it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_faults import failing_files
from models import (
    Whereabouts,
    assert_equal,
    local,
    normed,
    normed_batch,
    normed_engine,
    values,
    whereabouts,
)

from engine import FSDPEngine, Offload
from engine.fsdp_engine import StepResult
from placement import Component, Placement, find_compute_device
from placement.testing import Ranks
from placement.testing.ranks import join_group

EVERY_POINT = "--every-point"

CALLS: dict[str, Callable[[FSDPEngine, Path], object]] = {
    "onload": lambda engine, _: engine.manager.onload(),
    "offload": lambda engine, _: engine.manager.offload(),
    "train_batch": lambda engine, _: engine.train_batch(own_part(1)),
    "the first train_batch": lambda engine, _: engine.train_batch(own_part(1)),
    "eval_batch": lambda engine, _: engine.eval_batch(own_part(1)),
    "save_checkpoint": lambda engine, root: engine.save_checkpoint(root / "replaced"),
    "load_checkpoint": lambda engine, root: engine.load_checkpoint(root / "kept"),
    "the first load_checkpoint": lambda engine, root: engine.load_checkpoint(root / "kept"),
    "export_weights": lambda engine, _: list(engine.export_weights()),
}
BY_HAND = {"onload", "offload"}
"""Refused under FSDP2's policy, and so without points there."""
ON_A_NEW_ENGINE = {"the first train_batch", "the first load_checkpoint"}
"""Without optimizer state yet, and before FSDP2's first forward pass."""
CHANGES_VALUES = {"train_batch", "load_checkpoint"} | ON_A_NEW_ENGINE
WITH_FILES = {"save_checkpoint", "load_checkpoint", "the first load_checkpoint"}
TOGETHER = WITH_FILES | {"export_weights"}
"""What ranks do together, and do no more in a process group in which it failed."""

AT_REST = {
    Offload.NONE: Placement.GPU,
    Offload.MANUAL: Placement.CPU_MANUAL,
    Offload.POLICY: Placement.CPU_FSDP2_MANAGED,
}


def own_part(step: int) -> list[torch.Tensor]:
    return [x.chunk(dist.get_world_size())[dist.get_rank()] for x in normed_batch(step)]


# What fails.


@dataclass(frozen=True)
class Point:
    """One event inside a call.

    Attributes:
        kind, number: which it is.
        rank: whose event fails; None if all ranks' do.
        reached: whether this rank gets to it.
    """

    kind: str
    number: int
    rank: int | None
    reached: bool

    def fails(self) -> AbstractContextManager[Any]:
        if self.kind == "file":
            return failing_files(self.number if self.reached else None)
        from placement import sim

        return sim.failing(**{self.kind: self.number})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (f" of rank {self.rank}" if self.rank else "")


def is_planned(error: BaseException | None, point: Point) -> bool:
    """Whether ``error`` is the failure of ``point``, or a report of it."""
    if error is None:
        return False
    if point.kind == "allocation" and isinstance(error, torch.OutOfMemoryError):
        return True
    if "planned" in str(error):  # as text, if it was another rank's
        return True
    return is_planned(error.__cause__, point) or is_planned(error.__context__, point)


# What was found, and must be found again.


@dataclass
class Found:
    """An engine's state, to compare with and to put back."""

    placements: dict[Component, Placement]
    places: Whereabouts
    values: dict[str, torch.Tensor]
    modes: list[bool]
    steps: int
    rate: float
    fresh: bool

    @classmethod
    def of(cls, engine: FSDPEngine) -> Found:
        return cls(
            placements=engine.manager.placements,
            places=whereabouts(engine.manager),
            values=values(engine.manager.census()),
            modes=[module.training for module in engine.module.modules()],
            steps=engine.steps,
            rate=engine.optimizer.param_groups[0]["lr"],
            fresh=not engine.optimizer.state,
        )

    def put_back(self, engine: FSDPEngine) -> None:
        """Undo what a failed step or load did to values and gradients, in place."""
        engine.optimizer.zero_grad()
        if self.fresh:  # torch may have made half of the state, and have set the rate to 0
            engine.optimizer.state.clear()
            engine.optimizer.param_groups[0]["lr"] = self.rate
        with torch.no_grad():
            for site in engine.manager.census().sites:
                value = self.values[f"{site.kind.value} {site.name}"]
                local(site.holding.tensor).copy_(value)
        engine.steps = self.steps

    def require(self, engine: FSDPEngine) -> None:
        now = Found.of(engine)
        # With messages, since pytest explains no assertion of another process.
        assert now.placements == self.placements, f"placements are {now.placements}"
        elsewhere = {name: now.places.get(name) for name in self.places.keys() | now.places.keys()}
        elsewhere = {n: at for n, at in elsewhere.items() if at != self.places.get(n)}
        assert not elsewhere, f"elsewhere: {elsewhere}"
        assert_equal(now.values, self.values)
        rest, found = (now.modes, now.steps, now.rate), (self.modes, self.steps, self.rate)
        assert rest == found, f"modes, steps and rate are {rest}, not {found}"


@dataclass
class NextStep:
    """What the next training step of an engine gives, and leaves."""

    result: StepResult
    after: Found

    @classmethod
    def of(cls, engine: FSDPEngine) -> NextStep:
        return cls(engine.train_batch(own_part(2)), Found.of(engine))

    def require(self, engine: FSDPEngine) -> None:
        result = engine.train_batch(own_part(2))
        assert result == self.result, f"the next step gives {result}, not {self.result}"
        self.after.require(engine)


# The campaign.


@dataclass
class Report:
    """What a campaign tried, and how it went."""

    points: Counter[str] = field(default_factory=Counter)
    absorbed: list[Point] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.points.items() if count)
        names = [str(point) for point in self.absorbed]
        absorbed = f"; {len(names)} absorbed: {names[0]} to {names[-1]}" if names else ""
        return f"{self.points.total():4} points ({kinds}){absorbed}"


@dataclass(frozen=True)
class Campaign:
    """All points of one call under one policy, in this process; on several ranks, in step."""

    name: str
    offload: Offload
    root: Path
    every_point: bool

    def prepared(self) -> FSDPEngine:
        """A new engine, as the call is to find it."""
        # To gather shards of unequal size, one rank pads: what it does is not what the other does.
        even = self.name == "export_weights"
        engine = normed_engine(self.offload, module=normed(4, 2) if even else None)
        if self.name not in ON_A_NEW_ENGINE:
            engine.train_batch(own_part(0))
        if self.name == "onload":
            engine.manager.offload()
        if self.name == "offload":
            engine.manager.onload()
        rest = {"onload": Placement.CPU_MANUAL, "offload": Placement.GPU}
        assert engine.manager.placement is rest.get(self.name, AT_REST[self.offload])
        if self.name == "save_checkpoint" and dist.get_rank() == 0:
            shutil.copytree(self.root / "kept", self.root / "replaced", dirs_exist_ok=True)
        return engine

    def call(self, engine: FSDPEngine) -> None:
        CALLS[self.name](engine, self.root)

    def run(self) -> Report:
        engine = normed_engine(self.offload)
        engine.train_batch(own_part(0))
        engine.save_checkpoint(self.root / "kept")
        expected = NextStep.of(self.prepared())
        report = Report()
        for point in self.points():
            if self.name in TOGETHER:
                rejoin_group(self.root)
            problems: list[str] = []
            if self.try_point(point, expected, problems):
                report.absorbed.append(point)
            report.broken += [f"{point}: {problem}" for problem in problems]
            report.points[point.kind] += 1
        return report

    def points(self) -> list[Point]:
        """The events of a call in which none fails."""
        from placement import sim

        engine = self.prepared()
        with sim.failing() as device, failing_files() as files:
            self.call(engine)
        counts = {
            "allocation": device.seen.allocations,
            "copy": device.seen.copies,
            "collective": device.seen.collectives,
            "file": len(files.seen),
        }
        assert bool(counts["file"]) == (self.name in WITH_FILES)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, counts)
        if self.name not in WITH_FILES:
            assert all(counted == counts for counted in everywhere), everywhere
        together = [
            Point(kind, number, None, reached=number <= counts[kind])
            for kind in ("allocation", "copy", "collective")
            for number in range(1, max(counted[kind] for counted in everywhere) + 1)
        ]
        alone = [
            Point("file", number, rank, reached=rank == dist.get_rank())
            for rank, counted in enumerate(everywhere)
            for number in range(1, counted["file"] + 1)
        ]
        if self.every_point or len(everywhere) == 1:
            return together + alone
        return [p for p in together + alone if p.kind == "collective" or p.number % 3 == 1]

    def try_point(self, point: Point, expected: NextStep, problems: list[str]) -> bool:
        """Let one point fail; add what is wrong afterwards to ``problems``.

        The next step is taken in any case, since the other rank takes it.

        Returns:
            Whether the failure was absorbed.
        """
        engine = self.prepared()
        found = Found.of(engine)
        with noting(problems), point.fails() as plan:
            error = self.error_of_the_call(engine)
            assert plan.fired == point.reached, "the plan was not met"
            assert error is None or is_planned(error, point), f"another error: {error!r}"
        absorbed = error is None
        del error  # its traceback holds tensors
        with noting(problems):
            engine.manager.verify()
        if self.name in CHANGES_VALUES:
            with noting(problems):
                found.put_back(engine)
        with noting(problems):
            found.require(engine)
        with noting(problems):
            expected.require(engine)
        with noting(problems):
            engine.manager.verify()
        return absorbed

    def error_of_the_call(self, engine: FSDPEngine) -> BaseException | None:
        try:
            self.call(engine)
        except Exception as error:
            return error
        return None


@contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}".splitlines()[0])


_groups = itertools.count()


def rejoin_group(root: Path) -> None:
    """Form the process group anew, if it is one of several ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        dist.destroy_process_group()
        device = find_compute_device().type
        join_group(device, rank, size, str(root / f"group{next(_groups)}"))


def campaign(name: str, offload: Offload, every_point: bool) -> Report:
    with tempfile.TemporaryDirectory(prefix="campaign-") as own:
        root = [own]
        dist.broadcast_object_list(root)
        try:
            return Campaign(name, offload, Path(root[0]), every_point).run()
        finally:
            dist.barrier()  # nobody's directory goes while others use it


# The tests.


@pytest.fixture(scope="module")
def announce(request: pytest.FixtureRequest) -> Iterator[Callable[[str, Report], None]]:
    """Print reports, and at the end their sum, whether pytest captures output or not."""
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    reports: list[Report] = []

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(line)

    def announced(title: str, report: Report) -> None:
        reports.append(report)
        write(f"  {title:<48} {report}")

    yield announced
    points = sum((report.points for report in reports), Counter[str]())
    absorbed = sum(len(report.absorbed) for report in reports)
    kinds = ", ".join(f"{kind} {count}" for kind, count in points.items())
    write(f"failure campaign: {points.total()} points tried ({kinds}), {absorbed} absorbed")


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def on_ranks(request: pytest.FixtureRequest, device_type: str) -> Callable[..., list[Report]]:
    """Run a body on that many ranks: in this process, or in two others."""
    if device_type != "sim":
        pytest.skip("makes chosen events fail, which only the simulated accelerator can")
    if request.param == 1:
        request.getfixturevalue("one_rank")
        return lambda body, *args: [body(*args)]
    ranks: Ranks = request.getfixturevalue("two_ranks")
    return lambda body, *args: ranks.run(body, *args)


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        pytest.param(name, offload, id=f"{name}, {offload.value}")
        for name in CALLS
        for offload in Offload
        if not (name in BY_HAND and offload is Offload.POLICY)
    ],
)
def test_a_failure_at_any_point_leaves_what_was_found_and_the_next_step_works(
    on_ranks: Callable[..., list[Report]],
    announce: Callable[[str, Report], None],
    pytestconfig: pytest.Config,
    name: str,
    offload: Offload,
) -> None:
    every_point = pytestconfig.getoption("--every-point", default=False)
    reports = on_ranks(campaign, name, offload, every_point)
    title = f"{name}, {offload.value}, {len(reports)} rank{'s' * (len(reports) > 1)}"
    announce(title, reports[0])
    for report in reports:
        assert report.points.total() > 0
        assert not report.broken, "\n".join([f"{len(report.broken)} problems:", *report.broken])
