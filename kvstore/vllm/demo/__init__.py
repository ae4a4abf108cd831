"""The demonstration inside vLLM: its real engine on a small real model, on a CPU, over one tier after another.

::

    python -m kvstore.vllm.demo       ── run.py: which processes, and the table; the model is `kvstore.demo.model`'s
    engine.py   one process: an engine, prompts one after another, first-token times and tokens
    tiers.py    who is compared: no offloading, vLLM's own `fs` tier, kvstore

`benchmarks/vllm_users.py` and the engine tests start the same processes.
"""
