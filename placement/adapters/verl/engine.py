"""verl's FSDP engines without their ifs about devices.

Each method of :class:`PlacedEngine` stands for one that decides for itself, from a flag, a policy
and the device of the first parameter, what to move there and what to move back. Here it says what
it is about to do, and the manager sees to the rest. How a model is built, trained, written to disk
and named for a rollout stays verl's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import verl
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_name, get_vendor
from verl.utils.fsdp_utils import normalize_peft_param_name, replace_lora_wrapper
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from placement import (
    ContradictoryOptions,
    Operation,
    Placement,
    PlacementManager,
)
from placement.states import COMPUTES_WITH
from placement.tensors import parts
from placement.torch_private import storage_address

_LOG = logging.getLogger("placement")

Weights = Generator[tuple[Any, ...], None, None]
"""Pairs of name and tensor; of shards, verl's ``ShardSpec`` comes third."""


class PlacedEngine(FSDPEngine):
    """An FSDP engine of verl's whose tensors a manager places.

    Attributes:
        placement: the manager; it is there as soon as the model is built.
    """

    mode: str | None
    """verl's own: ``train``, ``eval`` or None."""

    deadline: ClassVar[float] = 600.0
    """Seconds that the ranks wait for each other at a save, load or export."""

    # Where the model rests.

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        self.placement = PlacementManager(
            self.module, self.optimizer, scaler=self.scaler, deadline=self.deadline
        )
        # With these set, verl's own code would move tensors, too.
        self._is_offload_param = self._is_offload_optimizer = False
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        """Put by hand on the CPU what the configuration wants there between operations."""
        if self.is_param_offload_enabled:
            self.to("cpu", optimizer=False)
        if self._moved_by_hand:  # an optimizer without state yet went where the parameters are
            rests_on = "cpu" if self.is_optimizer_offload_enabled else get_device_name()
            self.to(rests_on, model=False, grad=False)

    @property
    def _moved_by_hand(self) -> bool:
        """Whether the model is for hands to move. If FSDP2's policy manages it, the policy wins."""
        return self.placement.owner.managed is None

    @property
    def is_param_offload_enabled(self) -> bool:
        return self._moved_by_hand and self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self._moved_by_hand and self.engine_config.optimizer_offload

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        self.placement.to(device, model=model, optimizer=optimizer, grad=grad)

    # Modes.

    def train_mode(self, **options: Any) -> AbstractContextManager[None]:
        return self._mode(Operation.TRAIN, self.placement.training, super().train_mode, options)

    def eval_mode(self, **options: Any) -> AbstractContextManager[None]:
        return self._mode(Operation.EVALUATE, self.placement.evaluating, super().eval_mode, options)

    @contextmanager
    def _mode(
        self,
        operation: Operation,
        placed: Callable[[], AbstractContextManager[Any]],
        verls_own: Callable[..., AbstractContextManager[Any]],
        options: dict[str, Any],
    ) -> Iterator[None]:
        if options.pop("disable_auto_offload", False):
            self._require_no_move(operation)
        found = self.mode, self.module.training
        try:
            with placed(), verls_own(disable_auto_offload=True, **options):
                yield
        finally:
            self.mode, training = found
            self.module.train(training)

    def _require_no_move(self, operation: Operation) -> None:
        """Refuse to begin what would need a move, where verl was told not to make one."""
        needed = COMPUTES_WITH[operation]
        away = [
            component.value
            for component, placement in self.placement.placements.items()
            if component in needed and placement is Placement.CPU_MANUAL
        ]
        if away:
            raise ContradictoryOptions(
                asked=f"{operation.value} with disable_auto_offload=True",
                state=f"{', '.join(away)} rest in {Placement.CPU_MANUAL.value}",
                why="the operation computes with them on the compute device, and may not move them",
                instead="bring them with engine.to() before, or leave disable_auto_offload out",
            )

    # Checkpoints: verl's own files, written and read wherever the shards are.

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        with self.placement.saving(global_step):
            self.checkpoint_manager.save_checkpoint(
                local_path, hdfs_path, global_step, max_ckpt_to_keep
            )

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        with self.placement.loading():
            self.checkpoint_manager.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    # Weights for a rollout.

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Weights, dict[str, Any] | None]:
        """As verl's own, except that what is yielded is on the compute device and the consumer's to
        keep. ``layered_summon`` has no effect: tensors are gathered one at a time anyway."""
        adapter = self._adapter_for_the_rollout()
        if adapter is None:
            verls_own = super().get_per_tensor_param
            weights = partial(_first, verls_own, layered_summon, base_sync_done, **kwargs)
            return self._exported(weights, computes=self._is_lora), None
        if self._qat_enabled:
            raise ContradictoryOptions(
                asked="exporting an adapter and its base weights apart",
                state="quantization-aware training is on",
                why="verl would quantize the base weights; this adapter does not know how",
                instead="merge the adapter (lora.merge=True), or train without one of the two",
            )
        base = partial(self._base_weights, adapter)
        return self._exported(self._adapter_weights if base_sync_done else base), adapter.to_dict()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Weights, None]:
        return self._exported(partial(_first, super().get_per_tensor_param_shard, **kwargs)), None

    def _exported(self, collect: Callable[[], Weights], *, computes: bool = False) -> Weights:
        """What ``collect`` yields, in a context for export from the first item to the last.

        Args:
            collect: is called in the context.
            computes: whether it computes with the weights (an adapter is merged into them), so that
                they have to be on the compute device.
        """
        # verl merges an adapter into the live weights, and takes it out again.
        placed = self.placement.evaluating(unchanged=False) if computes else nullcontext()
        with self.placement.exporting(), placed, closing(collect()) as weights:
            live = self._live_storages()
            for name, weight, *specification in weights:
                if storage_address(weight) in live:  # on one rank nothing has to be gathered
                    weight = weight.clone()
                yield (name, weight, *specification)

    def _live_storages(self) -> set[int]:
        return {
            storage_address(part)
            for site in self.placement.census().sites
            for part in parts(site.holding.tensor)
        }

    @property
    def _unwrapped(self) -> Any:
        return getattr(self.module, "_fsdp_wrapped_module", self.module)

    def _adapter_for_the_rollout(self) -> Any:
        """peft's configuration of an adapter that the rollout adds to the base weights itself; None
        without an adapter, and where it is merged into them here."""
        if self.model_config.lora.get("merge", False):
            return None
        return getattr(self._unwrapped, "peft_config", {}).get("default")

    # Base and adapter apart are collected here: verl brings the base to the CPU for it.

    def _adapter_weights(self) -> Weights:
        """The adapter alone, named as peft saves it."""
        adapter = get_peft_model_state_dict(self._unwrapped, state_dict=self.module.state_dict())
        if not adapter:
            raise ContradictoryOptions(
                asked="exporting the adapter alone",
                state=f"peft finds no weights of it in the model (strategy "
                f"{self.engine_config.strategy})",
                why="the release of peft looks for the modules of the adapter by name, and FSDP1 "
                "wraps and renames them; the rollout would get nothing, and not notice",
                instead="use strategy=fsdp2, or merge the adapter (lora.merge=True)",
            )
        return self._gathered(adapter)

    def _base_weights(self, adapter: Any) -> Weights:
        """The base weights, named for a rollout that wraps them for an adapter."""
        named = normalize_peft_param_name(self.module.state_dict())
        named = {replace_lora_wrapper(name, adapter): value for name, value in named.items()}
        named = convert_weight_keys(named, self._unwrapped)
        model_type = self.model_config.hf_config.model_type
        weights: Weights = unfuse_moe_params(self._gathered(named), model_type)
        return weights

    def _gathered(self, sharded: Mapping[str, torch.Tensor]) -> Weights:
        for name, value in sharded.items():
            there = value.detach().to(self.placement.device)
            yield name, there.full_tensor() if isinstance(there, DTensor) else there


