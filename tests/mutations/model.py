"""What models do with pages."""

from __future__ import annotations

from mutating import Mutation

MUTATIONS = [
    Mutation(
        "torch's kernel is believed",
        "rows that some versions do not write",
        "model/attention/varlen.py",
        "        if _right(kernel, shape, device):\n",
        "        if True:\n",
        "tests/cpu/test_attention_varlen.py::test_a_kernel_that_errs_is_not_used",
    ),
    Mutation(
        "rows are split",
        "rows that come out wrong in some versions of torch",
        "model/attention/varlen.py",
        ', "num_splits": 1}',
        "}",
        "tests/cpu/test_attention_varlen.py::test_the_kernel_is_given_the_step",
    ),
    Mutation(
        "an accelerator's mask forgets the length",
        "a row that reads another's cells",
        "model/attention/varlen.py",
        'mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)',
        "mask.unsqueeze(1)",
        "tests/cpu/test_attention_varlen.py::test_plain_operations_give_what_the_cpu_gives",
    ),
    Mutation(
        "attention looks at lengths on the host",
        "a host that waits for each forward",
        "model/attention/varlen.py",
        "    pages = inputs.decode_pages_dev\n    places",
        "    pages = inputs.decode_pages_dev[:, : int(inputs.decode_lens_dev.max())]\n    places",
        "tests/cpu/test_attention_varlen.py::test_the_host_reads_nothing_of_the_device",
    ),
    Mutation(
        "a window has no far end",
        "a model that attends to what it was trained not to see",
        "model/attention/paged.py",
        "return past if window is None else past | (places < lens - window)",
        "return past",
        "tests/cpu/test_model_attention.py::test_decode_rows_see_a_window",
    ),
    Mutation(
        "a chunk's window begins at its first page",
        "positions that are a page off",
        "model/attention/paged.py",
        "    begin = first * shape.page_size\n",
        "    begin = 0\n",
        "tests/cpu/test_model_attention.py::test_chunk_rows_see_a_window",
    ),
    Mutation(
        "a window touches no page more than it fills",
        "a window's first positions left out where it begins inside a page",
        "model/attention/paged.py",
        "-(-(self.window - 1) // self.page_size) + 1)",
        "-(-self.window // self.page_size))",
        "tests/cpu/test_model_attention.py::test_decode_rows_see_a_window",
    ),
    Mutation(
        "a kernel that sees too far back is believed",
        "a sliding window that only the CPU has",
        "model/attention/varlen.py",
        "before = -1 if shape.window is None else shape.window - 1",
        "before = -1",
        "tests/cpu/test_attention_varlen.py::test_the_kernel_is_given_the_step",
    ),
    Mutation(
        "layers that see a window have the others' rope",
        "Gemma 3 files that are off by all they know of places",
        "model/llama.py",
        "rope = self.window_rope if windowed else self.rope",
        "rope = self.rope",
        "tests/cpu/test_model_logits.py::test_full_prefill",
    ),
]
