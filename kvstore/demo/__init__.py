"""The demo: a real model answers questions about a real document from blocks that another process computed.

::

    run.py ── cold:   stock.py, plain transformers as a script, no kvstore in the process
           ── fill:   tiered.py reads the same prompts and stores their blocks in every tier
           ── warm:   tiered.py, started afresh for each tier, answers from what the tier kept
           ── damage: one byte of one block is flipped (disk.py), tiered.py is started once more

The document is the Apache License 2.0, as it lies in this package.
"""
