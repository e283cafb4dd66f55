"""Eviction by learned reuse: what a page is worth is how soon, and how likely, it is used again.

The modules, each of one concept; those after `layout` are compiled (core/jit.py), and importing
them needs numba:

    layout      the arrays that everything is kept in, and their bounds
    buckets     ages, gaps and lengths as classes
    hazard      the chance of reuse within an age, learned online
    index       from chances to one number: the Gittins index over age
    known       blocks that are remembered, cached or not
    segments    requests, the runs that their blocks fall into, and what is learned from them
    sampled     the lists of requests whose tails are sampled
    pages       the pages of a tier by the request that used them last; which of them goes next
    shadow      two caches without pages, which say whether LRU would do better
    serve       one request
    forecast    all of it as an object
    policy      the Policy of a tier
"""
