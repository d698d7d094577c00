"""Low-rank products of many adapters in one call: `y += (x A^T) B` by each row's adapter.

`Batch` says which rows of a step use which adapter, `LayerWeights` where a layer's adapters lie, and
`register` joins the two under the handle that the ops `torch.ops.lora_plugin.lora_apply` and
`lora_embed` take; `shrink` and `expand` are the halves of `lora_apply`, for a second stream. Needs torch and
numpy only.
"""

from lora_plugin.kernels.batch import Batch
from lora_plugin.kernels.choice import available, choose
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.op import expand, register, shrink, unregister_all

__all__ = ["Batch", "LayerWeights", "available", "choose", "expand", "register", "shrink", "unregister_all"]
