"""The mixture of experts of nomic-embed-text-v2-moe, which transformers' class does not have.

Its other layers are those of jina-embeddings-v3: attention and MLPs with biases, and norms behind them.

Shapes: N tokens, D numbers of a token, E experts, K of which a token is computed by, F numbers between their layers.
"""

import torch
from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3Model


class _Router(torch.nn.Module):
    """Chooses the experts of each token."""

    def __init__(self, config: JinaEmbeddingsV3Config) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self._num_chosen = config.moe_top_k

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the shares [N, E]: those of the softmax, and 0 of all but the K largest. They are below 1 together."""
        shares_NE = self.layer(hidden_ND).softmax(-1, dtype=torch.float32)
        largest_NK, experts_NK = shares_NE.topk(self._num_chosen, dim=-1)
        return torch.zeros_like(shares_NE).scatter(1, experts_NK, largest_NK).to(hidden_ND.dtype)


class _Weights(torch.nn.Module):
    """The layers of all experts, one below the other; the second ones are transposed."""

    def __init__(self, config: JinaEmbeddingsV3Config) -> None:
        super().__init__()
        shape = config.num_experts * config.intermediate_size, config.hidden_size
        self.w1, self.w2 = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))


class _Experts(torch.nn.Module):
    def __init__(self, config: JinaEmbeddingsV3Config) -> None:
        super().__init__()
        self.mlp = _Weights(config)
        self.bias = torch.nn.Parameter(torch.zeros(config.hidden_size))


class ExpertLayer(torch.nn.Module):
    """In place of an MLP: the sum of what a token's experts compute, by their shares, and one bias."""

    def __init__(self, config: JinaEmbeddingsV3Config) -> None:
        super().__init__()
        self.router, self.experts = _Router(config), _Experts(config)
        self._num_experts = config.num_experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [..., D]."""
        hidden_ND = hidden.reshape(-1, hidden.shape[-1])
        shares_NE = self.router(hidden_ND)
        # A CUDA graph has fixed shapes; that of each expert's tokens is known only when they are chosen.
        compute = self.compute_all if hidden.is_cuda else self.compute_chosen
        return (compute(hidden_ND, shares_NE) + self.experts.bias).reshape(hidden.shape)

    def compute_chosen(self, hidden_ND: torch.Tensor, shares_NE: torch.Tensor) -> torch.Tensor:
        """Compute each token by its own experts."""
        total_ND = torch.zeros_like(hidden_ND)
        for expert in range(self._num_experts):
            shares_N = shares_NE[:, expert]
            (places,) = shares_N.nonzero(as_tuple=True)
            result = self._compute(hidden_ND[places], expert) * shares_N[places].unsqueeze(1)
            total_ND = total_ND.index_add(0, places, result)
        return total_ND

    def compute_all(self, hidden_ND: torch.Tensor, shares_NE: torch.Tensor) -> torch.Tensor:
        """Compute likewise, each token by all experts, whose results for others' tokens have the share 0."""
        parts = (self._compute(hidden_ND, expert) * shares_NE[:, expert, None] for expert in range(self._num_experts))
        return torch.stack([*parts]).sum(0)

    def _compute(self, hidden_ND: torch.Tensor, expert: int) -> torch.Tensor:
        first_FD, second_FD = (
            weights.view(self._num_experts, -1, hidden_ND.shape[-1])[expert]
            for weights in (self.experts.mlp.w1, self.experts.mlp.w2)
        )
        return torch.nn.functional.gelu(hidden_ND @ first_FD.T) @ second_FD


class ExpertModel(JinaEmbeddingsV3Model):  # type: ignore[misc]  # the library has no types
    """An encoder of which every n-th layer, from the second on, is an `ExpertLayer`."""

    def __init__(self, config: JinaEmbeddingsV3Config) -> None:
        """`config` has `num_experts`, `moe_top_k` and `moe_every_n_layers`, too."""
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if index % config.moe_every_n_layers == 1:
                layer.mlp = ExpertLayer(config)
