"""Every private torch name that placement uses, in one place.

Each function says which names it touches and the torch versions they were seen in. When a torch
release renames one, this is the file that changes. Nothing outside it (and ``placement/sim``, which
is a torch backend) spells a name of torch's that begins with an underscore.

All names below were seen in torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo import guards
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "REGISTRIES",
    "WRAPPED",
    "Communicator",
    "FlatHandle",
    "FlatPiece",
    "Likeness",
    "ModuleTree",
    "ShardGroup",
    "ShardedParameter",
    "Span",
    "address_of",
    "addresses_of",
    "allocated_and_reserved_bytes",
    "begin_to_copy",
    "communicators",
    "convert_tensors",
    "default_store",
    "drop_reducer",
    "faults_of_plan",
    "flat_handles",
    "holders_at",
    "initialised_roots",
    "inner_tensors",
    "is_dtensor",
    "local_tensor",
    "local_tensors",
    "make_reducer",
    "module_apply",
    "negated_view",
    "offset_in_whole",
    "persistent_buffers",
    "plain_attributes",
    "rewrap",
    "roll_of",
    "scaler_tensors",
    "set_module_apply",
    "shard_groups",
    "shed_hidden_bases",
    "storage_address",
    "storage_holders",
    "takes_step_hooks",
    "version_of",
    "view_base",
    "view_bases",
]


REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which an ``nn.Module`` keeps what is registered."""

