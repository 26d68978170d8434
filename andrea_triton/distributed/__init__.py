"""Beyond one machine, on torch.distributed.

ring_attention:  attention of a sequence that is split over ranks, which costs each of them O(T / ranks) memory.
shard, unshard:  the rows of a rank, and the whole again.
tensor_parallel_plan:  how torch's parallelize_module is to split the library's modules over ranks.

Importing this also tells DTensor how the library's operators may be sharded, over heads and over the batch (dtensor.py): models
under tensor parallelism run as they are. FSDP needs nothing.
"""

from . import dtensor
from .layout import shard, unshard
from .plan import tensor_parallel_plan
from .ring import ring_attention

__all__ = ["dtensor", "ring_attention", "shard", "tensor_parallel_plan", "unshard"]
