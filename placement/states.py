"""The placement state machine's one table.

Two rules keep this file honest:

1. Everything that decides whether a placement may change stands here. The machine, the error
   messages, the diagrams, the trace checker and the tests are derived from :data:`TABLE` and
   :data:`TORN`; none of them restates a row.
2. This file knows no tensor. It imports neither torch nor transitions, so it can be read, tested
   and drawn on any machine.

Theory of operation
-------------------
A *component* (the parameters, their gradients, the buffers, or the optimizer's state) is in exactly
one :class:`Placement`. Two questions are folded into it, because neither is useful alone: *where*
do the tensors rest, and *who* may move them. "On the CPU" by itself is no state: tensors that the
engine put there by hand may be brought back by hand, tensors that FSDP2's ``CPUOffloadPolicy``
keeps there may not. Mistaking the second for the first is the fault this project exists for
(https://github.com/verl-project/verl/issues/5995).

Three *triggers* can be fired. ``onload`` and ``offload`` move bytes. ``save`` moves none: it is
the right to stage parameters by hand for a checkpoint, and is therefore legal exactly where moving
them by hand is safe; it ends in the state it started from. A managed module needs no such right,
since its checkpoint is written from where the shards are; *taking* a checkpoint is an
:class:`Operation` and possible in every state.

:data:`TABLE` is total: each pair of state and trigger has a row, either :class:`Legal` with the
state it leads to, or :class:`Illegal` with the reason and the remedy that the error will print.
Adding a state is adding its rows.

Beside its placement a component has an :class:`Integrity`. It becomes ``torn`` when a move failed
and could not be taken back, so that tensors lie in two places. A torn component has one answer to
every trigger, :data:`TORN`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class _Identified(enum.Enum):
    """Members that hash by identity, as there is one of each. ``enum.Enum`` hashes their names, in
    Python, and most look-ups here are by members."""

    __hash__ = object.__hash__


class Placement(_Identified):
    """Where a component's tensors rest, and who may move them."""

    GPU = "gpu"
    """Every tensor that may move is on the compute device. Moving them by hand is safe."""

    CPU_MANUAL = "cpu_manual"
    """The engine put the tensors on the CPU by hand, and may bring them back by hand."""

    CPU_FSDP2_MANAGED = "cpu_fsdp2_managed"
    """FSDP2's ``CPUOffloadPolicy`` owns the tensors. It copies each shard to the compute device
    for as long as it is needed; nobody else may move one. Buffers are not FSDP2's: in this state
    they live on the compute device."""


class Trigger(_Identified):
    """What may be asked of a component."""

    ONLOAD = "onload"
    """Bring the tensors to the compute device."""

    OFFLOAD = "offload"
    """Put the tensors on the CPU."""

    SAVE = "save"
    """Take the right to stage parameters by hand for a checkpoint."""


class Integrity(_Identified):
    """Whether a component's tensors lie where its placement says, as a whole."""

    WHOLE = "whole"
    TORN = "torn"


class Component(_Identified):
    """What has a placement of its own. One without tensors goes where the parameters go."""

    PARAMS = "params"
    """The module's parameters."""

    GRADS = "grads"
    """Their gradients."""

    BUFFERS = "buffers"
    """The module's buffers, persistent or not."""

    OPTIMIZER = "optimizer"
    """The optimizer's state, and the gradient scaler's."""


MODEL = frozenset({Component.PARAMS, Component.GRADS, Component.BUFFERS})
"""The components that are the module's own."""


@dataclass(frozen=True)
class Legal:
    """A trigger that may be fired: the state it leads to, and what happens on the way."""

    dest: Placement
    meaning: str


@dataclass(frozen=True)
class Illegal:
    """A trigger that is refused: why, and what to do instead."""

    why: str
    instead: str


Row = Legal | Illegal

_MANAGED_WHY = (
    "FSDP2's CPUOffloadPolicy owns these tensors. A move by hand half succeeds: the wrapper "
    "changes its device while FSDP2 puts a CPU shard back under it, and the next state_dict() "
    "or backward fails far from here"
)

