"""Writes saves in the background: one worker for each rank, and the commit among the workers.

Here: orders, the worker (a process or a thread), the hub (the rendezvous of the workers), the
commit protocol. Not here: what an order is made from (``_saving.plan``), the staging memory
(``_staging_pool``), when a failure is raised in training (``background``).

::

    training process            worker                          worker of rank 0
    worker.Worker -- channel -- loop.WorkerLoop --- hub ------- agreement -> publish
         (link)    (messages)   orders.FileOrder

The worker imports neither torch nor numpy; an order may (``Order``). So nothing in this package
imports them.
"""