def _first(method: Callable[..., tuple[Weights, Any]], *args: Any, **kwargs: Any) -> Weights:
    return method(*args, **kwargs)[0]


class PlacedEngineWithLMHead(PlacedEngine, FSDPEngineWithLMHead):
    """verl's engine of language models, placed by a manager."""


class PlacedEngineWithValueHead(PlacedEngine, FSDPEngineWithValueHead):
    """verl's engine of value models, placed by a manager."""


ENGINES: Mapping[str, type[PlacedEngine]] = {
    "language_model": PlacedEngineWithLMHead,
    "value_model": PlacedEngineWithValueHead,
}
BACKENDS = ("fsdp", "fsdp2")


def register_engines() -> None:
    """Make verl's registry give out these engines on the accelerator of this process.

    The key without a vendor is verl's own and can't be taken; the one with the vendor is free, and
    is looked up first (``EngineRegistry.get_engine_cls``).

    Raises:
        ContradictoryOptions: it is not free: another plug-in took it.
    """
    device = os.environ.get("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or get_vendor()
    for model_type, engine in ENGINES.items():
        register = EngineRegistry.register(model_type, list(BACKENDS), device, vendor)
        try:
            register(engine)
        except AssertionError as taken:
            raise ContradictoryOptions(
                asked=f"registering the engine of {model_type}s",
                state=f"verl's registry has one for {device} ({vendor})",
                why="another plug-in put its own there, and only one of the two can be given out",
                instead="name the plug-ins to load in VERL_USE_EXTERNAL_PLUGINS",
            ) from taken
    _LOG.warning(  # verl shows nothing below
        "torch-placement attached to verl %s: it places the %s engines on %s (%s)",
        verl.__version__,
        " and ".join(BACKENDS),
        device,
        vendor,
    )
