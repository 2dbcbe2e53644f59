"""Whether descriptions are right: coverage of tensors, agreement of request and checkpoint.

Here: pure checks that return every problem they find, as text. Not here: gathering the
descriptions and raising (``validation``).
"""
