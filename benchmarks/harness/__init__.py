"""The common harness: fresh processes, interleaved rounds, page states, checked bits, JSON.

Here: nothing but the name. A benchmark (``bench_*.py``) describes itself to ``bench``; a scenario,
a function of that file, runs in processes of their own (``jobs`` starts them, ``__main__`` is what
they begin with) on states (``states``) and measures with ``run``.
"""
