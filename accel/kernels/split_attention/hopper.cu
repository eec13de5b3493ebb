// softmax(q·kᵀ/√d)·v at float32 accuracy for Hopper, from and to two float16 terms: qkv (2, N, T, 3, H, d) → out (2, N, T, H, d).
//
// The plan is attention_hopper.cu's. Each of its products is three here (low·high, high·low, high·high), scores in one accumulator of 15 steps, a tile's
// p·v in one of its own, which float32 adds to the output. Softmax's weights are split in registers. A warpgroup issues a tile's scores and the last
// tile's p·v together and weighs the scores while the latter is multiplied.
//
// Given before this text: HEAD (d), KEYS (keys a tile), WARPGROUPS (that compute), STAGES (tiles of keys and values held), Q_BUFFERS (tiles of queries
// held), REGISTERS and COPY_REGISTERS (of a computing and a copying thread), multiply_qk, multiply_pv (wgmma), round_pair and widen.

constexpr int QUERIES = 64 * WARPGROUPS;
constexpr int BOX = 32;                                     // rows that one copy takes
constexpr int Q_REST = QUERIES * 128, K_REST = KEYS * 128;  // where the columns from 64 on begin; rows of 128 and of 32 bytes, swizzled
constexpr int Q_TERM = QUERIES * 160, K_TERM = KEYS * 160, V_TERM = KEYS * 256;
constexpr int Q_BYTES = 2 * Q_TERM, K_BYTES = 2 * K_TERM, V_BYTES = 2 * V_TERM;
constexpr int BARRIERS = 2 * Q_BUFFERS + 4 * STAGES;
constexpr int HEADER = 1024;
constexpr int THREADS = WARPGROUPS * 128 + 128;  // registers are shared out by warpgroups, so one copies, by one thread
constexpr int LIFT = 6;  // weights are 2⁶ times as large, so that float16 holds the low terms of small ones; with GROWTH up to 2¹⁴

// Two terms of each weight. The high one is cut off at float16's last bit, not rounded: its float32 value is then at hand without a conversion.
__device__ __forceinline__ void pack(const float (&s)[KEYS / 2], unsigned (&high)[KEYS / 4], unsigned (&low)[KEYS / 4]) {
    #pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float one = __int_as_float(__float_as_int(s[2 * i]) & 0xFFFFE000), other = __int_as_float(__float_as_int(s[2 * i + 1]) & 0xFFFFE000);
        high[i] = round_pair(one, other);
        low[i] = round_pair(s[2 * i] - one, s[2 * i + 1] - other);
    }
}

// One of the three products of a tile's scores.
__device__ __forceinline__ void score(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k, int accumulate) {
    #pragma unroll
    for (int step = 0; step < 4; step++)
        multiply_qk(s, descriptor(q + 32 * step, 0, 1024, SWIZZLE_128), descriptor(k + 32 * step, 0, 1024, SWIZZLE_128), accumulate + step > 0);
    multiply_qk(s, descriptor(q_rest, 0, 256, SWIZZLE_32), descriptor(k + K_REST, 0, 256, SWIZZLE_32), 1);
}

// The small products first: a tensor core truncates where it adds to a large sum.
__device__ __forceinline__ void scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) {
    begin_products();
    score(s, q + Q_TERM, q_rest + Q_TERM, k, 0);
    score(s, q, q_rest, k + K_TERM, 1);
    score(s, q, q_rest, k, 1);
    commit_products();
}

__device__ __forceinline__ void blend(float (&part)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v, int accumulate) {
    #pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        multiply_pv(part, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], descriptor(v + 2048 * step, 128 * KEYS, 1024, SWIZZLE_128),
                    accumulate + step > 0);
}

// A tile's share of the output, summed by itself.
__device__ __forceinline__ void mix(float (&part)[HEAD / 2], const unsigned (&high)[KEYS / 4], const unsigned (&low)[KEYS / 4], unsigned v) {
    begin_products();
    blend(part, low, v, 0);
    blend(part, high, v + V_TERM, 1);
    blend(part, high, v, 1);
    commit_products();
}

