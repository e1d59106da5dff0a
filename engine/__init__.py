"""A small training engine that leaves every question of placement to ``placement``."""

from engine.fsdp_engine import FSDPEngine, Offload, StepResult

__all__ = ["FSDPEngine", "Offload", "StepResult"]
