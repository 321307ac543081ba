"""Pages, prefixes and the memory behind them."""

from __future__ import annotations

from mutating import Mutation

MUTATIONS = [
    Mutation(
        "keys and values are written as they are",
        "one request's overflow spoiling whoever gets its pages next",
        "cache/pools.py",
        "        k.nan_to_num_()\n        v.nan_to_num_()\n",
        "",
        "tests/cpu/test_model_attention.py::test_a_page_stays_finite_whatever_is_written",
    ),
    Mutation(
        "who was refused is not asked again when pages are published",
        "a request that waits though it shares what is there by now",
        "cache/store.py",
        "        self.changes += taken > 0\n",
        "",
        "tests/pure/test_scheduler.py::test_a_refused_request_is_let_in_when_its_prefix_is_published",
    ),
    Mutation(
        "a chain is let go root first",
        "a page evicted before its children",
        "cache/prefix.py",
        "        for page in reversed(chain):\n",
        "        for page in chain:\n",
        "tests/pure/test_prefix.py::test_the_tree_is_its_model",
    ),
    Mutation(
        "use does not make a page young",
        "the warmest pages evicted first",
        "cache/prefix.py",
        "                idle.move_to_end(page)\n",
        "",
        "tests/pure/test_prefix.py::test_a_duplicate_makes_its_twin_young_again",
    ),
    Mutation(
        "a duplicate page is lost",
        "a pool that shrinks",
        "cache/store.py",
        "        if duplicates:\n            self.free.give(np.array(duplicates, np.int32))\n",
        "",
        "tests/pure/test_prefix.py::test_the_tree_is_its_model",
    ),
    Mutation(
        "a hit covers the whole prompt",
        "a prompt of which nothing is left to compute",
        "cache/store.py",
        "        most = (len(tokens) - 1) // self.page_size\n",
        "        most = len(tokens) // self.page_size\n",
        "tests/pure/test_pages.py::test_a_hit_leaves_a_token_to_compute",
    ),
    Mutation(
        "a pool is written to when it is made",
        "seconds of a start, and memory that no row uses",
        "cache/pools.py",
        '    if torch.device(device).type != "cpu" or not nbytes or sys.platform == "win32":\n',
        "    if True:\n",
        "tests/cpu/test_start.py::test_a_pool_is_resident_only_where_something_was_written",
    ),
]
