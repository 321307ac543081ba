"""GLM-5 and its kin, and DeepSeek-V3.2: compressed cache, sparse attention, experts.

A plain model on one device.  It knows arithmetic; it must not know requests, ranks or how its
weights got here.
"""

from __future__ import annotations

from torch import Tensor, nn

from stepahead.cache.pools import LatentPool
from stepahead.model.attention.latent import LatentAttention, LatentShape, lay_out
from stepahead.model.batch import StepInputs
from stepahead.model.layers import Linear, RMSNorm, Rope
from stepahead.model.llama import Embedding
from stepahead.model.mla import Angles, Choice, Layer
from stepahead.model.mtp import Mtp
from stepahead.model.spec import ModelSpec


class GlmMoeDsa(nn.Module):
    """The whole model. Call it under torch.inference_mode(); its parameters need no gradients.

    Made without memory: `weights.load_sparse` gives it parameters.  `mtp` is there if it drafts.
    """

    fine_fence = True  # page tables are read in the call and not after it

    def __init__(self, spec: ModelSpec, *, drafts: bool = False) -> None:
        super().__init__()
        assert spec.sparse is not None, "the spec of another architecture"
        sparse = spec.sparse
        self.spec = spec
        self.sparse = sparse
        self.vocab_size = spec.vocab_size
        self.embed = Embedding(spec.vocab_size, spec.hidden_size)
        self.rope = Rope(spec.rope, sparse.rope_dim, spec.max_len)
        self.layers = nn.ModuleList(
            Layer(spec, sparse, index, indexer=indexer, experts=experts)
            for index, (indexer, experts) in enumerate(
                zip(sparse.indexers, sparse.experts, strict=True)
            )
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        # no layer comes after it that could amplify its rounding
        self.head = Linear(spec.hidden_size, (spec.vocab_size,), fine_sums=False)
        self.mtp = Mtp(spec, sparse) if drafts and sparse.mtp_layers else None

    def forward(self, inputs: StepInputs, kv: LatentPool) -> Tensor:
        """Run a step: write its rows and index keys, return hidden states [T, hidden], normed."""
        x = self.embed(inputs.token_ids_dev)
        angles, step = self._prepare(inputs, kv, x)
        chosen: Choice | None = None
        for layer, owns in zip(self.layers, self.sparse.indexers, strict=True):
            given = None if owns else chosen  # who owns an indexer chooses anew
            x, chosen = layer(x, angles, inputs.cells_dev, step, kv, given)
        return self.norm(x)

    def draft(
        self, hidden: Tensor, inputs: StepInputs, kv: LatentPool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the MTP layer over a step's tokens: what `logits` makes drafts of.

        Token i of the step stands at its position and its cell as in `forward`, which has run
        before; its token id is the *next* one, x[i+1], and hidden [T, hidden] is what `forward` (or
        an earlier `draft`) gave for it.  Returns hidden states [T, hidden] for x[i+2], normed: the
        next draft's `hidden` as they stand; and the positions that each token read, int64[T, topk],
        -1 where there are fewer.  Given such positions as `seed`, nothing is scored.  They are
        positions of the request and not places in memory, so they outlast a move of its pages.
        The layer's own row and index key are written in every case.
        """
        assert self.mtp is not None, "the model was made without drafts"
        tokens = self.embed(inputs.token_ids_dev)
        angles, step = self._prepare(inputs, kv, tokens)
        given = None if seed is None else step.given(seed)
        drafted, chosen = self.mtp(tokens, hidden, angles, inputs.cells_dev, step, kv, given)
        return drafted, step.positions(inputs.positions_dev, chosen)

    def _prepare(
        self, inputs: StepInputs, kv: LatentPool, x: Tensor
    ) -> tuple[Angles, LatentAttention]:
        angles = self.rope(inputs.positions_dev, x.dtype)
        return angles, lay_out(inputs, self._shape(kv.page_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden states [R, hidden]."""
        return self.head(hidden).float()

    def new_kv(self, num_pages: int, page_size: int) -> LatentPool:
        """A pool of this model's shape and dtype, on its device."""
        sparse, weight = self.sparse, self.embed.weight
        # the MTP layer owns an indexer, and its pages are after those of the others
        return LatentPool(
            sparse.indexers if self.mtp is None else (*sparse.indexers, True),
            *(num_pages, page_size, sparse.row_values, sparse.index_dim),
            dtype=weight.dtype,
            device=weight.device,
        )

    def _shape(self, page_size: int) -> LatentShape:
        sparse = self.sparse
        return LatentShape(
            heads=self.spec.num_heads,
            latent=sparse.kv_lora_rank,
            head_dim=sparse.nope_dim + sparse.rope_dim,
            row_values=sparse.row_values,
            topk=sparse.index_topk,
            page_size=page_size,
            dtype=self.embed.weight.dtype,
        )
