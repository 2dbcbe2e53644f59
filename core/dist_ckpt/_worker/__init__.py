"""What writes a save behind training's back: one worker a rank, and how the workers agree.

Here: orders, the worker (a process or a thread), the hub where the workers of all ranks meet, the
commit. Not here: what an order is made of (``_saving.plan``), the memory it is staged in
(``_staging_pool``), when a failure is raised in training (``background``).

::

    training process            worker                          worker of rank 0
    worker.Worker -- channel -- loop.WorkerLoop --- hub ------- agreement -> publish
         (link)    (messages)   orders.FileOrder

The worker imports neither torch nor numpy; an order may (``Order``). So nothing in this package
imports them.
"""
