// softmax(q·kᵀ/√d)·v for Hopper (sm_90a), from the packed projection (N, T, 3, H, d), or from that of the queries and
// (N, T', 2, H, d) of other keys and values, in half precision with float32 accumulation.
//
// Warpgroup products take the inner dimension in 16s and the columns in 8s, so that d = 72 costs 80 in q·kᵀ and exactly 72 in p·v. The copy
// engine cuts a tile into 64 columns and the rest: of q and k 16 more, of v what a second tile of 64 would hold, and fills with zeros what lies
// beyond the head and beyond the sample. One warpgroup copies, the others compute; a block stays on its multiprocessor and takes
// 64 · WARPGROUPS queries of one head after another, and the copies run ahead across that border. A warpgroup multiplies and exponentiates in
// turn; the others fill its gaps.
//
// Given before this text: HEAD (d), KEYS (keys a tile), WARPGROUPS (that compute), STAGES (tiles of keys and values held), BLOCKS (on a
// multiprocessor), PIPELINED (1: a warpgroup computes a tile's weights while the last tile's values are multiplied, for which it needs registers),
// REGISTERS and COPY_REGISTERS (of a computing and a copying thread), and the functions multiply_qk, multiply_pv, round_pair, which are wgmma and
// cvt in the dtype at hand.

constexpr int QUERIES = 64 * WARPGROUPS;
constexpr int BOX = 32;                                     // rows that one copy takes
constexpr int Q_REST = QUERIES * 128, K_REST = KEYS * 128;  // where the columns from 64 on begin; rows of 128 and of 32 bytes, swizzled
constexpr int Q_BYTES = QUERIES * 160, K_BYTES = KEYS * 160, V_BYTES = KEYS * 256;
constexpr int Q_BUFFERS = 2;
constexpr int BARRIERS = 2 * Q_BUFFERS + 4 * STAGES;
constexpr int HEADER = 1024;
constexpr int THREADS = WARPGROUPS * 128 + 128;  // registers are shared out by warpgroups, so one copies, by one thread

__device__ __forceinline__ void pack(const float (&s)[KEYS / 2], unsigned (&p)[KEYS / 4]) {
    #pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = round_pair(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void issue_scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) {
    #pragma unroll
    for (int step = 0; step < 4; step++)
        multiply_qk(s, descriptor(q + 32 * step, 0, 1024, SWIZZLE_128), descriptor(k + 32 * step, 0, 1024, SWIZZLE_128), step > 0);
    multiply_qk(s, descriptor(q_rest, 0, 256, SWIZZLE_32), descriptor(k + K_REST, 0, 256, SWIZZLE_32), 1);
    commit_products();
}

__device__ __forceinline__ void issue_mix(float (&o)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v) {
    #pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        multiply_pv(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], descriptor(v + 2048 * step, 128 * KEYS, 1024, SWIZZLE_128));
    commit_products();
}

__device__ __forceinline__ void scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) {
    begin_products();
    issue_scores(s, q, q_rest, k);
    finish_products();
    settle(s);
}

__device__ __forceinline__ void mix(float (&o)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v) {
    begin_products();
    issue_mix(o, p, v);
    finish_products();
    settle(o);
}