// One box of rows of a head; the barrier counts its bytes.
__device__ __forceinline__ void copy(unsigned to, const TensorMap &map, int column, int part, int token, int sample, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(part), "r"(token), "r"(sample), "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
split_attention(const __grid_constant__ TensorMap main, const __grid_constant__ TensorMap rest, unsigned short *__restrict__ out, int samples, int tokens, int heads, int items, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned q_full = base, q_empty = q_full + 8 * Q_BUFFERS, k_full = q_empty + 8 * Q_BUFFERS, k_empty = k_full + 8 * STAGES,
                   v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
    const unsigned q_tiles = base + HEADER, k_tiles = q_tiles + Q_BUFFERS * Q_BYTES, v_tiles = k_tiles + STAGES * K_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) {
            const bool empty = i >= Q_BUFFERS && i < 2 * Q_BUFFERS || i >= 2 * Q_BUFFERS && (i - 2 * Q_BUFFERS) / STAGES % 2;
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(base + 8 * i), "r"(empty ? 4 * WARPGROUPS : 1) : "memory");
        }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();

    const int blocks = (tokens + QUERIES - 1) / QUERIES, tiles = (tokens + KEYS - 1) / KEYS;
    int turn = 0, tile = 0;  // queries and key tiles met so far: they give buffer and parity

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPY_REGISTERS));
        if (threadIdx.x != 128 * WARPGROUPS) return;
        for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
            const int block = item % blocks, head = item / blocks % heads, sample = item / blocks / heads;
            const int buffer = turn % Q_BUFFERS;
            wait(q_empty + 8 * buffer, turn / Q_BUFFERS % 2 ^ 1);
            arrive_and_expect(q_full + 8 * buffer, Q_BYTES);
            for (int term = 0; term < 2; term++)
                for (int row = 0; row < QUERIES; row += BOX) {
                    const unsigned to = q_tiles + buffer * Q_BYTES + term * Q_TERM;
                    copy(to + row * 128, main, 0, head, block * QUERIES + row, sample + term * samples, q_full + 8 * buffer);
                    copy(to + Q_REST + row * 32, rest, 64, head, block * QUERIES + row, sample + term * samples, q_full + 8 * buffer);
                }
            for (int i = 0; i < tiles; i++, tile++) {
                const int stage = tile % STAGES, parity = tile / STAGES % 2 ^ 1;
                wait(k_empty + 8 * stage, parity);
                arrive_and_expect(k_full + 8 * stage, K_BYTES);
                for (int term = 0; term < 2; term++)
                    for (int row = 0; row < KEYS; row += BOX) {
                        const unsigned to = k_tiles + stage * K_BYTES + term * K_TERM;
                        copy(to + row * 128, main, 0, heads + head, i * KEYS + row, sample + term * samples, k_full + 8 * stage);
                        copy(to + K_REST + row * 32, rest, 64, heads + head, i * KEYS + row, sample + term * samples, k_full + 8 * stage);
                    }
                wait(v_empty + 8 * stage, parity);
                arrive_and_expect(v_full + 8 * stage, V_BYTES);
                for (int term = 0; term < 2; term++)
                    for (int row = 0; row < KEYS; row += BOX) {
                        const unsigned to = v_tiles + stage * V_BYTES + term * V_TERM;
                        copy(to + row * 128, main, 0, 2 * heads + head, i * KEYS + row, sample + term * samples, v_full + 8 * stage);
                        copy(to + (KEYS + row) * 128, main, 64, 2 * heads + head, i * KEYS + row, sample + term * samples, v_full + 8 * stage);
                    }
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    const int warpgroup = warp / 4, column = lane % 4 * 2;
    float s[KEYS / 2], o[HEAD / 2], part[HEAD / 2], factor[2];
    unsigned high[KEYS / 4], low[KEYS / 4];
    Softmax<KEYS, LIFT> softmax;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
        const int block = item % blocks, head = item / blocks % heads, sample = item / blocks / heads;
        const int buffer = turn % Q_BUFFERS;
        const unsigned q = q_tiles + buffer * Q_BYTES + warpgroup * 8192, q_rest = q_tiles + buffer * Q_BYTES + Q_REST + warpgroup * 2048;
        const int query = block * QUERIES + warpgroup * 64 + warp % 4 * 16 + lane / 4;
        wait(q_full + 8 * buffer, turn / Q_BUFFERS % 2);
        if (block * QUERIES + warpgroup * 64 >= tokens) {  // no queries for this warpgroup: pass every tile on
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
        finish_products();
        settle(s);
        if (lane == 0) arrive(k_empty + 8 * stage);
        softmax.weigh<true>(s, factor, scale, tokens, column);
        pack(s, high, low);
        for (int i = 1; i < tiles; i++) {
            // This tile's scores and the last one's share of the output are multiplied side by side; the softmax runs beside the latter.
            const int next = (tile + i) % STAGES, next_parity = (tile + i) / STAGES % 2;
            wait(k_full + 8 * next, next_parity);
            wait(v_full + 8 * stage, parity);
            scores(s, q, q_rest, k_tiles + next * K_BYTES);
            mix(part, high, low, v_tiles + stage * V_BYTES);
            await_all_but_last();
            settle(s);
            if (lane == 0) arrive(k_empty + 8 * next);
            const bool rescale = softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column);
            finish_products();
            settle(part);
            if (lane == 0) arrive(v_empty + 8 * stage);
            #pragma unroll
            for (int j = 0; j < HEAD / 2; j++) o[j] += part[j];
            if (rescale) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            pack(s, high, low);
            stage = next, parity = next_parity;
        }
        if (lane == 0) arrive(q_empty + 8 * buffer);
        wait(v_full + 8 * stage, parity);
        mix(part, high, low, v_tiles + stage * V_BYTES);
        finish_products();
        settle(part);
        if (lane == 0) arrive(v_empty + 8 * stage);
        #pragma unroll
        for (int j = 0; j < HEAD / 2; j++) o[j] += part[j];
        tile += tiles;

        #pragma unroll
        for (int row = 0; row < 2; row++) {
            const int token = query + 8 * row;
            const float sum = over_row(softmax.sum[row], false), inverse = 1 / sum;
            if (token >= tokens) continue;
            unsigned *to = reinterpret_cast<unsigned *>(out + (((long long)sample * tokens + token) * heads + head) * HEAD + column);
            unsigned *to_low = to + (long long)samples * tokens * heads * (HEAD / 2);
            #pragma unroll
            for (int j = 0; j < HEAD / 8; j++) {
                const float x = o[4 * j + 2 * row] * inverse, y = o[4 * j + 2 * row + 1] * inverse;
                const unsigned pair = round_pair(x, y);
                float one, other;
                widen(pair, one, other);
                to[4 * j] = pair;
                to_low[4 * j] = round_pair(x - one, y - other);
            }
        }
    }
}
