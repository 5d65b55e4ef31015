# Randomness. A recording's RNG kernels read seed and offset from two device words; before a launch
# the words are set by patching the node that writes them, and the host generator moves on as eager
# would have moved it. The host driver needs nothing of this: its ops draw for themselves.

cdef int words_bind(void* exec_, Patch* p, Driver* d) except -1:
    """Take what a run draws from the generator, and have the graph begin there."""
    cdef uint64_t seed = 0, offset = 0
    if not p.draws: return 0
    generator_take(p.generator, p.advance, &seed, &offset)
    if seed == p.told[0] and offset == p.told[1]: return 0
    p.told[0], p.told[1] = seed, offset
    code = fault(CALL_PATCH) or d.patch(exec_, p)
    if code != 0: p.told[0] = ~seed               # the exec was not told: patch again next time
    return check(CUDA, code, CALL_PATCH)
