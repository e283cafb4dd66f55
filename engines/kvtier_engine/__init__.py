"""The bundled decode engine, its server (`kvtier engine`), and `kvtier demo`.

    model = load_model(Path("SmolLM2-135M-Instruct"))
    pool = DevicePool(layout_of(model, page_tokens=64), pages=256)
    with kvtier.connect(url) as kv, contextlib.closing(KvtierTiers(kv, pool)) as tiers:
        with Engine(model, pool, tiers=tiers) as engine:
            done = engine.submit(Request(prompt=tuple(model.tokenizer.encode("Once")))).result()
            done.text, done.cached.device, done.cached.host, done.cached.nvme

Needs the extra: `pip install 'kvtier[engine]'`. Sees kvtier.client, kvtier.packing and the
top-level package only, like any engine outside this repository.
"""
