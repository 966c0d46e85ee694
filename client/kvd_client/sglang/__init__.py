r"""kvd_client.sglang: SGLang on a kvd daemon.

::

    sglang serve --model-path MODEL \
        --enable-unified-cache-external-linker \
        --unified-cache-external-linker-backend dynamic \
        --unified-cache-external-linker-config \
        '{"linker": "KvdLinker", "linker_module_path": "kvd_client.sglang.linker"}'

SGLang's tree of prefixes decides what is looked up, stored and loaded; kvd implements the
external linker by its own method names. Every rank's process looks things up by itself, and has
chunks of its own; the tree intersects what the ranks find. `linker.py` is the interface,
`pools.py` and `pages.py` say where pages lie, `coverage.py` which prefixes are there, `loads.py`
and `offloads.py` move them, `options.py` has the settings.
"""
