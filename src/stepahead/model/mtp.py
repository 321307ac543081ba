"""The layer that drafts: multi-token prediction (MTP).

    z = W [norm(embedding of the next token) ; norm(hidden state)]     then a layer, then a norm

A full layer with experts and an indexer of its own, so it keeps a latent row and an index key a
token, at the positions of the tokens whose hidden states it is given.  Embeddings and the head are
the model's.

It knows arithmetic; it must not know who accepts its drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepahead.cache.pools import LatentPool
from stepahead.model.attention.latent import LatentAttention
from stepahead.model.layers import Linear, RMSNorm
from stepahead.model.mla import Angles, Choice, Layer
from stepahead.model.sparse import SparseSpec
from stepahead.model.spec import ModelSpec


class Mtp(nn.Module):
    """One MTP layer, whose pages are those after the model's last layer."""

    def __init__(self, spec: ModelSpec, sparse: SparseSpec) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.token_norm = RMSNorm(hidden, spec.rms_eps)
        self.hidden_norm = RMSNorm(hidden, spec.rms_eps)
        self.combine = Linear(2 * hidden, (hidden,))
        self.layer = Layer(spec, sparse, spec.num_layers, indexer=True, experts=True)
        self.norm = RMSNorm(hidden, spec.rms_eps)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        angles: Angles,
        cells: Tensor,
        step: LatentAttention,
        pool: LatentPool,
        chosen: Choice | None = None,
    ) -> tuple[Tensor, Choice]:
        """Hidden states [T, hidden], normed, and what was chosen.

        tokens [T, hidden] are embeddings of the next tokens, hidden [T, hidden] normed states.
        """
        both = torch.cat((self.token_norm(tokens), self.hidden_norm(hidden)), 1)
        x, chosen = self.layer(self.combine(both), angles, cells, step, pool, chosen)
        return self.norm(x), chosen