TABLE: Mapping[tuple[Placement, Trigger], Row] = {
    (Placement.GPU, Trigger.ONLOAD): Illegal(
        why="the tensors are on the compute device already",
        instead="nothing is needed; manager.onload() and the contexts leave them in peace",
    ),
    (Placement.GPU, Trigger.OFFLOAD): Legal(
        Placement.CPU_MANUAL, "every tensor that may move is copied to the CPU"
    ),
    (Placement.GPU, Trigger.SAVE): Legal(
        Placement.GPU, "parameters may be staged by hand for a checkpoint"
    ),
    (Placement.CPU_MANUAL, Trigger.ONLOAD): Legal(
        Placement.GPU, "every tensor that may move is copied to the compute device"
    ),
    (Placement.CPU_MANUAL, Trigger.OFFLOAD): Illegal(
        why="the tensors are on the CPU already, put there by hand",
        instead="nothing is needed; manager.offload() and the contexts leave them in peace",
    ),
    (Placement.CPU_MANUAL, Trigger.SAVE): Legal(
        Placement.CPU_MANUAL, "parameters may be staged by hand for a checkpoint"
    ),
    (Placement.CPU_FSDP2_MANAGED, Trigger.ONLOAD): Illegal(
        why=_MANAGED_WHY,
        instead="train and evaluate as it is: FSDP2 brings each shard when it is needed. To move "
        "the model by hand, shard it without an offload_policy",
    ),
    (Placement.CPU_FSDP2_MANAGED, Trigger.OFFLOAD): Illegal(
        why="FSDP2's CPUOffloadPolicy keeps these tensors on the CPU already, and the buffers "
        "must stay on the compute device, where the forward pass reads them",
        instead="nothing is needed; to move the model by hand, shard it without an offload_policy",
    ),
    (Placement.CPU_FSDP2_MANAGED, Trigger.SAVE): Illegal(
        why="staging parameters by hand is never safe here. " + _MANAGED_WHY,
        instead="use manager.saving(): it writes the checkpoint from where the shards are, "
        "without a move",
    ),
}
"""Each pair of state and trigger: where it leads, or why it is refused."""

TORN = Illegal(
    why="an earlier move failed and could not be taken back, so this component lies in two places "
    "and no trigger can be trusted",
    instead="call manager.recover(), which puts every tensor where the record says; the trace "
    "names the move that failed",
)
"""The answer of a torn component to every trigger."""


class Operation(_Identified):
    """What an engine does with a placed module. An operation is recorded, it is no transition."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    SAVE = "save"
    LOAD = "load"
    EXPORT = "export"


class Mode(_Identified):
    """How an operation got at the parameters."""

    IN_PLACE = "in_place"
    """They were used where they rest."""

    STAGED = "staged"
    """They were brought to the compute device for the operation, and put back after it."""


COMPUTES_WITH: Mapping[Operation, frozenset[Component]] = {
    Operation.TRAIN: frozenset(Component),
    Operation.EVALUATE: frozenset({Component.PARAMS, Component.BUFFERS}),
    Operation.SAVE: frozenset(),
    Operation.LOAD: frozenset(),
    Operation.EXPORT: frozenset(),
}
"""The components whose tensors an operation computes with, and so needs on the compute device.

Save, load and export only read or write values. Whether they need the parameters on the compute
device is for the owner to say (``Owner.stages``), since it depends on how they are sharded."""

_EVERYTHING = frozenset(Component)

HOLDS: Mapping[Operation, frozenset[Component]] = {
    Operation.TRAIN: _EVERYTHING,
    Operation.EVALUATE: frozenset({Component.PARAMS, Component.BUFFERS}),
    Operation.SAVE: _EVERYTHING,
    Operation.LOAD: _EVERYTHING,
    Operation.EXPORT: frozenset({Component.PARAMS, Component.BUFFERS}),
}
"""The components that nobody may move by hand while an operation is under way."""

UNCHANGED_BY: Mapping[Operation, frozenset[Component]] = {
    Operation.TRAIN: frozenset(),
    Operation.EVALUATE: frozenset({Component.PARAMS}),
    Operation.SAVE: _EVERYTHING,
    Operation.LOAD: frozenset(),
    Operation.EXPORT: _EVERYTHING,
}
"""The components whose values an operation declares to leave as they are. What was brought to the
compute device for it goes back without a copy. A forward pass may change buffers."""

EXCLUDED_BY: Mapping[Operation, frozenset[Operation]] = {
    Operation.TRAIN: frozenset({Operation.SAVE, Operation.LOAD, Operation.EXPORT}),
    Operation.EVALUATE: frozenset({Operation.LOAD}),
    Operation.SAVE: frozenset({Operation.LOAD}),
    Operation.LOAD: frozenset({Operation.SAVE, Operation.EXPORT}),
    Operation.EXPORT: frozenset({Operation.LOAD}),
}
"""The open contexts inside which an operation may not begin: it would change values that they are
still reading, or read values that they are still changing."""


def destination(trigger: Trigger) -> Placement:
    """The placement that ``trigger`` moves tensors to.

    Raises:
        LookupError: it moves none.
    """
    for (source, fired), row in TABLE.items():
        if fired is trigger and isinstance(row, Legal) and row.dest is not source:
            return row.dest
    raise LookupError(f"{trigger.value} moves nothing")


def trigger_between(current: Placement, wanted: Placement) -> Trigger | None:
    """The one trigger that leads from ``current`` to ``wanted``, or None if they are the same.

    Raises:
        LookupError: no single legal trigger leads there.
    """
    if current is wanted:
        return None
    for (source, trigger), row in TABLE.items():
        if source is current and isinstance(row, Legal) and row.dest is wanted:
            return trigger
    raise LookupError(f"no trigger leads from {current.value} to {wanted.value}")
