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
        'mask.masked_fill_(past_end, float("-inf")).unsqueeze(1)',
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
]