// One box of rows of a head; the barrier counts its bytes.
__device__ __forceinline__ void copy(unsigned to, const TensorMap &map, int column, int part, int token, int sample, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(part), "r"(token), "r"(sample), "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(const __grid_constant__ TensorMap q_main, const __grid_constant__ TensorMap q_rest_map, const __grid_constant__ TensorMap main, const __grid_constant__ TensorMap rest,
          unsigned short *__restrict__ out, float *__restrict__ lse, int queries, int tokens, int heads, int first_key, int items, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned q_full = base, q_empty = q_full + 8 * Q_BUFFERS, k_full = q_empty + 8 * Q_BUFFERS, k_empty = k_full + 8 * STAGES,
                   v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
    const unsigned q_tiles = base + HEADER, k_tiles = q_tiles + Q_BUFFERS * Q_BYTES, v_tiles = k_tiles + STAGES * K_BYTES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // to the compiler one number for a warp: addresses are ready in time

    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) {
            const bool empty = i >= Q_BUFFERS && i < 2 * Q_BUFFERS || i >= 2 * Q_BUFFERS && (i - 2 * Q_BUFFERS) / STAGES % 2;
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(base + 8 * i), "r"(empty ? 4 * WARPGROUPS : 1) : "memory");
        }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    start_next();

    const int blocks = (queries + QUERIES - 1) / QUERIES, tiles = (tokens + KEYS - 1) / KEYS;
    int turn = 0, tile = 0;  // queries and key tiles met so far: they give buffer and parity

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPY_REGISTERS));
        if (threadIdx.x != 128 * WARPGROUPS) return;
        for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
            const int block = item % blocks, head = item / blocks % heads, sample = item / blocks / heads;
            const int buffer = turn % Q_BUFFERS;
            wait(q_empty + 8 * buffer, turn / Q_BUFFERS % 2 ^ 1);
            arrive_and_expect(q_full + 8 * buffer, Q_BYTES);
            for (int row = 0; row < QUERIES; row += BOX) {
                copy(q_tiles + buffer * Q_BYTES + row * 128, q_main, 0, head, block * QUERIES + row, sample, q_full + 8 * buffer);
                copy(q_tiles + buffer * Q_BYTES + Q_REST + row * 32, q_rest_map, 64, head, block * QUERIES + row, sample, q_full + 8 * buffer);
            }
            for (int i = 0; i < tiles; i++, tile++) {
                const int stage = tile % STAGES, parity = tile / STAGES % 2 ^ 1;
                wait(k_empty + 8 * stage, parity);
                arrive_and_expect(k_full + 8 * stage, K_BYTES);
                for (int row = 0; row < KEYS; row += BOX) {
                    copy(k_tiles + stage * K_BYTES + row * 128, main, 0, first_key + head, i * KEYS + row, sample, k_full + 8 * stage);
                    copy(k_tiles + stage * K_BYTES + K_REST + row * 32, rest, 64, first_key + head, i * KEYS + row, sample, k_full + 8 * stage);
                }
                wait(v_empty + 8 * stage, parity);
                arrive_and_expect(v_full + 8 * stage, V_BYTES);
                for (int row = 0; row < KEYS; row += BOX) {
                    copy(v_tiles + stage * V_BYTES + row * 128, main, 0, first_key + heads + head, i * KEYS + row, sample, v_full + 8 * stage);
                    copy(v_tiles + stage * V_BYTES + (KEYS + row) * 128, main, 64, first_key + heads + head, i * KEYS + row, sample, v_full + 8 * stage);
                }
            }
        }
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
        const unsigned q = q_tiles + buffer * Q_BYTES + warpgroup * 8192, q_rest = q_tiles + buffer * Q_BYTES + Q_REST + warpgroup * 2048;
        const int query = block * QUERIES + warpgroup * 64 + warp % 4 * 16 + lane / 4;
        wait(q_full + 8 * buffer, turn / Q_BUFFERS % 2);
        if (block * QUERIES + warpgroup * 64 >= queries) {  // no queries for this warpgroup: pass every tile on
            if (lane == 0) arrive(q_empty + 8 * buffer);
            for (int i = 0; i < tiles; i++, tile++) {
                const int stage = tile % STAGES, parity = tile / STAGES % 2;
                wait(k_full + 8 * stage, parity);
                if (lane == 0) arrive(k_empty + 8 * stage);
                wait(v_full + 8 * stage, parity);
                if (lane == 0) arrive(v_empty + 8 * stage);
            }
            continue;
        }
        #pragma unroll
        for (int i = 0; i < HEAD / 2; i++) o[i] = 0;

        int stage = tile % STAGES, parity = tile / STAGES % 2;
        wait(k_full + 8 * stage, parity);
        scores(s, q, q_rest, k_tiles + stage * K_BYTES);
        if (lane == 0) arrive(k_empty + 8 * stage);
        softmax.weigh<true>(s, factor, scale, tokens, column);
        pack(s, p);
        for (int i = 1; i < tiles; i++) {
#if PIPELINED
            // Scores of this tile are multiplied first, weights and values of the last one meanwhile.
            const int next = (tile + i) % STAGES;
            wait(v_full + 8 * stage, parity);
            wait(k_full + 8 * next, (tile + i) / STAGES % 2);
            begin_products();
            issue_scores(s, q, q_rest, k_tiles + next * K_BYTES);
            issue_mix(o, p, v_tiles + stage * V_BYTES);
            await_all_but_last();
            settle(s);
            if (lane == 0) arrive(k_empty + 8 * next);
            const bool rescale = softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column);
            finish_products();
            settle(o);
            if (lane == 0) arrive(v_empty + 8 * stage);
            stage = next, parity = (tile + i) / STAGES % 2;
            if (rescale) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            pack(s, p);
#else
            wait(v_full + 8 * stage, parity);
            mix(o, p, v_tiles + stage * V_BYTES);
            if (lane == 0) arrive(v_empty + 8 * stage);
            stage = (tile + i) % STAGES, parity = (tile + i) / STAGES % 2;
            wait(k_full + 8 * stage, parity);
            scores(s, q, q_rest, k_tiles + stage * K_BYTES);
            if (lane == 0) arrive(k_empty + 8 * stage);
            if (softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column)) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            pack(s, p);
#endif
        }
        if (lane == 0) arrive(q_empty + 8 * buffer);
        wait(v_full + 8 * stage, parity);
        mix(o, p, v_tiles + stage * V_BYTES);
        if (lane == 0) arrive(v_empty + 8 * stage);
        tile += tiles;

        #pragma unroll
        for (int row = 0; row < 2; row++) {
            const int token = query + 8 * row;
            const float sum = over_row(softmax.sum[row], false), inverse = 1 / sum;
            if (token >= queries) continue;
            unsigned *to = reinterpret_cast<unsigned *>(out + (((long long)sample * queries + token) * heads + head) * HEAD + column);
            #pragma unroll
            for (int j = 0; j < HEAD / 8; j++) to[4 * j] = round_pair(o[4 * j + 2 * row] * inverse, o[4 * j + 2 * row + 1] * inverse);
            if (column == 0)  // natural logarithm of Σ exp(q·k/√d)
                lse[((long long)sample * heads + head) * queries + token] = 0.69314718f * (softmax.top[row] * scale + log2f(sum));
        }
    }
}
