"""Parameters that FSDP cuts into shards (`--use-torch-fsdp2`, `--use-megatron-fsdp`).

While a layer runs, its modules hold complete weights, in memory that is freed when the layer is
done. So a weight is read only where its linear runs. Between iterations there are DTensors, of
which this rank has some elements:

    torch FSDP2      the module's parameter is the DTensor; rows are divided as torch.chunk does
    Megatron-FSDP    the DTensor is another parameter, of the main weights. It knows the module's
                     weight (`orig_param`) and which elements it has (`megatron_fsdp_slice`)
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def model_weight(parameter: Any) -> Any:
    """Return the weight that a module multiplies, given what FSDP has put in its place."""
    return getattr(parameter, "orig_param", parameter)


def is_freed(weight: Tensor) -> bool:
    """Return whether FSDP frees the memory of a weight between layers."""
    return isinstance(weight, DTensor) or hasattr(weight, "__fsdp_param__")


def local(tensor: Any) -> Any:
    """Return what this rank has of a DTensor, and anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_elements(parameter: Tensor) -> tuple[int, int]:
    """Return the range of a flattened weight that this rank has between iterations."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    piece: slice | None = getattr(parameter, "megatron_fsdp_slice", None)
    if piece is not None:
        return piece.start, piece.stop
    num_elements = parameter.to_local().numel()
    if hasattr(parameter, "orig_param"):
        return 0, num_elements  # `no_shard`: every rank has all of it
    num_rows = parameter.shape[0]
    rows_per_rank = -(-num_rows // parameter.device_mesh.size())
    first_row = min(parameter.device_mesh.get_local_rank() * rows_per_rank, num_rows)
    start = first_row * (parameter.numel() // num_rows)
    return start, start + num_elements
