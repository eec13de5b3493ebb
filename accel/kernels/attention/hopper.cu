// softmax(q·kᵀ/√d)·v on Hopper (sm_90a) in half precision with float32 accumulation, from the packed projection
// (N, T, 3, H, d), or from that of the queries and (N, T', 2, H, d) of other keys and values.
//
// wgmma takes the inner dimension in 16s and the columns in 8s: d = 72 costs 80 in q·kᵀ and exactly 72 in p·v. TMA
// loads a tile as 64 columns and the rest: of q and k 16 more, of v what a second tile of 64 would hold. It fills with
// zeros what lies beyond the head and beyond the sample. One warpgroup loads (the producer), the others compute (the
// consumers). A block stays on its multiprocessor and computes 64 · WARPGROUPS queries of one head after another; loads
// run ahead across heads. A warpgroup alternates between MMA and exponentials, and the others fill its gaps.
//
// Defined before this text: HEAD (d), KEYS (keys of a tile), WARPGROUPS (consumers), STAGES (tiles of keys and values
// held), BLOCKS (on a multiprocessor), PIPELINED (1: a warpgroup computes a tile's weights during the previous tile's
// p·v, which takes registers), REGISTERS and PRODUCER_REGISTERS (of a thread), and multiply_qk, multiply_pv (wgmma) and
// round_pair in the kernel's dtype.

__device__ __forceinline__ void pack(const float (&s)[KEYS / 2], unsigned (&p)[KEYS / 4]) {
    #pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = round_pair(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void issue_scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        multiply_qk(s, descriptor(q + 32 * i, 0, 1024, SWIZZLE_128),
                    descriptor(k + 32 * i, 0, 1024, SWIZZLE_128), i > 0);
    multiply_qk(s, descriptor(q_rest, 0, 256, SWIZZLE_32), descriptor(k + K_REST, 0, 256, SWIZZLE_32), 1);
    wgmma_commit();
}

__device__ __forceinline__ void issue_output(float (&o)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v) {
    #pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                    descriptor(v + 2048 * i, 128 * KEYS, 1024, SWIZZLE_128), 1);
    wgmma_commit();
}

__device__ __forceinline__ void scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) {
    wgmma_fence();
    issue_scores(s, q, q_rest, k);
    wgmma_wait();
    fence_registers(s);
}

__device__ __forceinline__ void add_output(float (&o)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v) {
    wgmma_fence();
    issue_output(o, p, v);
    wgmma_wait();
    fence_registers(o);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(const __grid_constant__ TensorMap q_main, const __grid_constant__ TensorMap q_rest_map,
          const __grid_constant__ TensorMap main, const __grid_constant__ TensorMap rest,
          unsigned short *__restrict__ out, int queries, int tokens, int heads, int first_key, int items, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // One value for a warp, as the compiler must know: addresses are then computed ahead, in uniform registers.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Shared at((unsigned)__cvta_generic_to_shared(shared));
    start_next();
    const int blocks = (queries + QUERIES - 1) / QUERIES, tiles = (tokens + KEYS - 1) / KEYS;
    int turn = 0, tile = 0;  // of queries and of keys so far

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 128 * WARPGROUPS)
            produce(at, q_main, q_rest_map, main, rest, blocks, tiles, heads, first_key, 0, items, turn, tile);
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    const int warpgroup = warp / 4, column = lane % 4 * 2;
    float s[KEYS / 2], o[HEAD / 2], factor[2];
    unsigned p[KEYS / 4];
    Softmax<KEYS, 0> softmax;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
        const int block = item % blocks, head = item / blocks % heads, sample = item / blocks / heads;
        const int buffer = turn % Q_BUFFERS;
        const unsigned q = at.q_tiles + buffer * Q_BYTES + warpgroup * 8192;
        const unsigned q_rest = at.q_tiles + buffer * Q_BYTES + Q_REST + warpgroup * 2048;
        const int query = block * QUERIES + warpgroup * 64 + warp % 4 * 16 + lane / 4;
        wait(at.q_full + 8 * buffer, turn / Q_BUFFERS % 2);
        if (block * QUERIES + warpgroup * 64 >= queries) {
            at.release(buffer, tile, tiles, lane);
            continue;
        }
        #pragma unroll
        for (int i = 0; i < HEAD / 2; i++) o[i] = 0;

        int stage = tile % STAGES, parity = tile / STAGES % 2;
        wait(at.k_full + 8 * stage, parity);
        scores(s, q, q_rest, at.k_tiles + stage * K_BYTES);
        if (lane == 0) arrive(at.k_empty + 8 * stage);
        softmax.weigh<true>(s, factor, scale, tokens, column);
        pack(s, p);
        for (int i = 1; i < tiles; i++) {
#if PIPELINED
            // This tile's scores are issued first, then the previous tile's p·v, which runs during this tile's softmax.
            const int next = (tile + i) % STAGES;
            wait(at.v_full + 8 * stage, parity);
            wait(at.k_full + 8 * next, (tile + i) / STAGES % 2);
            wgmma_fence();
            issue_scores(s, q, q_rest, at.k_tiles + next * K_BYTES);
            issue_output(o, p, at.v_tiles + stage * V_BYTES);
            wgmma_wait_but_last();
            fence_registers(s);
            if (lane == 0) arrive(at.k_empty + 8 * next);
            const bool rescale = softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column);
            wgmma_wait();
            fence_registers(o);
            if (lane == 0) arrive(at.v_empty + 8 * stage);
            stage = next, parity = (tile + i) / STAGES % 2;
            if (rescale) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            pack(s, p);
#else
            wait(at.v_full + 8 * stage, parity);
            add_output(o, p, at.v_tiles + stage * V_BYTES);
            if (lane == 0) arrive(at.v_empty + 8 * stage);
            stage = (tile + i) % STAGES, parity = (tile + i) / STAGES % 2;
            wait(at.k_full + 8 * stage, parity);
            scores(s, q, q_rest, at.k_tiles + stage * K_BYTES);
            if (lane == 0) arrive(at.k_empty + 8 * stage);
            if (softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column)) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            pack(s, p);
#endif
        }
        if (lane == 0) arrive(at.q_empty + 8 * buffer);
        wait(at.v_full + 8 * stage, parity);
        add_output(o, p, at.v_tiles + stage * V_BYTES);
        if (lane == 0) arrive(at.v_empty + 8 * stage);
        tile += tiles;

        #pragma unroll
        for (int row = 0; row < 2; row++) {
            const int token = query + 8 * row;
            const float inverse = 1 / over_row(softmax.sum[row], false);
            if (token >= queries) continue;
            const long long line = ((long long)sample * queries + token) * heads + head;
            unsigned *to = reinterpret_cast<unsigned *>(out + line * HEAD + column);
            #pragma unroll
            for (int j = 0; j < HEAD / 8; j++)
                to[4 * j] = round_pair(o[4 * j + 2 * row] * inverse, o[4 * j + 2 * row + 1] * inverse);
        }
    }
}
