"""Linear and embedding over stored weights, as functions and as modules."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from .table import dequantize, gather_rows
from .weight import StoredWeight


def linear(x: torch.Tensor, weight: StoredWeight, bias: StoredWeight | torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, in x's dtype; weight and bias are on x's device.

    Memory: the dequantised weight for the time of the call.
    """
    if isinstance(bias, StoredWeight):
        bias = dequantize(bias, x.dtype)
    elif bias is not None:
        bias = bias.to(x.dtype)
    return functional.linear(x, dequantize(weight, x.dtype), bias)


_FORMAT_OF = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class _StoredModule(nn.Module):
    """Holds stored weights as buffers of raw bytes.

    `.to(device)`, device hooks and `state_dict` see the stored bytes; `.to(dtype)`, `.half()` ... cannot change
    them, because a cast touches floating tensors only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._templates: dict[str, StoredWeight] = {}

    def _store(self, name: str, weight: StoredWeight) -> None:
        self._templates[name] = weight.to("meta")
        for role, tensor in (("data", weight.data), *weight.params.items()):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self.register_buffer(f"{name}_{role}", raw)

    def _stored(self, name: str) -> StoredWeight:
        template = self._templates[name]

        def typed(role: str, like: torch.Tensor) -> torch.Tensor:
            return self.get_buffer(f"{name}_{role}").view(like.dtype).reshape(like.shape)

        params = {role: typed(role, like) for role, like in template.params.items()}
        return dataclasses.replace(template, data=typed("data", template.data), params=params)

    @property
    def weight(self) -> StoredWeight:
        """The stored weight, where the module is now. No tensor, so that no code casts inputs to its dtype."""
        return self._stored("weight")


class QuantLinear(_StoredModule):
    """`nn.Linear` over a stored weight; computes in the dtype of its input.

    Args:
        weight: (out, in); bias: (out,).
    """

    def __init__(self, weight: StoredWeight, bias: StoredWeight | torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._store("weight", weight)
        if isinstance(bias, torch.Tensor):
            bias = StoredWeight(_FORMAT_OF[bias.dtype], tuple(bias.shape), bias)
        if bias is not None:
            self._store("bias", bias)

    @property
    def bias(self) -> StoredWeight | None:
        return self._stored("bias") if "bias" in self._templates else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self._templates['weight'].format}"


class QuantEmbedding(_StoredModule):
    """`nn.Embedding` over a stored table; dequantises only the rows asked for, into `dtype`.

    The table may stay on another device than the index (a memory map on the host): the rows go to the index's.
    """

    def __init__(self, weight: StoredWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype
        self._store("weight", weight)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return gather_rows(self.weight, index, self.dtype).to(index.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self._templates['weight'].format}"
