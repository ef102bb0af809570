"""What a model is, from its config.json alone: dimensions, tensors, bytes.

config.py   ModelDims: dimensions of the three families (Llama, Qwen3, Qwen3.5/3.6 MoE hybrid)
quantisation.py  ModelOpt's map of quantised modules
tensors.py  inventory: every parameter tensor with its role and layer
layout.py   formats and names on disk: plain, or NVIDIA's mixed NVFP4 and FP8
"""

from metainfer_lab.model.config import GdnDims, ModelDims, MoeDims, VisionDims
from metainfer_lab.model.layout import Stored, disk_tensors, storage
from metainfer_lab.model.tensors import Tensor, inventory

__all__ = [
    "GdnDims",
    "ModelDims",
    "MoeDims",
    "Stored",
    "Tensor",
    "VisionDims",
    "disk_tensors",
    "inventory",
    "storage",
]