WRAPPED = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""What wrappers call the module in them: activation checkpointing
(``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py``), FSDP1
(``torch/distributed/fsdp/_common_utils.py``) and ``torch.compile``
(``torch/_dynamo/eval_frame.py``). Their own state dicts leave out the first two."""


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper subclass (a DTensor, a quantized weight) is made of, by attribute.

    Empty for a tensor that holds its own bytes. Uses the flatten protocol of wrapper subclasses
    (``torch/utils/_python_dispatch.py``), which for a DTensor names ``_local_tensor``.
    """
    wrapper: Any = tensor
    if type(wrapper) is torch.Tensor:
        return {}
    if isinstance(wrapper, DTensor):  # the usual wrapper; asking the protocol costs ten times this
        return {"_local_tensor": wrapper._local_tensor}
    if not is_traceable_wrapper_subclass(wrapper):
        return {}
    names, _ = wrapper.__tensor_flatten__()
    values = {name: getattr(wrapper, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is exactly a DTensor, whose wrapper is a layout and a placement only."""
    return type(tensor) is DTensor or (
        isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter)
    )


def local_tensor(dtensor: Any) -> torch.Tensor:
    """What a DTensor wraps, as it is: ``to_local()`` would make another tensor."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def rewrap(wrapper: Any, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A second wrapper like ``wrapper``, around other inner tensors.

    The flatten protocol lists what the wrapper was made from, tensors and others (a DTensor of
    torch 2.13 lists its mesh too); whatever ``inner`` does not replace is passed on as it is.
    """
    if type(wrapper) is DTensor:
        # The spec may be shared: nobody changes one.
        local = inner["_local_tensor"]
        return DTensor(local, wrapper._spec, requires_grad=wrapper.requires_grad)
    names, context = wrapper.__tensor_flatten__()
    made_from = {name: inner.get(name, getattr(wrapper, name)) for name in names}
    rewrapped: torch.Tensor = type(wrapper).__tensor_unflatten__(
        made_from, context, wrapper.size(), wrapper.stride()
    )
    return rewrapped


def offset_in_whole(sharded: DTensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the whole tensor, one number a dimension
    (``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``, which checkpoints
    use)."""
    _, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    return tuple(offset)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers registered at ``module`` itself that its state dict has
    (``nn.Module._non_persistent_buffers_set`` names the others)."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def module_apply() -> Callable[..., Any]:
    """``nn.Module._apply``, through which every ``to()``, ``cuda()`` and ``to_empty()`` goes."""
    return nn.Module._apply


def convert_tensors(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every tensor of ``module`` by what ``convert`` makes of it, as ``to()`` does: through
    ``_apply``, which FSDP2 overrides to follow its shards."""
    module._apply(convert)


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to, as autograd counts."""
    return tensor._version


def set_module_apply(apply: Callable[..., Any]) -> None:
    """Put ``apply`` in the place of ``nn.Module._apply``."""
    nn.Module._apply = apply  # type: ignore[method-assign]


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is an autograd view of, or None.

    Autograd keeps it alive, and its storage with it, even where nobody else holds it: FSDP2's
    shards are such views (``narrow`` of the padded shard, ``FSDPParam._init_sharded_param``).
    """
    return tensor._base


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy view of ``tensor`` that reads each value with the other sign, as ``x.conj().imag``
    does: ``torch._neg_view``, the counterpart of ``Tensor.conj()``, which is public."""
    view: torch.Tensor = torch._neg_view(tensor)
    return view


def storage_address(tensor: torch.Tensor) -> int:
    """The address of the C++ storage that ``tensor`` looks into: two tensors share it exactly if
    they share their bytes. It may be reused once the storage is gone."""
    return address_of(tensor.untyped_storage())


def address_of(storage: torch.UntypedStorage) -> int:
    """The address of the C++ storage; see :func:`storage_address`."""
    address: int = storage._cdata
    return address


def addresses_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """:func:`address_of` for each."""
    return [storage._cdata for storage in storages]


def holders_at(addresses: Sequence[int]) -> list[int]:
    """:func:`storage_holders` for each, by the addresses of storages that the caller has."""
    count = torch._C._storage_Use_Count
    return [count(address) - 1 for address in addresses]


def local_tensors(dtensors: Sequence[Any]) -> list[torch.Tensor]:
    """:func:`local_tensor` for each."""
    return [dtensor._local_tensor for dtensor in dtensors]


def shed_hidden_bases(groups: Sequence[ShardGroup]) -> None:
    """Make FSDP2's padded shards views of nothing.

    ``FSDPParam._init_sharded_param`` leaves each a view of a tensor that only autograd holds, with
    the same bytes: one more tensor a parameter that would have to be looked at and moved each time.
    The shard stays the same object and looks into the same bytes
    (:func:`torch.utils.swap_tensors`).
    """
    with torch.no_grad():
        for group in groups:
            for state in group.state.fsdp_params:
                padded = state._sharded_param_data
                base = padded._base
                if base is None or base is local_tensor(state.sharded_param):
                    continue
                if type(padded) is not torch.Tensor:
                    continue  # a wrapper, whose bytes are elsewhere
                plain = torch.empty(0, dtype=padded.dtype, device=padded.device)
                plain.set_(
                    padded.untyped_storage(),
                    padded.storage_offset(),
                    padded.size(),
                    padded.stride(),
                )
                with contextlib.suppress(RuntimeError):  # held by somebody else, too: let it be
                    torch.utils.swap_tensors(padded, plain)


def view_bases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """:func:`view_base` for each."""
    return [tensor._base for tensor in tensors]


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors look into ``storage``, those that only C++ holds (autograd) included."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # ``storage`` itself, of which there is one Python object


def begin_to_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into the target beside it, without waiting for it
    (``torch._foreach_copy_``: one call, where a loop would go through the dispatcher for each)."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter as FSDP2 holds it, whatever is registered to the module at the moment."""

    state: Any

    @property
    def registered_at(self) -> Iterator[tuple[nn.Module, str]]:
        """Each place where the parameter is registered: a module and the name in it."""
        info = self.state._module_info
        yield info.module, info.param_name
        yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, a DTensor: what an optimizer must hold."""
        parameter: nn.Parameter = self.state.sharded_param
        return parameter

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that the parameter is sharded over, in all its dimensions."""
        mesh: DeviceMesh = self.state.sharded_param.device_mesh
        return mesh

    @property
    def padded_shard(self) -> torch.Tensor:
        """The 1-D tensor that the all-gather reads. It is the true storage of the shard: the
        parameter's local tensor is a view of it without the padding of an uneven shard."""
        padded: torch.Tensor = self.state._sharded_param_data
        return padded

    @property
    def unreduced_gradients(self) -> list[torch.Tensor]:
        """Gradients of the full parameter that wait for a reduction (gradient accumulation with
        ``set_requires_gradient_sync(False)``)."""
        waiting = [self.state.unsharded_accumulated_grad]
        if hasattr(self.state, "_unsharded_param"):  # exists after the first all-gather
            waiting.append(self.state._unsharded_param.grad)
        return [gradient for gradient in waiting if gradient is not None]

    def drop_unreduced_gradients(self) -> None:
        """Forget :attr:`unreduced_gradients`."""
        self.state.unsharded_accumulated_grad = None
        if hasattr(self.state, "_unsharded_param"):
            self.state._unsharded_param.grad = None

    @property
    def offloads_to_cpu(self) -> bool:
        """Whether FSDP2 itself treats this parameter as offloaded."""
        offloads: bool = self.state.offload_to_cpu
        return offloads


@dataclass(frozen=True)
class ShardGroup:
    """The parameters that FSDP2 gathers together, and the policy it applies to them."""

    state: Any
    modules: tuple[nn.Module, ...]

    @property
    def parameters(self) -> list[ShardedParameter]:
        return [ShardedParameter(state) for state in self.state.fsdp_params]

    @property
    def offload_policy(self) -> object:
        policy: object = self.state.offload_policy
        return policy

    @property
    def device(self) -> torch.device:
        """The device that this group computes on, with its index."""
        device: torch.device = self.state.device
        return device

    @property
    def unreduced_output(self) -> torch.Tensor | None:
        """HSDP's gradients that were reduce-scattered but not all-reduced yet."""
        output: torch.Tensor | None = self.state._partial_reduce_output
        return output

    @property
    def busy(self) -> str | None:
        """The phase FSDP2 is in the middle of (``FORWARD``, ``PRE_BACKWARD``, ...), or None."""
        phase = self.state._training_state
        return None if phase.name == "IDLE" else str(phase.name)


def shard_groups(module: nn.Module) -> list[ShardGroup]:
    """All groups with parameters below (and at) ``module``, each once, in module order."""
    groups: dict[int, ShardGroup] = {}
    for submodule in module.modules():
        if not isinstance(submodule, FSDPModule):
            continue
        for group in _groups_of(submodule):
            groups.setdefault(id(group), ShardGroup(group, tuple(group.modules)))
    return list(groups.values())


class ModuleTree:
    """The modules at and below one. They are walked once; whether the tree is still the same is
    told faster, from ``nn.Module._modules`` of each.

    A module that is taken out is not kept alive.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._found: list[weakref.ref[nn.Module]] = []
        self._children: list[int] = []

    def modules(self) -> list[nn.Module]:
        """Each once, in a fixed order."""
        found = [module for ref in self._found if (module := ref()) is not None]
        if not found or len(found) < len(self._found) or _children_of(found) != self._children:
            found = self._walk()
            self._found = list(map(weakref.ref, found))
            self._children = _children_of(found)
        return found

    def _walk(self) -> list[nn.Module]:
        found: dict[int, nn.Module] = {}
        waiting: list[nn.Module | None] = [self._root]
        while waiting:
            module = waiting.pop()
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting += module._modules.values()
        return list(found.values())


def _children_of(modules: Sequence[nn.Module]) -> list[int]:
    return [
        id(child) for module in modules if module._modules for child in module._modules.values()
    ]


def roll_of(tree: ModuleTree) -> list[object]:
    """Everything from which is read what a module holds: the classes of the modules, which
    ``fully_shard`` changes; what is registered to them; gradients; FSDP2's groups with what each
    keeps of its parameters. It goes by ``_parameters`` and ``_buffers``, since ``named_modules()``
    alone takes longer than moving a small parameter, and leaves out what would say the same twice,
    since each object takes a share of that time, too."""
    modules = tree.modules()
    parameters = [one for module in modules for one in module._parameters.values()]
    roll: list[object] = [*dict.fromkeys(map(type, modules)), *parameters]
    roll += [one for module in modules if module._buffers for one in module._buffers.values()]
    with plain_attributes():
        roll += _if_any([None if parameter is None else parameter.grad for parameter in parameters])
    registered = set(map(id, parameters))
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in _groups_of(module):
                roll += (group, group.offload_policy, group._partial_reduce_output)
                roll += _shards_on_roll(group.fsdp_params, registered)
    return roll


def _shards_on_roll(states: Sequence[Any], registered: set[int]) -> list[object]:
    of_each = list(map(vars, states))  # looking up four attributes takes twice as long
    sharded = [of_one["sharded_param"] for of_one in of_each]
    roll = [of_one["_sharded_param_data"] for of_one in of_each]
    if not registered.issuperset(map(id, sharded)):  # while they are gathered
        roll += sharded
        roll += [one.grad for one in sharded]
    roll += _if_any([of_one["unsharded_accumulated_grad"] for of_one in of_each])
    gathered = [of_one.get("_unsharded_param") for of_one in of_each]
    return roll + _if_any([None if whole is None else whole.grad for whole in gathered])


def _if_any(those: Sequence[object]) -> list[object]:
    return [] if set(map(type, those)) <= {NoneType} else list(those)


class Likeness:
    """What tensors look like: class, dtype, device, sizes and strides of each, and what the
    dispatcher knows of it (whether it is conjugated or negated lazily). Whether others look the
    same takes one call: ``torch._C._dynamo.guards.TensorGuards``, which ``torch.compile`` asks
    before each call of a compiled function."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():  # it goes by the mode, too
            sizes: list[Any] = [list(tensor.size()) for tensor in tensors]
            strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
            self._guards = guards.TensorGuards(
                *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            )

    def is_that_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors``, each different from the others, look like this. Where it can't be
        told, as under autocast or in inference mode, it is not."""
        with torch.no_grad():
            same: bool = self._guards.check(*tensors)
        return same


def _groups_of(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of one module that have parameters."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    return [group for group in groups if group is not None and group.fsdp_params]


def initialised_roots(module: nn.Module) -> list[FSDPModule]:
    """The FSDP2 modules at (and below) ``module`` that a forward pass made roots: those on which
    FSDP2 lets an iteration be reset."""
    return [
        submodule
        for submodule in module.modules()
        if isinstance(submodule, FSDPModule) and submodule._get_fsdp_state()._is_root
    ]


@contextlib.contextmanager
def plain_attributes() -> Iterator[None]:
    """Attributes of tensors without asking their class for ``__torch_function__`` first, which
    takes as long as getting one (``torch._C.DisableTorchFunctionSubclass``). For classes that have
    none, as DTensor."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


class Span:
    """A context that the profiler shows, as ``torch.profiler.record_function``, which takes three
    times as long since it goes through the dispatcher. There is usually nobody who profiles
    (``torch.autograd._record_function_with_args_enter``, ``_record_function_with_args_exit``)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._handle = torch.autograd._record_function_with_args_enter(self._name)

    def __exit__(self, *raised: object) -> None:
        torch.autograd._record_function_with_args_exit(self._handle)


def drop_reducer(wrapper: DistributedDataParallel) -> None:
    """Let go of DDP's reducer, with its hooks and its buckets on the device."""
    wrapper.__dict__.pop("reducer", None)
    wrapper.__dict__.pop("logger", None)


def make_reducer(wrapper: Any) -> None:
    """Give DDP a reducer with hooks on the present accumulators, as unpickling one does
    (``DistributedDataParallel.__setstate__``), in its own process group."""
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False  # a new reducer, a first pass
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)


def takes_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` has hooks before its step. A wrapper that derives from ``Optimizer``
    and never calls its constructor (accelerate's) has none."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def allocated_and_reserved_bytes(device: torch.device) -> tuple[int, int]:
    """``torch.accelerator.memory_allocated`` and ``memory_reserved``, without making a flat
    dictionary of all statistics (``torch/accelerator/memory.py``) for each, which takes as long as
    moving a hundred small tensors."""
    if (statistics := getattr(torch._C, "_accelerator_getDeviceStats", None)) is None:
        memory = torch.accelerator
        return memory.memory_allocated(device), memory.memory_reserved(device)
    of_device = statistics(device.index or 0)
    allocated: int = of_device["allocated_bytes"]["all"]["current"]
    reserved: int = of_device["reserved_bytes"]["all"]["current"]
    return allocated, reserved


def scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, torch.Tensor]:
    """The tensors of a gradient scaler, by name; none before its first use."""
    values = {"scale": scaler._scale, "growth_tracker": scaler._growth_tracker}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """One parameter in FSDP1's flat parameter, of which each rank holds a run of elements.

    Attributes:
        local: 1-D, the elements that this rank holds; there may be none.
        shape: of the parameter.
        stride: of the parameter, in elements.
        runs: for each rank of ``group``, from which element to before which it holds. A single
            run is the whole, which every rank holds.
        group: the ranks that share the flat parameter.
    """

    local: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    group: dist.ProcessGroup

    @property
    def mine(self) -> tuple[int, int]:
        """The run that this rank holds."""
        return self.runs[0] if len(self.runs) == 1 else self.runs[self.group.rank()]


@dataclass(frozen=True)
class FlatHandle:
    """FSDP1's flat parameter and what looks into its bytes."""

    state: Any
    module_name: str

    @property
    def parameter(self) -> torch.Tensor:
        """The flat parameter. With ``use_orig_params`` it is not registered to the module."""
        flat: torch.Tensor = self.state.flat_param
        return flat

    @property
    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What must follow the flat parameter: FSDP1's own reference to its shard, and with
        ``use_orig_params`` each original parameter, registered at the moment or not."""
        if hasattr(self.parameter, "_local_shard"):  # set by the lazy initialisation
            yield " (local shard)", self.parameter._local_shard
        flat: Any = self.parameter
        for group in (flat._params or (), flat._shared_params or ()):
            for index, original in enumerate(group):
                yield f" (view {index})", original
        for name, view in self._views_of_the_last_pass:
            # Where nothing is sharded they are not freed after a pass, and keep its bytes alive.
            if storage_address(view) == storage_address(flat):
                yield f" (last view {name})", view

    @property
    def _views_of_the_last_pass(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a pass computed with: kept for its backward pass with ``use_orig_params``, else
        registered as plain attributes."""
        flat: Any = self.parameter
        kept = flat._tensors or [getattr(m, name) for name, m, _ in flat._param_infos]
        for (name, _, _), view in zip(flat._param_infos, kept):
            if view is not None:
                yield name, view

    @property
    def pieces(self) -> Iterator[tuple[nn.Module, str, FlatPiece]]:
        """Each parameter that was flattened: the module and name it is registered under, one that
        is shared under each of its names, and its piece. The handle must be resharded."""
        flat: Any = self.parameter
        held = flat.detach().view(-1)
        shards = self.state.process_group.size() if self.state.uses_sharded_strategy else 1
        rank = self.state.process_group.rank() if shards > 1 else 0
        bounds = zip(self.state._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        whole = [(first, last + 1) for (first, last), is_padding in bounds if not is_padding]
        found: dict[tuple[nn.Module, str], FlatPiece] = {}
        for info, shape, stride, (first, end) in zip(
            flat._param_infos, flat._shapes, flat._strides, whole, strict=True
        ):
            # Every rank holds as many elements of the flat parameter, one rank after the other.
            edges = [min(max(n * held.numel(), first), end) for n in range(shards + 1)]
            mine = slice(edges[rank] - rank * held.numel(), edges[rank + 1] - rank * held.numel())
            found[info.module, info.param_name] = FlatPiece(
                held[mine],
                shape,
                stride,
                tuple((begin - first, until - first) for begin, until in pairwise(edges)),
                self.state.process_group,
            )
        for shared in flat._shared_param_infos:
            primary = found[shared.prim_module, shared.prim_param_name]
            found[shared.module, shared.param_name] = primary
        yield from ((module, name, piece) for (module, name), piece in found.items())

    @property
    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The flat parameter's gradient, and the one that waits during accumulation."""
        if self.parameter.grad is not None:
            yield " (flat)", self.parameter.grad
        waiting = getattr(self.parameter, "_saved_grad_shard", None)
        if waiting is not None:
            yield " (accumulated)", waiting

    @property
    def offloads_to_cpu(self) -> bool:
        """Whether FSDP1's ``CPUOffload`` moves this handle."""
        offloads: bool = self.state._offload_params
        return offloads

    @property
    def device(self) -> torch.device:
        """The device that this handle computes on, with its index."""
        device: torch.device = self.state.device
        return device

    @property
    def busy(self) -> str | None:
        """The phase FSDP1 is in the middle of (``FORWARD``, ``BACKWARD_PRE``, ...), or None."""
        phase = self.state._training_state
        return None if phase.name == "IDLE" else str(phase.name)

    def forget_accumulator(self) -> None:
        """Let FSDP1 hook into autograd anew in the next pass. It does so once a backward pass, and
        goes by ``_post_backward_hook_state`` whether it has (``_register_post_backward_hook``)."""
        if hasattr(self.parameter, "_post_backward_hook_state"):
            self.parameter._post_backward_hook_state[-1].remove()
            del self.parameter._post_backward_hook_state

    def reshard(self) -> None:
        """Free the gathered parameter, if it is there, in use or kept for a backward pass."""
        if not self.state.uses_sharded_strategy:
            return
        kept = hasattr(self.parameter, "_full_param_padded") and not self.state.needs_unshard()
        if kept or not self.state.is_sharded(self.parameter):
            self.state.reshard(True)
            self.state.post_reshard()


def flat_handles(module: nn.Module) -> list[FlatHandle]:
    """FSDP1's handles below (and at) ``module``, in module order."""
    return [
        FlatHandle(submodule._handle, name)
        for name, submodule in module.named_modules()
        if isinstance(submodule, FullyShardedDataParallel) and submodule._handle is not None
    ]


def default_store() -> dist.Store:
    """The key-value store of the default process group, below a prefix of the group's own
    (``distributed_c10d._get_default_store``). A group that is destroyed and made again over the
    same store has the same prefix."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def faults_of_plan(metadata: Metadata) -> list[str]:
    """What is wrong with the chunks of a checkpoint's tensors: one that is out of bounds, two that
    overlap, a tensor that they do not fill (``default_planner._validate_global_plan``, which looks
    whether they fill it if there is more than one plan)."""
    faults: list[str] = default_planner._validate_global_plan([SavePlan([])] * 2, metadata)
    return faults


@dataclass(frozen=True)
class Communicator:
    """What does a process group's collectives on one type of device (gloo, NCCL, ...).

    Attributes:
        backend: the ``Backend``.
        timeout: how long a collective that begins now may take.
    """

    backend: Any
    timeout: timedelta

    def set_timeout(self, timeout: timedelta) -> bool:
        """Change it; return whether the backend knows timeouts.

        ``Backend.set_timeout`` is public. torch's own ``_set_pg_timeout`` leaves out all backends
        but gloo and NCCL.
        """
        try:
            self.backend.set_timeout(timeout)
        except RuntimeError:  # Backend::setTimeout is not overridden
            return False
        return True


def communicators() -> list[Communicator]:
    """Those of every process group that this process is in: ``distributed_c10d._world.pg_map``,
    ``ProcessGroup._device_types`` and ``ProcessGroup._get_backend``.

    A timeout can be read from torch's own backends only (``Backend.Options._timeout``). For another
    one it is that of the group's other backends, which were made with the same, or torch's default.
    """
    found: list[Communicator] = []
    for group in list(distributed_c10d._world.pg_map):
        backends = [group._get_backend(device) for device in group._device_types]
        timeouts = [_timeout_of(backend) for backend in backends]
        usual = next((t for t in timeouts if t is not None), dist.constants.default_pg_timeout)
        found += [Communicator(b, t or usual) for b, t in zip(backends, timeouts, strict=True)]
    return found


def _timeout_of(backend: Any) -> timedelta | None:
    """None if the backend does not tell its options: before torch 2.14 it has no such attribute
    then, from there on it raises."""
    try:
        timeout: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout
