r"""kvd_client.sglang: SGLang on a kvd daemon.

::

    sglang serve --model-path MODEL \
        --enable-unified-cache-external-linker \
        --unified-cache-external-linker-backend dynamic \
        --unified-cache-external-linker-config \
        '{"linker": "KvdLinker", "linker_module_path": "kvd_client.sglang.linker"}'

SGLang's tree of prefixes decides what is looked up, stored and loaded; kvd implements SGLang's
external linker. Each rank's process does its own lookups and has its own chunks; the tree
intersects the results of the ranks. `linker.py` is the interface, `pools.py` describes SGLang's
device pools, `pages.py` says where pages lie and which chunks hold them, `pool_cache.py` is one
pool's connection to the daemon, with the settings, and `transfers.py` has loads and stores.
"""
