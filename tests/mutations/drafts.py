"""Drafts: what is planned for them, what of them counts, and what is taken back."""

from __future__ import annotations

from mutating import Mutation

_PAPER = (
    "tests/pure/test_parity_paper.py::test_runs_of_any_length_are_planned_for_and_taken_back[0]"
)
_PARITY = "tests/cpu/test_parity_drafts.py::test_drafts_change_nothing_that_a_client_hears[0]"
_COPYING = "tests/cpu/test_drafts.py::test_prompt_lookup_on_a_model_that_repeats_itself"

_MTP = "tests/cpu/test_parity_mtp.py"
_DRAFTED = f"{_MTP}::test_what_is_drafted_is_what_the_whole_sequence_says"
_OWN = f"{_MTP}::test_own_drafts_on_the_hostile_device"

MUTATIONS = [
    Mutation(
        "the page reserve is off by one draft",
        "a draft without a page",
        "scheduler/rows.py",
        "        ahead = (table.covered[at] - table.planned[at]) // table.width\n",
        "        ahead = (table.covered[at] - table.planned[at] + 1) // table.width\n",
        _PAPER,
    ),
    Mutation(
        "rejected drafts are taken back twice",
        "a frontier behind what is written",
        "scheduler/table.py",
        "        self.frontier[:, at] += self._run_landed + _EACH_TOKEN * counts\n",
        "        self.frontier[:, at] += self._run_landed + _EACH_TOKEN * counts\n"
        "        self.frontier[0, at] += counts - self.width\n",
        _PAPER,
        "drafts were taken back wrongly",
    ),
    Mutation(
        "a stale step is taken for news",
        "tokens after the end",
        "scheduler/drafts.py",
        "            counts[deaf] = 0\n",
        "",
        _PAPER,
    ),
    Mutation(
        "drafts are not invalidated on preempt",
        "what an old owner of the slot said, proposed to the new one",
        "runner/verify.py",
        "        self._drafter.enter(staged)\n",
        "",
        "tests/cpu/test_drafts.py::test_drafts_come_from_the_request_s_own_tokens[overlap-0-24]",
    ),
    Mutation(
        "the relay has the wrong accepted row",
        "a step that goes on from a rejected draft",
        "runner/verify.py",
        "    newest = sampled_dev.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1)\n",
        "    newest = sampled_dev[:, -1]\n",
        f"{_COPYING}[overlap-0-hostile]",
    ),
    Mutation(
        "drafts are taken at their word",
        "tokens that the model would not have sampled",
        "runner/verify.py",
        "(asked.tokens_dev[:, 1:] == sampled_dev[:, :-1]) & ~ends_dev[:, :-1]\n",
        "~ends_dev[:, :-1]\n",
        f"{_COPYING}[serial-0-cpu]",
    ),
    Mutation(
        "a run goes on behind a stop token",
        "a row that writes what nobody wants",
        "runner/verify.py",
        "(asked.tokens_dev[:, 1:] == sampled_dev[:, :-1]) & ~ends_dev[:, :-1]\n",
        "(asked.tokens_dev[:, 1:] == sampled_dev[:, :-1])\n",
        "tests/cpu/test_drafts.py::test_a_run_is_what_would_have_come_one_by_one",
    ),
    Mutation(
        "rejected drafts count for the length",
        "a gap in what is read",
        "runner/verify.py",
        "        slots.length_dev.index_add_(0, rows_dev, run.counts_dev)\n",
        "        slots.length_dev.index_add_(0, rows_dev, torch.full_like(rows_dev, width))\n",
        f"{_COPYING}[overlap-0-cpu]",
    ),
    Mutation(
        "rows go on past their limit",
        "a row that writes behind its last page",
        "runner/verify.py",
        "    is_open = torch.arange(width, device=first.device) < left.unsqueeze(1)\n",
        "    is_open = torch.arange(width, device=first.device) < left.unsqueeze(1) + width\n",
        "tests/cpu/test_drafts.py::test_rows_at_their_limit_write_nothing_under_drafts[2]",
    ),
    Mutation(
        "penalties do not see the drafts before a place",
        "tokens that should have been penalised",
        "runner/sampler.py",
        "        drafts = before_dev[rows]\n",
        "        drafts = before_dev[rows] * 0 - 1\n",
        _PARITY,
    ),
    Mutation(
        "penalties count rejected drafts",
        "tokens penalised that were never said",
        "runner/counts.py",
        "        ones = counts_dev.to(torch.int32)\n",
        "        ones = torch.ones_like(tokens_dev, dtype=torch.int32)\n",
        _PARITY,
    ),
    Mutation(
        "what follows a stop string in its run is told",
        "tokens after the end",
        "scheduler/drafts.py",
        "                counts[i] = at + 1\n",
        "",
        _PAPER,
    ),
    Mutation(
        "the runner's bounds never hear of rejections",
        "steps that read more and more cells that nobody needs",
        "runner/stage.py",
        "        self.rejections.settle(self._slots.computed)\n",
        "",
        "tests/cpu/test_drafts.py::test_bounds_of_lengths_follow_what_was_rejected",
    ),
    Mutation(
        "prompt positions stand where all drafts would have ended",
        "a chunk that reads other rows' tokens",
        "runner/inputs.py",
        "        ChunkRow(first + moved, count, end,",
        "        ChunkRow(first, count, end,",
        "tests/cpu/test_parity_llama.py::test_a_tiny_llama_gives_the_same_under_drafts",
    ),
    Mutation(
        "each token of a run is told with the last one's log-probabilities",
        "log-probabilities of another token",
        "llm/collect.py",
        "            place = answer.told_tokens\n",
        "            place = len(answer.logprobs or ()) - 1\n",
        "tests/pure/test_llm_answers.py::test_logprobs_go_with_their_tokens",
    ),
    Mutation(
        "the layer that drafts is given the state behind the accepted one",
        "drafts that are hardly ever right",
        "runner/mtp.py",
        "    rows += (is_open.sum(1) - 1).clamp(min=0)\n",
        "    rows += is_open.sum(1).clamp(max=width - 1)\n",
        f"{_DRAFTED}[overlap-half-False-True]",
    ),
    Mutation(
        "what the chain wrote is not written over",
        "drafts that read rows of tokens that were never said",
        "runner/mtp.py",
        "        is_open = tokens >= 0\n",
        "        is_open = tokens >= 0\n        is_open[:, 1:-1] = False\n",
        f"{_DRAFTED}[overlap-half-False-True]",
    ),
    Mutation(
        "a chunk's last position has no next token",
        "a row of the layer that drafts with padding in it, at the end of each chunk",
        "runner/inputs.py",
        "        known = joins[slot].tokens[start + 1 : start + count + 1]\n",
        "        known = joins[slot].tokens[start + 1 : start + count]\n",
        f"{_DRAFTED}[serial-random-True-True]",
    ),
    Mutation(
        "the layer that drafts chooses anew for each draft",
        "drafts other than those that the model was trained for",
        "runner/mtp.py",
        " if self._model.sparse.mtp_shares_index else None\n",
        " if self._model is None else None\n",
        f"{_DRAFTED}[serial-random-True-True]",
    ),
    Mutation(
        "each draft is made at its predecessor's place",
        "drafts of no use but the first",
        "runner/mtp.py",
        "            place = first + (at - 1)\n",
        "            place = first\n",
        f"{_DRAFTED}[serial-random-True-True]",
    ),
    Mutation(
        "the fence opens before drafts are made",
        "a page table that changes while drafts read it",
        "runner/runner.py",
        'getattr(model, "fine_fence", False) and not late\n',
        'getattr(model, "fine_fence", False)\n',
        f"{_OWN}[overlap-0-2]",
    ),
    Mutation(
        "drafts go on past a row's limit",
        "a place that no page table has",
        "runner/mtp.py",
        "            is_open = (left >= at).unsqueeze(1)  # a dead row has none left\n",
        "            is_open = (left >= at - 99).unsqueeze(1)\n",
        "tests/cpu/test_parity_mtp.py::test_own_drafts_up_to_the_last_place_of_a_page_table",
    ),
    Mutation(
        "the layer that drafts is not counted",
        "a pool that takes more memory than it says",
        "assemble.py",
        "    groups = groups_of(sparse, width, mtp)\n",
        "    groups = groups_of(sparse, width)\n",
        "tests/cpu/test_sparse_memory.py::test_the_layer_that_drafts_is_counted_as_memory",
    ),
]
