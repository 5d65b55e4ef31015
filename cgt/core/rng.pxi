# Randomness. A recording's RNG kernels read seed and offset from two device words; before a launch
# the words are set by patching the node that writes them, and the host generator moves on as eager
# would have moved it. The host driver needs nothing of this: its ops draw for themselves.

cdef int rng_bind(void* exec_, Gen* gens, int32_t n, Driver* d) except -1:
    cdef int32_t k
    cdef int code
    cdef Gen* g
    cdef uint64_t seed = 0, offset = 0
    for k in range(n):
        g = gens + k
        if g.advance == 0: continue
        if generator_take(g.generator, g.advance, &seed, &offset) != 0: return -1
        if seed == g.seed and offset == g.offset: continue
        g.seed = seed
        g.offset = offset
        code = d.patch_words(exec_, g)
        if code != 0: g.seed = ~seed              # the exec was not told: patch again next time
        check(CUDA, code, CALL_PATCH)
    return 0
