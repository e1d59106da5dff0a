"""The front door: one manager for one module and its optimizer.

A manager keeps the record of where the module is (``record.py``), moves it (``mover.py``), and
opens contexts (``leases.py``) that make sure of what an operation needs and leave the placement
that they found. What it did stands in the trace (``journal.py``, ``trace.py``).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeVar

import torch
from torch import nn

from placement.agreement import Agreement
from placement.attach import Attachment
from placement.census import Census
from placement.claims import Claim
from placement.errors import (
    AlreadyManaged,
    ContradictoryOptions,
    DeclarationBroken,
    Detached,
    PlacementDrift,
    PlacementError,
)
from placement.foreign import AlreadyWatched, unwatch, watch
from placement.journal import Journal, one_line
from placement.leases import Lease, Leases
from placement.leftovers import Leftover
from placement.manifest import optimizer_manifest
from placement.mover import Begun, Mover
from placement.names import one_or_several
from placement.owners import Owner
from placement.record import Record
from placement.residence import require_matches, require_possible
from placement.states import (
    COMPUTES_WITH,
    HOLDS,
    UNCHANGED_BY,
    Component,
    Mode,
    Operation,
    Placement,
    Trigger,
    destination,
)
from placement.tensors import same_device
from placement.torch_private import Span
from placement.trace import Trace, call_site, process_trace
from placement.undisturbed import undisturbed
from placement.use import UseGuard
from placement.watch import ForeignWatch
from placement.weights import (
    Adapters,
    Names,
    Shard,
    Snapshot,
    Tied,
    Weight,
    gathered,
    planned,
    restore,
    shards_of,
    take_snapshot,
    write_adapter,
    write_pretrained,
)

_LOG = logging.getLogger("placement")

_Item = TypeVar("_Item")
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})

_FILE_BUCKET_BYTES = 256 * 2**20
"""Bytes of device memory for the weights that are gathered at once on their way into a file."""

VERIFY_VARIABLE = "TORCH_PLACEMENT_VERIFY"
"""Environment variable: ``verify=`` for managers that are not told."""


class PlacementManager:
    """Guards where a module's tensors are.

    Args:
        module: the module, already sharded. It is adopted as it is found; who owns its placement
            and where it lies are read from it.
        optimizer: its optimizer, over the module's own parameters.
        scaler: the gradient scaler used with the optimizer. Its tensors are part of the optimizer's
            state.
        device: the compute device. By default the one that the module's owner computes on, else
            the accelerator that torch finds.
        stays: a name or ``fnmatch`` pattern, or several, of parameters and buffers that are meant
            to live where they are; names as in the census, without the parts of wrappers. They are
            never moved, nor are their gradients and optimizer state.
        rest: where the module is to rest between operations; it is brought there at once. None
            leaves it as it was found.
        on_drift: what happens when the tensors are found elsewhere than the record says, at the
            next context or move. ``"raise"``: :class:`~placement.errors.PlacementDrift`.
            ``"adopt"``: the placement is read anew from the tensors, unless a context is open or
            they show none.
        unchanged: a name or ``fnmatch`` pattern, or several, of parameters and buffers that nobody
            changes while they are on the device: frozen layers, a reference model (``"*"``). An
            offload drops their device copy and keeps the host copy, and raises
            :class:`~placement.errors.DeclarationBroken` if a digest says that they were changed. An
            evaluation declares as much for all parameters.
        trust: leave the digest out: what is declared unchanged is not checked. A change is lost
            without a word.
        verify: when the census is compared with the record. ``"boundaries"``: before anything
            moves, at save, load and export, and on :meth:`verify`. ``"always"``: at the beginning
            of every context too, which walks over all tensors. None: what the environment
            variable ``TORCH_PLACEMENT_VERIFY`` says (the pytest plugin sets ``always``), else
            ``"boundaries"``.
        deadline: seconds that the ranks of the default process group wait for each other at a save,
            load or export. It has to exceed what the slowest of them does alone, such as writing
            its file; see :mod:`placement.agreement`.
        trace: where events go; by default the trace of the process.

    Under FSDP2's ``CPUOffloadPolicy`` buffers and ignored parameters are FSDP2's to compute with
    but not to move: the manager puts them on the compute device when it adopts the module.

    Raises:
        AlreadyManaged: another manager has the module, a part of it, or memory that it shares.
        NoAccelerator: there is no compute device.
        NothingToPlace: the module has no parameters.
        OwnershipUnclear: who may move the module can't be told.
        ScatteredModule: it lies on several devices and ``stays`` does not say so, or FSDP2 manages
            it and its parameters are not where FSDP2 wants them.
        ForeignOptimizer: the optimizer updates other tensors than the module's parameters.
        ContradictoryOptions: ``rest`` or ``device`` does not agree with the module's owner, a
            pattern in ``stays`` matches nothing, or FSDP2 keeps gradients on the CPU and the
            process group has no backend for the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        device: torch.device | str | None = None,
        stays: str | Iterable[str] = (),
        unchanged: str | Iterable[str] = (),
        trust: bool = False,
        rest: Placement | str | None = None,
        on_drift: Literal["raise", "adopt"] = "raise",
        verify: Literal["boundaries", "always"] | None = None,
        deadline: float = 600.0,
        trace: Trace | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.trace = trace if trace is not None else process_trace()
        if scaler is not None and optimizer is None:
            raise ContradictoryOptions(
                asked="adopting the module",
                state="scaler= is given without optimizer=",
                why="a gradient scaler's tensors are part of the optimizer's state",
                instead="pass the optimizer, too",
            )
        self._record = Record(module, optimizer, scaler, device=device, stays=one_or_several(stays))
        self._detached = False
        self._leases = Leases()
        self._journal = Journal(self.trace, self._record, self._leases)
        declared = one_or_several(unchanged)
        require_matches(declared, self._record.census(), "unchanged=")
        self._claim = Claim(self._record)
        self._claim.refuse_shared("adopting the module", self._record.census())
        self._mover = Mover(
            self._record, self._claim, self._journal, unchanged=declared, trust=trust
        )
        self._watch = ForeignWatch(self._record, self._journal)
        try:
            watch(module, self._watch)
        except AlreadyWatched:
            raise AlreadyManaged(
                asked="adopting the module",
                state="another manager has it, or a part of it",
                why="two managers would move the same tensors and each find drift",
                instead="use the manager that is there, or detach() it first",
            ) from None
        self._use_guard = UseGuard(self._record, self._journal)
        self._claim.stake()
        self._record.owner.adopted()
        self._verify_always = _verify(verify) == "always"
        self._adopt_on_drift = _one_of("on_drift", on_drift, ("raise", "adopt")) == "adopt"
        self._agreement = Agreement(deadline)
        self._lock = threading.RLock()
        self._pending: PendingMove | None = None
        self._place_what_the_owner_leaves_to_us()
        if rest is not None:
            known = tuple(placement.value for placement in Placement)
            named = rest.value if isinstance(rest, Placement) else rest
            self._come_to_rest(Placement(_one_of("rest", named, known)))

    # What is, and what may be done.

    @property
    def placement(self) -> Placement:
        """Where the record says that the parameters are."""
        return self._record[Component.PARAMS]

    @property
    def device(self) -> torch.device:
        """The compute device, with its index."""
        return self._record.device

    @property
    def deadline(self) -> float:
        """Seconds that the ranks wait for each other at a save, load or export."""
        return self._agreement.deadline

    @property
    def owner(self) -> Owner:
        """Who owns the module's placement, as read from the module."""
        return self._record.owner

    @property
    def placements(self) -> dict[Component, Placement]:
        """Where the record says that each component is; the optimizer's state only if there is an
        optimizer."""
        return self._record.placements()

    def may(self, trigger: Trigger) -> bool:
        """Whether the parameters' machine accepts ``trigger`` now."""
        return self._record.machines[Component.PARAMS].may(trigger)

    def may_save(self) -> bool:
        """Whether parameters may be staged by hand for a checkpoint. :meth:`saving` works
        regardless: where they may not, it writes from where the shards are."""
        return self.may(Trigger.SAVE)

    def census(self) -> Census:
        """Where every parameter, gradient, buffer and optimizer tensor really is, now."""
        return self._record.census()

    def verify(self) -> Census:
        """Compare the record with the tensors.

        Returns:
            The census that agreed.

        Raises:
            OwnershipChanged: the wrapping or the policy is not what was adopted.
            ForeignOptimizer: the optimizer's parameters are no longer the module's.
            PlacementDrift: a tensor is not where the record says (whatever ``on_drift`` is).
        """
        self._finish_pending()
        with self._journal.refusals("verify"), self._lock:
            return self._record.check("verify()")

    def detach(self) -> None:
        """Let the module go, where it is. The manager refuses everything afterwards.

        Raises:
            PlacementHeld: a context is open.
        """
        self._finish_pending()
        for component in Component:
            self._leases.refuse_move(component, "detach()")
        unwatch(self._watch)
        self._use_guard.remove()
        self._claim.release()
        self._detached = True

    def attach(
        self,
        engine: object,
        *,
        to: str | None = "to",
        train: str | None = "train_mode",
        evaluate: str | None = "eval_mode",
        save: str | None = "save_checkpoint",
        load: str | None = "load_checkpoint",
        export: str | Iterable[str] = (),
    ) -> Attachment:
        """Put this manager under the methods of an engine, whose class is left as it is.

        They are wrapped on this instance: each runs in the context that fits, and leaves the
        placement that it found. The engine's own moves are seen to: what it calls of its ``to`` in
        a wrapped method moves nothing. ``docs/examples/test_attach_an_engine.py`` shows an engine.
        A method that it has not is named None.

        Args:
            engine: an engine over this manager's module.
            to: name of its method that moves by hand; it becomes :meth:`to`. It may be called as
                ``to(device)``, or with ``model``, ``optimizer`` and ``grad`` as well.
            train, evaluate: names of its methods that return a context in which it trains or
                evaluates (``with engine.train_mode(): ...``). A method that trains at once is not
                attached, but guarded in its body by :meth:`training`.
            save, load: names of its methods that write and read a checkpoint. In them its state
                dicts are where the model rests.
            export: name or names of its generator methods that yield weights. In them these are on
                the compute device.

        Returns:
            The attachment; its :meth:`~placement.attach.Attachment.detach` undoes it.

        Raises:
            ContradictoryOptions: the engine has no method of a name; also, when it is called, a
                method for training or evaluating that returns no context.
            AlreadyManaged: a manager is attached to it.
        """
        return Attachment(
            self,
            engine,
            to=to,
            train=train,
            evaluate=evaluate,
            save=save,
            load=load,
            export=one_or_several(export),
        )

    def recover(self) -> None:
        """Make a torn module whole: put every tensor where the record says it was before the move
        that failed and could not be taken back. Does nothing to a module that is whole.

        Raises:
            PlacementError, RuntimeError: that failed too; it stays torn, and can be tried again.
        """
        self._finish_pending()
        with self._journal.refusals("recover"), self._lock:
            self._require_attached("recover()")
            self._mover.recover()
            self._record.check("recover()")

    # Moves by hand.

    def onload(
        self,
        include: Component | str | Iterable[Component | str] | None = None,
        *,
        wait: bool = True,
    ) -> PendingMove:
        """Bring the model and the optimizer's state to the compute device.

        What is there already is left in peace. The placement this leaves is the one that later
        contexts find and restore.

        Args:
            include: the component to bring, or several, by name: ``params``, ``grads``,
                ``buffers``, ``optimizer``. None for all.
            wait: whether to wait for the copies. Without it they run beside the computation; the
                tensors stay where they are, and so does the record, until the move is waited for.
                Nobody may write to them meanwhile. Whatever is asked of the manager next, waits.

        Returns:
            The move, for ``wait()``.

        Raises:
            ContradictoryOptions: ``include`` names a component that is not known, or not there.
            IllegalTransition: the module's placement is not for hands to change.
            PlacementHeld: an open context works with the tensors where they are.
            PlacementDrift: the tensors are not where the record says.
            NotEnoughMemory: they would not fit.
            CannotMove: one of them could not come back as it was.
            AlreadyManaged: since its adoption it came to share memory with another's module.
        """
        return self._move_by_hand(Trigger.ONLOAD, self._included(include), wait=wait)

    def offload(
        self,
        include: Component | str | Iterable[Component | str] | None = None,
        *,
        wait: bool = True,
    ) -> PendingMove:
        """Put the model and the optimizer's state on the CPU, or what ``include`` names of them.

        Args, returns, raises: as :meth:`onload` does.

        Raises:
            DeclarationBroken: something was changed that was declared unchanged. It has moved.
        """
        return self._move_by_hand(Trigger.OFFLOAD, self._included(include), wait=wait)

    def to(
        self,
        device: torch.device | str,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """:meth:`onload` or :meth:`offload` in the words of verl's engines.

        Args:
            device: the compute device, with or without its index, or the CPU.
            model: whether parameters and buffers move.
            optimizer: whether the optimizer's state moves, if there is an optimizer.
            grad: whether gradients move. Independent of ``model``.

        Raises:
            ContradictoryOptions: ``device`` is neither of the two.
        """
        target = torch.device(device)
        if target.type != "cpu" and not same_device(target, self.device):
            raise ContradictoryOptions(
                asked=f"to({str(device)!r})",
                state=f"the module is placed between {self.device} and the CPU",
                why="it is computed with on no other device",
                instead=f"name {self.device} or cpu",
            )
        asked = {
            Component.PARAMS: model,
            Component.GRADS: grad,
            Component.BUFFERS: model,
            Component.OPTIMIZER: optimizer and self.optimizer is not None,
        }
        trigger = Trigger.OFFLOAD if target.type == "cpu" else Trigger.ONLOAD
        self._move_by_hand(trigger, [component for component, wanted in asked.items() if wanted])

    def _included(
        self, include: Component | str | Iterable[Component | str] | None
    ) -> list[Component]:
        """The components that ``include`` names.

        Raises:
            ContradictoryOptions: one is not known, or not there.
        """
        there = {component.value: component for component in self._record.machines}
        if include is None:
            return list(there.values())
        parts = [include] if isinstance(include, str | Component) else include
        names = [part.value if isinstance(part, Component) else part for part in parts]
        return [there[_one_of("include", name, tuple(there))] for name in names]

    def _move_by_hand(
        self, trigger: Trigger, components: Iterable[Component], *, wait: bool = True
    ) -> PendingMove:
        dest = destination(trigger)
        self._finish_pending()
        with self._journal.refusals(trigger.value), self._lock:
            asked = f"{trigger.value}()"
            self._require_attached(asked)
            self._record.require_whole(asked)
            self._leases.refuse_other_threads(asked)
            if self._watch.unchecked:
                self._check(asked)
            machines = self._record.machines
            wanted = {c: dest for c in components if machines[c].state is not dest}
            for component in wanted:
                if not machines[component].may(trigger):
                    raise machines[component].refusal(trigger)
                self._leases.refuse_move(component, asked)
            if wait:
                self._refuse_broken(self._mover.bring(wanted, asked), asked)
            else:
                with undisturbed() as deliver_interrupt:
                    begun = self._mover.begin(wanted, asked, between=deliver_interrupt)
                    if begun is not None:
                        self._pending = PendingMove(self, begun, asked)
                        return self._pending
        return PendingMove(self, None, asked)

    def _finish_pending(self) -> None:
        """Wait for a move that was begun with ``wait=False``, and make it.

        Raises: as :meth:`onload` and :meth:`offload`.
        """
        with self._lock:
            if (pending := self._pending) is None:
                return
            self._pending = None
            begun, asked = pending._begun, pending._asked
            assert begun is not None
            pending._begun = None  # whoever keeps the handle keeps no tensors with it
            with self._journal.refusals(asked), undisturbed():
                try:
                    self._record.check(f"the end of {asked}")
                except BaseException:
                    begun.transfer.abandon()
                    raise
                self._refuse_broken(self._mover.complete(begun), asked)

    def _refuse_broken(self, changed: list[str], asked: str) -> None:
        """Complain that tensors were changed that were declared unchanged. They have moved, with
        their new values.

        Raises:
            DeclarationBroken: there are some.
        """
        if changed:
            raise DeclarationBroken(
                asked=asked,
                state=f"{len(changed)} tensors were declared unchanged on the device and were "
                "changed there",
                why="their digests differ; without the check their new values would be lost. The "
                "move was made, and kept them",
                tensors=changed,
                instead="change values inside manager.training(), loading() or "
                "evaluating(unchanged=False), and leave what is changed out of unchanged=",
            )

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory that are kept for moves, in use or not."""
        return self._mover.host_bytes

    def release_host_memory(self) -> int:
        """Let go of the pinned memory that is kept for moves to come. The next offload makes it
        again, which takes longer than the copy.

        Returns:
            Bytes that were let go; memory that tensors rest in is kept.
        """
        self._finish_pending()
        with self._lock:
            return self._mover.release_host_memory()

    def leftovers(self) -> list[Leftover]:
        """What the last offload copied away and that is still alive on the device, because
        something else looks into it: a state dict, a view, a graph that waits for its backward;
        and what it left there because the module keeps it in a plain attribute.

        An offload after which memory did not come back says so in the log. This names the tensors
        and, as far as Python knows, what holds them. It takes as long as a garbage collection, and
        is to be called before anything else is allocated.
        """
        self._finish_pending()
        with self._lock:
            return self._mover.leftovers()

    # Contexts.

    def training(self) -> AbstractContextManager[Mode]:
        """A context in which the model and the optimizer's state are on the compute device, or
        where FSDP2's policy wants them."""
        return self._operating(Operation.TRAIN)

    def evaluating(self, *, unchanged: bool = True) -> AbstractContextManager[Mode]:
        """A context in which the model is on the compute device, or where FSDP2's policy wants
        it. Gradients and the optimizer's state stay where they are.

        Args:
            unchanged: whether the parameters keep their values, so that they go back without a
                copy. False is for a body that writes to them, as one that merges an adapter into
                its base weights does: taking it out again does not leave the same bits.

        Raises:
            DeclarationBroken: they did not keep them. The new values were kept.
        """
        changes = frozenset() if unchanged else frozenset({Component.PARAMS})
        return self._operating(Operation.EVALUATE, changes=changes)

    def saving(self, step: int | None = None) -> AbstractContextManager[Mode]:
        """A context in which the state dicts can be read for a checkpoint, from every placement.

        It moves nothing unless the owner needs it (FSDP1 gathers on the compute device), and
        yields how it got at the parameters. All ranks enter it together or none does.

        Args:
            step: the training step, which must be the same on all ranks.

        Raises:
            RanksDisagree: the ranks are in different states or steps, do different things, or have
                different groups or entries of optimizer state for parameters that all share.
            RankLost: a rank did not come, or failed inside the context.
            GroupPoisoned: one did earlier.
        """
        return self._together(Operation.SAVE, step)

    def loading(self, step: int | None = None) -> AbstractContextManager[Mode]:
        """A context in which the state dicts can be loaded, in every placement. What a load
        installed on another device than the record's is put right on the way out. All ranks enter
        it together; see :meth:`saving`."""
        return self._together(Operation.LOAD, step)

    def exporting(self, step: int | None = None) -> AbstractContextManager[Mode]:
        """A context in which weights can be read one at a time, in every placement. All ranks enter
        it together; see :meth:`saving`."""
        return self._together(Operation.EXPORT, step)

    # Weights.

    def export_weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 256 * 2**20,
        names: Names | None = None,
        tied: Tied = "once",
        adapters: Adapters = "merged",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in full, on the compute device, from every placement, for a rollout engine.

        A generator, consumed by all ranks in step. Its context is open from the first item to the
        last, or until it is closed or collected; training and loading are refused meanwhile. The
        module is read, never written or moved.

        Device memory rises by at most ``bucket_bytes``, or by what the largest weight takes if that
        is more: its own bytes, with the padding of uneven shards, where it is whole or sharded on
        its first dimension alone; up to three times its bytes where it is sharded otherwise; for a
        weight that LoRA adapts, twice the bytes of the adapter's product more. What the consumer
        keeps comes on top.

        Args:
            dtype: what floating-point weights are converted to; None leaves them.
            bucket_bytes: the most bytes of device memory for the weights that are gathered at once.
            names: how names are changed: a function of the name, or a mapping that leaves the names
                which it does not have.
            tied: whether a weight that is registered under two names comes ``"once"``, under the
                first, or under ``"both"``.
            adapters: of a peft model. ``"merged"``: the weights of the model that peft wrapped,
                LoRA added to each gathered copy. ``"only"``: the active adapter alone, in peft's
                names.

        Yields:
            Name and tensor. The name is as in the state dict, without the parts that wrappers
            (DDP, FSDP1, ``torch.compile``, activation checkpointing, peft) put into it. The tensor
            is the consumer's own: it shares its bytes with nothing.

        Raises:
            ContradictoryOptions: an option is not known, ``names`` does not fit, or there is no
                adapter.
            UnsupportedAdapter: the adapters can't be exported so.
            PlacementDrift: the module was converted between two weights.
            RanksDisagree, RankLost, GroupPoisoned: see :meth:`saving`.
        """
        _one_of("tied", tied, ("once", "both"))
        _one_of("adapters", adapters, ("merged", "only"))
        options = {"dtype": str(dtype), "bucket_bytes": str(bucket_bytes), "adapters": adapters}
        with self._exporting_in_place(options | {"tied": tied}):
            weights = planned(self.owner, names=names, tied=tied, adapters=adapters)
            yield from self._gathered(weights, dtype, bucket_bytes)

    def export_shards(self, *, names: Names | None = None) -> Iterator[Shard]:
        """This rank's part of each weight, where it rests, and where it belongs in the whole.

        Nothing is gathered, moved or copied: a shard *shares its bytes with the module*, on
        whatever device that rests. Its values are the export's until the context ends, which is
        after the last item, or when the generator is closed; what is needed longer has to be
        cloned. A generator, entered by all ranks together. Adapters come as peft keeps them.

        Args:
            names: as in :meth:`export_weights`.

        Raises:
            ContradictoryOptions: ``names`` does not fit the weights.
            PlacementDrift: the module was converted between two shards.
            RanksDisagree, RankLost, GroupPoisoned: see :meth:`saving`.
        """
        with self._exporting_in_place():
            yield from self._unconverted(shards_of(self.owner, names=names))

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 * 10**9,
        names: Names | None = None,
        adapters: Adapters = "merged",
    ) -> None:
        """Write the weights as ``transformers`` loads them, from every placement: safetensors files
        with their index, the model's ``config.json`` and ``generation_config.json`` if it has
        them. With ``adapters="only"`` write the active adapter as ``peft`` loads it.

        Rank 0 writes; it holds the weights of one file in host memory at a time. Weights that are
        tied are written once. The directory is built beside its place and renamed, so that an error
        leaves what was there; other files in it (a tokenizer) are carried over.

        Args:
            directory: the place, on a disk that rank 0 sees.
            dtype: what floating-point weights are converted to; None leaves them.
            max_shard_bytes: the most bytes of weights in one file, unless a single weight has more.
            names, adapters: as in :meth:`export_weights`.

        Raises:
            ExportFailed: rank 0 could not write. Raised on all ranks; they are still in step.
            MissingPackage: safetensors or huggingface_hub is not installed.
            ContradictoryOptions, UnsupportedAdapter, RanksDisagree, RankLost, GroupPoisoned: as
                :meth:`export_weights`.
        """
        _one_of("adapters", adapters, ("merged", "only"))
        options = {"dtype": str(dtype), "max_shard_bytes": str(max_shard_bytes)}
        with self._exporting_in_place(options | {"adapters": adapters}):
            weights = planned(self.owner, names=names, tied="once", adapters=adapters)
            write = (
                write_adapter
                if adapters == "only"
                else partial(write_pretrained, max_shard_bytes=max_shard_bytes)
            )
            gather = partial(self._gathered, dtype=dtype, bucket_bytes=_FILE_BUCKET_BYTES)
            write(self.module, weights, directory, dtype=dtype, gather=gather)

    def _exporting_in_place(
        self, options: Mapping[str, str] = _NO_OPTIONS
    ) -> AbstractContextManager[Mode]:
        in_place = self.owner.weights_in_place
        return self._together(Operation.EXPORT, options=options, in_place=in_place)

    def _gathered(
        self, weights: Sequence[Weight], dtype: torch.dtype | None, bucket_bytes: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        lease = self._leases.innermost
        assert lease is not None

        def staged(nbytes: int) -> None:
            lease.staged_bytes += nbytes

        return self._unconverted(
            gathered(weights, self.device, dtype=dtype, bucket_bytes=bucket_bytes, staged=staged)
        )

    def _unconverted(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """``items``, as long as nobody converts the module."""
        conversions = self._watch.conversions
        for item in items:
            yield item
            del item
            if self._watch.conversions != conversions:
                raise PlacementDrift(
                    asked="the next weight of an export",
                    state=f"{self._watch.last_conversion} converted the module meanwhile",
                    why="a conversion replaces tensors, and what is still to come would be of "
                    "those that were replaced",
                    instead="finish an export, or close it, before the module is converted",
                )

    # Snapshots.

    def snapshot(self) -> Snapshot:
        """A private copy, in host memory, of what training changes: parameters, buffers, the
        optimizer's state and options, and the gradient scaler's state. From every placement; of
        sharded tensors this rank's shards. Gradients, schedulers and random numbers are not in it.

        Raises:
            RanksDisagree, RankLost, GroupPoisoned: see :meth:`saving`.
        """
        with self.saving():
            return take_snapshot(self._record)

    def restore(self, snapshot: Snapshot) -> None:
        """Write a snapshot's values back, to the bit, into the tensors that are there, in whatever
        placement they are by now. Gradients are left as they are.

        Raises:
            ForeignSnapshot: it does not fit the module or its optimizer. Nothing was written.
            RanksDisagree, RankLost, GroupPoisoned: see :meth:`saving`.
        """
        with self.loading():
            restore(self._record, snapshot)

    @contextmanager
    def _together(
        self,
        operation: Operation,
        step: int | None = None,
        options: Mapping[str, str] = _NO_OPTIONS,
        *,
        in_place: bool = False,
    ) -> Iterator[Mode]:
        """An operation of all ranks: they agree before it, and leave it together.

        What can be refused without a move is refused before, and the others are told. The placement
        is restored, by local moves, before the ranks meet again.

        Args:
            operation: what is about to be done.
            step: the training step, if it matters.
            options: what else has to be the same on all ranks, by name.
            in_place: whether it needs nothing on the compute device, whatever others would.
        """
        entered_at = call_site()
        self._finish_pending()
        facts = {c.value: placement.value for c, placement in self._record.placements().items()}
        del facts[Component.GRADS.value]  # one rank may have some where another has none
        facts |= {"step": str(step), **options}
        if operation is Operation.SAVE and self.optimizer is not None:
            facts |= optimizer_manifest(self.optimizer, self.owner.parameters())
        refusal: PlacementError | None = None
        try:
            with self._journal.refusals(operation.value), self._lock:
                asked = f"a context for {operation.value}"
                self._require_possible(operation, asked)
                self._check(asked)
        except PlacementError as error:
            refusal = error
        with self._journal.refusals(operation.value):
            agreed = ExitStack()
            agreed.enter_context(self._agreement.together(operation.value, facts, refusal))
        with agreed, self._operating(operation, entered_at, in_place) as mode:
            yield mode

    @contextmanager
    def _operating(
        self,
        operation: Operation,
        entered_at: str | None = None,
        in_place: bool = False,
        changes: frozenset[Component] = frozenset(),
    ) -> Iterator[Mode]:
        """Make sure of what ``operation`` needs; restore what was found, whatever happens.

        An exception in the body is the one that propagates. If the restoring move fails after it,
        twice, the record stays true (a move is whole or did not happen), the trace has the
        failures, and a note on the exception tells of it.
        """
        unchanged = UNCHANGED_BY[operation] - changes
        lease, mode = self._enter(operation, entered_at or call_site(), in_place, unchanged)
        found = lease.found[Component.PARAMS]
        failure: BaseException | None = None
        try:
            with Span(f"placement: {operation.value}"):
                yield mode
            if operation is Operation.LOAD:
                self._put_right_what_was_loaded()
            if not COMPUTES_WITH[operation]:
                self._require_what_was_found(lease)
        except BaseException as error:
            failure = error
            self.owner.abandon()
            raise
        finally:
            try:
                self._leave(lease)
            except Exception as restoring:
                if failure is None:
                    failure = restoring
                    raise
                _tell(failure, restoring)
            finally:
                self._journal.ended(lease, mode, found, failure)

    def _require_possible(self, operation: Operation, asked: str) -> None:
        """Refuse what can be refused without a look at the tensors."""
        self._require_attached(asked)
        self._record.require_whole(asked)
        self._leases.refuse_other_threads(asked)
        self._leases.refuse_operation(operation, asked)

    def _enter(
        self,
        operation: Operation,
        entered_at: str,
        in_place: bool,
        unchanged: frozenset[Component],
    ) -> tuple[Lease, Mode]:
        """Check and bring what ``operation`` needs, then open its lease."""
        self._finish_pending()
        collective = not COMPUTES_WITH[operation]  # then the ranks have checked it together
        with self._journal.refusals(operation.value), self._lock:
            asked = f"a context for {operation.value}"
            self._require_possible(operation, asked)
            if not collective and (self._verify_always or self._watch.unchecked):
                self._check(asked)
            needs, mode = self._needs(operation, in_place)
            found = self._record.placements()
            lease = Lease(operation, needs, HOLDS[operation], unchanged, found, entered_at)
            self._leases.begin(lease)
            self._journal.entered(lease, mode)
            try:
                self._mover.expect_changes(found.keys() - unchanged)
                self._mover.bring({c: Placement.GPU for c in found if c in needs}, asked, unchanged)
                if operation is Operation.SAVE and self.may_save():
                    self._mover.fire(Component.PARAMS, Trigger.SAVE)
            except BaseException as error:
                self._leave(lease)
                self._journal.ended(lease, mode, found[Component.PARAMS], error)
                raise
            return lease, mode

    def _needs(self, operation: Operation, in_place: bool) -> tuple[frozenset[Component], Mode]:
        """What must be on the compute device for ``operation``, and how it gets at it."""
        if self.owner.managed is not None or in_place:
            return frozenset(), Mode.IN_PLACE  # what is needed is brought when it is needed
        staged = self.owner.stages.get(operation, frozenset()) & self._record.machines.keys()
        if any(self._record[component] is not Placement.GPU for component in staged):
            return staged, Mode.STAGED
        return COMPUTES_WITH[operation], Mode.IN_PLACE

    def _require_what_was_found(self, lease: Lease) -> None:
        """A body that only reads or writes values must not have moved tensors past the manager. It
        may have, and not by ``module.to``: a callback that moves what it saves, in place."""
        asked = f"leaving {lease.operation.value}"
        with self._journal.refusals(asked), self._lock:
            self._record.check(asked)

    def _leave(self, lease: Lease) -> None:
        asked = f"leaving {lease.operation.value}"
        with self._journal.refusals(asked), self._lock:
            try:
                if self._watch.unchecked:
                    self._record.check(asked)
                if lease.operation is Operation.EVALUATE:
                    self.owner.evaluated()
                changed = self._put_back(lease, asked)
            finally:
                self._leases.end(lease)
            self._refuse_broken(changed, asked)

    def _put_back(self, lease: Lease, asked: str) -> list[str]:
        """Bring back what a context found. A copy that failed has changed nothing, and nobody else
        will put it back, so it is tried a second time."""
        owed = self._leases.owed(lease)
        try:
            return self._mover.bring(owed, asked, lease.unchanged)
        except RuntimeError as error:
            _LOG.warning("the placement found is restored at the second try: %s", one_line(error))
            return self._mover.bring(owed, asked, lease.unchanged)

    # Checks.

    def _check(self, asked: str) -> None:
        """Compare the record with the tensors, or read it anew if that was asked for."""
        try:
            self._record.check(asked)
        except PlacementDrift:
            if not self._adopt_on_drift or self._leases.innermost is not None:
                raise
            for component, was in self._record.adopt_anew().items():
                self._journal.adopted(component, was)
            self._record.check(asked)
        self._watch.unchecked = False

    def _require_attached(self, asked: str) -> None:
        if self._detached:
            raise Detached(
                asked=asked,
                state="the manager was detached from its module",
                why="others may have moved it since",
                instead="make a new manager for the module",
            )

    # What adoption and loading leave to be put right.

    def _place_what_the_owner_leaves_to_us(self) -> None:
        if (managed := self.owner.managed) is not None:
            strays = self._record.residence.strays(self.census(), managed)
            self._mover.relocate(strays, "adopt")

    def _put_right_what_was_loaded(self) -> None:
        """After a load every tensor is where the record says, whatever the file said; but under a
        policy that allows nobody to move it, where that is drift."""
        if self.owner.managed is not None:
            return
        census = self.census()
        for component, placement in self._record.placements().items():
            strays = self._record.residence.strays(census.of(component), placement)
            self._mover.relocate(strays, "load")

    def _come_to_rest(self, rest: Placement) -> None:
        require_possible(self.owner, rest)
        with self._journal.refusals("rest"):
            self._mover.bring(dict.fromkeys(self._record.machines, rest), f"rest={rest.value}")


class PendingMove:
    """A move whose copies may still be under way."""

    def __init__(self, manager: PlacementManager, begun: Begun | None, asked: str) -> None:
        self._manager = manager
        self._begun = begun
        self._asked = asked

    @property
    def done(self) -> bool:
        """Whether the move was made (or nothing was to be moved), or given up."""
        return self._manager._pending is not self

    def wait(self) -> None:
        """Wait for the copies, and make the move. Does nothing to one that is done.

        Raises:
            PlacementDrift: the tensors were moved meanwhile; nothing was changed.
            DeclarationBroken: as :meth:`PlacementManager.offload`.
            Exception: whatever a copy raised; nothing was changed.
        """
        if not self.done:
            self._manager._finish_pending()


def _one_of(option: str, value: str, known: tuple[str, ...], source: str = "the call") -> str:
    """Refuse a value that an option does not know: it is a typing error, and would be silently off.

    Raises:
        ContradictoryOptions: ``value`` is not one of ``known``.
    """
    if value not in known:
        raise ContradictoryOptions(
            asked=f"{option}={value}",
            state=f"it comes from {source}",
            why=f"what is known is {', '.join(known)}",
            instead="choose one of them",
        )
    return value


def _verify(asked: str | None) -> str:
    source = "the call" if asked else VERIFY_VARIABLE
    wanted = asked or os.environ.get(VERIFY_VARIABLE) or "boundaries"
    return _one_of("verify", wanted, ("boundaries", "always"), source)


def _tell(failure: BaseException, restoring: Exception) -> None:
    """Add to an exception on its way that the placement found could not be restored."""
    _LOG.error("the placement found could not be restored: %s", one_line(restoring))
    failure.add_note(f"The placement found could not be restored: {restoring}")
