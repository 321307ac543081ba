"""Logits processors of a user's, for tests; `closed_form.shied` says what `Shy` does."""

from __future__ import annotations

import torch
from torch import Tensor

from stepahead.runner.processor import AskingRows


class Shy:
    """Takes `step` off each of the row's `last` tokens, and lifts three others by `lift`: its first
    token, the one whose id is its prompt's length, the one whose id is its length."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size

    def apply(self, logits: Tensor, rows: AskingRows) -> None:
        """As LogitsProcessor."""
        most = max(args["last"] for args in rows.args)
        own = torch.tensor([[args["last"], args["step"], args["lift"]] for args in rows.args])
        last, step, lift = own.unbind(1)
        tokens = rows.last(most).long()
        counts = (tokens >= 0) & (torch.arange(most, 0, -1) <= last.unsqueeze(1))
        logits.scatter_add_(1, tokens.clamp(min=0), -step.unsqueeze(1) * counts)
        lengths = (rows.prompt_lens_dev, rows.lengths_dev)
        lifted = [rows.tokens()[:, 0].long(), *(length % self._vocab_size for length in lengths)]
        for token in lifted:
            logits.scatter_add_(1, token.unsqueeze(1), lift.unsqueeze(1))


class Broken:
    """Raises once a row that asks is `at` tokens long."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    def apply(self, logits: Tensor, rows: AskingRows) -> None:
        """As LogitsProcessor."""
        for args, length in zip(rows.args, rows.lengths_dev.tolist(), strict=True):
            if length >= args["at"]:
                raise ValueError("I can't")


class Freeing(Shy):
    """Would allow everything again."""

    def apply(self, logits: Tensor, rows: AskingRows) -> None:
        """As LogitsProcessor."""
        logits.fill_(1.0)


class Nothing:
    """Has no `apply`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass


class Waiting(Shy):
    """As `Shy`, from the tokens on the host."""

    needs_host_history = True

    def apply(self, logits: Tensor, rows: AskingRows) -> None:
        """As LogitsProcessor."""
        assert rows.host_tokens is not None
        prompt_lens = rows.prompt_lens_dev.tolist()
        for row, tokens in enumerate(rows.host_tokens):
            args, so_far = rows.args[row], tokens.tolist()
            for token in so_far[-args["last"] :]:
                logits[row, token] -= args["step"]
            for token in (so_far[0], prompt_lens[row], len(so_far)):
                logits[row, token % self._vocab_size] += args["lift"]
