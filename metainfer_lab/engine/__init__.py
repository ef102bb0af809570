"""Engines: what a folder says of itself, the process it runs in, and how one talks with it."""

from metainfer_lab.engine.manifest import EngineManifest, find_engine, is_recorded
from metainfer_lab.engine.nursery import Nursery
from metainfer_lab.engine.process import (
    Arrival,
    Census,
    EngineDied,
    EngineError,
    EngineProcess,
    StepResult,
    Surroundings,
)
from metainfer_lab.engine.session import Chat, Engine

__all__ = [
    "Arrival",
    "Census",
    "Chat",
    "Engine",
    "EngineDied",
    "EngineError",
    "EngineManifest",
    "EngineProcess",
    "Nursery",
    "StepResult",
    "Surroundings",
    "find_engine",
    "is_recorded",
]
