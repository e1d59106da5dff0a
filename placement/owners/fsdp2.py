"""A module sharded by FSDP2 (``fully_shard``), with or without ``CPUOffloadPolicy``.

Who owns the placement is read from FSDP2's own groups. With ``CPUOffloadPolicy`` on all of them
FSDP2 does: it copies each shard to the compute device before its all-gather, and reduces gradients
back to the host, where the optimizer steps (``torch/distributed/fsdp/_fully_shard/_fsdp_api.py``).
With the plain ``OffloadPolicy``, which means "none", shards are moved by hand.

Neither a flag nor "the device is cpu" is asked. A flag may be missing on a subclass or name a
policy that was never applied (https://github.com/verl-project/verl/pull/6604), and a shard on the
CPU may have been put there by hand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from placement.errors import ContradictoryOptions, OwnershipUnclear
from placement.names import canonical_names
from placement.owners.base import Owner, module_holdings, refuse_while_busy
from placement.states import Placement
from placement.tensors import Holding, Kind
from placement.torch_private import (
    ModuleTree,
    ShardGroup,
    initialised_roots,
    roll_of,
    shard_groups,
    shed_hidden_bases,
)

_CPU = torch.device("cpu")
_UNREDUCED = " (unreduced)"
_PART_REDUCED = " (its group, part reduced)"


class FSDP2Module(Owner):
    """A module with at least one ``fully_shard`` group in it."""

    def __init__(self, module: nn.Module, groups: list[ShardGroup], managed: bool) -> None:
        super().__init__(module)
        self.name = "FSDP2 with CPUOffloadPolicy" if managed else "FSDP2"
        self._tree = ModuleTree(module)
        self._groups = groups
        self._managed = managed
        grouped = {id(p.parameter) for group in groups for p in group.parameters}
        self._ungrouped = {n for n, p in self.parameters().items() if id(p) not in grouped}

    @classmethod
    def recognise(cls, module: nn.Module) -> FSDP2Module | None:
        groups = shard_groups(module)
        if not groups:
            return None
        canonical = canonical_names(module)
        names = {id(submodule): canonical(name) for name, submodule in module.named_modules()}
        by_policy = [(_name(group, names), _offloads(group, names)) for group in groups]
        if len({offloads for _, offloads in by_policy}) > 1:
            raise OwnershipUnclear(
                asked="adopting the module",
                state="FSDP2's CPUOffloadPolicy is on some of its groups only",
                why="a module is placed as a whole: some of its shards are FSDP2's to move, others "
                "are not",
                tensors=[
                    f"{name}: {'CPUOffloadPolicy' if offloads else 'no offload'}"
                    for name, offloads in by_policy
                ],
                instead="pass the same offload_policy to every fully_shard call",
            )
        return cls(module, groups, managed=by_policy[0][1])

    @property
    def managed(self) -> Placement | None:
        return Placement.CPU_FSDP2_MANAGED if self._managed else None

    @property
    def compute_device(self) -> torch.device | None:
        return self._groups[0].device

    def parameters(self) -> Mapping[str, nn.Parameter]:
        # Between an all-gather and the next reshard the *unsharded* parameter is registered to
        # the module. What rests, and what an optimizer holds, is always the sharded one.
        sharded = {
            (id(module), name): parameter.parameter
            for group in self._groups
            for parameter in group.parameters
            for module, name in parameter.registered_at
        }
        canonical = canonical_names(self.module)
        found: dict[str, nn.Parameter] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, registered in module.named_parameters(recurse=False, remove_duplicate=False):
                qualified = f"{prefix}.{name}" if prefix else name
                found[canonical(qualified)] = sharded.get((id(module), name), registered)
        return found

    def holdings(self) -> Iterator[Holding]:
        parameters = self.parameters()
        yield from module_holdings(self.module, parameters)
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group in self._groups:
            for sharded in group.parameters:
                name = names[id(sharded.parameter)]
                yield Holding(name, Kind.PARAM, sharded.padded_shard, " (padded shard)")
                for gradient in sharded.unreduced_gradients:
                    yield Holding(name, Kind.GRAD, gradient, _UNREDUCED)
            if group.unreduced_output is not None:
                name = names[id(group.parameters[0].parameter)]
                yield Holding(name, Kind.GRAD, group.unreduced_output, _PART_REDUCED)

    def roll(self) -> list[object]:
        return roll_of(self._tree)

    def belongs_on(self, holding: Holding, compute_device: torch.device) -> torch.device:
        whole = holding.detail in (_UNREDUCED, _PART_REDUCED)
        if whole or holding.kind is Kind.BUFFER or holding.of in self._ungrouped:
            # FSDP2 offloads what it shards. Buffers and ignored parameters it leaves alone, and
            # the forward pass reads them where it computes; gradients that are still to be
            # reduced wait there, too.
            return compute_device
        # A torch to come may let shards rest on the compute device between backward and forward
        # (https://github.com/pytorch/pytorch/pull/192441); the flag defaults to today's way.
        policy = self._groups[0].offload_policy
        return _CPU if getattr(policy, "offload_after_backward", True) else compute_device

    def require_collectives(self) -> None:
        if not self._managed:
            return
        meshes = {p.mesh for group in self._groups for p in group.parameters}
        groups = {group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1}
        without = [group for group in groups if not _serves_cpu(group)]
        if without:
            raise ContradictoryOptions(
                asked="adopting the module",
                state="FSDP2's CPUOffloadPolicy keeps gradients on the CPU, and process group "
                f"{without[0].group_name} has no backend for the CPU: "
                f"{dist.get_backend_config(without[0])}",
                why="norms of gradients are reduced where the gradients are, so clip_grad_norm_ "
                "would fail after the first backward pass "
                "(https://github.com/pytorch/pytorch/issues/148532)",
                instead="give the group a backend for each device, as in "
                "init_process_group('cpu:gloo,cuda:nccl')",
            )

    def fingerprint(self) -> Hashable:
        return tuple(
            (id(group.state), type(group.offload_policy), len(group.parameters))
            for group in self._groups
        )

    def abandon(self) -> None:
        if any(group.busy is not None for group in self._groups):
            for root in initialised_roots(self.module):
                root.reset_iter_state()
            for group in self._groups:
                for parameter in group.parameters:
                    # The reset leaves them, and the next backward pass would add to them.
                    parameter.drop_unreduced_gradients()

    def evaluated(self) -> None:
        # FSDP2 leaves the root's parameters gathered after a forward pass, for the backward pass
        # that is to come (reshard_after_forward in _fully_shard.py). None comes, and after the next
        # optimizer step every pass would compute with what was gathered before it.
        if all(group.busy is None for group in self._groups):
            self._reshard()

    def adopted(self) -> None:
        if not self._managed:
            shed_hidden_bases(self._groups)

    def settle(self) -> None:
        refuse_while_busy(self.name, (group.busy for group in self._groups))
        self._reshard()

    def _reshard(self) -> None:
        for group in self._groups:
            for module in group.modules:
                if isinstance(module, FSDPModule):
                    module.reshard()


def _serves_cpu(group: dist.ProcessGroup) -> bool:
    backends = dist.get_backend_config(group).split(",")
    return any(backend.split(":")[0] == "cpu" for backend in backends)


def _name(group: ShardGroup, names: Mapping[int, str]) -> str:
    return ", ".join(names.get(id(module), "?") or "(root)" for module in group.modules)


def _offloads(group: ShardGroup, names: Mapping[int, str]) -> bool:
    """Whether FSDP2 offloads this group, from the class of its policy.

    An unknown class is refused rather than read as "none": guessing wrong moves tensors that
    somebody else owns. None itself is no policy, and what verl passes where none is wanted.
    """
    policy = group.offload_policy
    offloads = isinstance(policy, CPUOffloadPolicy)
    known = offloads or policy is None or type(policy) is OffloadPolicy
    if not known or any(p.offloads_to_cpu is not offloads for p in group.parameters):
        raise OwnershipUnclear(
            asked="adopting the module",
            state=f"group {_name(group, names)} has the offload policy {policy!r}",
            why="only CPUOffloadPolicy and OffloadPolicy (none) are understood, on a whole group",
            instead="pass one of the two to fully_shard",
        )
    return offloads
