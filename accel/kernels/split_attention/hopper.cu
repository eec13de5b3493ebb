// softmax(q·kᵀ/√d)·v on Hopper at float32 accuracy, from and to pairs of float16: qkv (2, N, T, 3, H, d) → out (2, N,
// T, H, d).
//
// The plan is that of attention/hopper.cu. Each of its GEMMs is three here: low·high, high·low, high·high. Scores are
// summed in one accumulator of 15 MMAs, a tile's p·v in one of its own, which is then added to the output in float32.
// Softmax's weights are split in registers. A warpgroup issues a tile's scores and the previous tile's p·v at once, and
// the latter runs during the former's softmax.
//
// Defined before this text: HEAD (d), KEYS (keys of a tile), WARPGROUPS (consumers), STAGES (tiles of keys and values
// held), Q_BUFFERS (tiles of queries held), REGISTERS and PRODUCER_REGISTERS (of a thread), multiply_qk, multiply_pv
// (wgmma), round_pair and widen.

constexpr int LIFT = 6;  // weights are scaled by 2⁶: float16 then holds the low parts of small ones; with GROWTH 2¹⁴

// Weights as high and low. High is cut off at float16's last bit, not rounded: its float32 value then takes no
// conversion.
__device__ __forceinline__ void pack(const float (&s)[KEYS / 2], unsigned (&high)[KEYS / 4],
                                     unsigned (&low)[KEYS / 4]) {
    #pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const float one = __int_as_float(__float_as_int(s[2 * i]) & 0xFFFFE000);
        const float other = __int_as_float(__float_as_int(s[2 * i + 1]) & 0xFFFFE000);
        high[i] = round_pair(one, other);
        low[i] = round_pair(s[2 * i] - one, s[2 * i + 1] - other);
    }
}

// One of the three GEMMs of a tile's scores.
__device__ __forceinline__ void score(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k, int accumulate) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        multiply_qk(s, descriptor(q + 32 * i, 0, 1024, SWIZZLE_128), descriptor(k + 32 * i, 0, 1024, SWIZZLE_128),
                    accumulate + i > 0);
    multiply_qk(s, descriptor(q_rest, 0, 256, SWIZZLE_32), descriptor(k + K_REST, 0, 256, SWIZZLE_32), 1);
}

// The small GEMMs first: a tensor core truncates where it adds to a large sum.
__device__ __forceinline__ void scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) {
    wgmma_fence();
    score(s, q + Q_PART, q_rest + Q_PART, k, 0);
    score(s, q, q_rest, k + K_PART, 1);
    score(s, q, q_rest, k, 1);
    wgmma_commit();
}

__device__ __forceinline__ void mix(float (&part)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v,
                                    int accumulate) {
    #pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(part, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                    descriptor(v + 2048 * i, 128 * KEYS, 1024, SWIZZLE_128), accumulate + i > 0);
}

// A tile's share of the output, summed by itself.
__device__ __forceinline__ void output(float (&part)[HEAD / 2], const unsigned (&high)[KEYS / 4],
                                       const unsigned (&low)[KEYS / 4], unsigned v) {
    wgmma_fence();
    mix(part, low, v, 0);
    mix(part, high, v + V_PART, 1);
    mix(part, high, v, 1);
    wgmma_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
split_attention(const __grid_constant__ TensorMap main, const __grid_constant__ TensorMap rest,
                unsigned short *__restrict__ out, int samples, int tokens, int heads, int items, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Shared at((unsigned)__cvta_generic_to_shared(shared));
    const int blocks = (tokens + QUERIES - 1) / QUERIES, tiles = (tokens + KEYS - 1) / KEYS;
    int turn = 0, tile = 0;  // of queries and of keys so far

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 128 * WARPGROUPS)
            produce(at, main, rest, main, rest, blocks, tiles, heads, heads, samples, items, turn, tile);
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
        const unsigned q = at.q_tiles + buffer * Q_BYTES + warpgroup * 8192;
        const unsigned q_rest = at.q_tiles + buffer * Q_BYTES + Q_REST + warpgroup * 2048;
        const int query = block * QUERIES + warpgroup * 64 + warp % 4 * 16 + lane / 4;
        wait(at.q_full + 8 * buffer, turn / Q_BUFFERS % 2);
        if (block * QUERIES + warpgroup * 64 >= tokens) {
            at.release(buffer, tile, tiles, lane);
            continue;
        }
        #pragma unroll
        for (int i = 0; i < HEAD / 2; i++) o[i] = 0;

        int stage = tile % STAGES, parity = tile / STAGES % 2;
        wait(at.k_full + 8 * stage, parity);
        scores(s, q, q_rest, at.k_tiles + stage * K_BYTES);
        wgmma_wait();
        fence_registers(s);
        if (lane == 0) arrive(at.k_empty + 8 * stage);
        softmax.weigh<true>(s, factor, scale, tokens, column);
        pack(s, high, low);
        for (int i = 1; i < tiles; i++) {
            // This tile's scores are issued first, then the previous tile's p·v, which runs during this tile's softmax.
            const int next = (tile + i) % STAGES, next_parity = (tile + i) / STAGES % 2;
            wait(at.k_full + 8 * next, next_parity);
            wait(at.v_full + 8 * stage, parity);
            scores(s, q, q_rest, at.k_tiles + next * K_BYTES);
            output(part, high, low, at.v_tiles + stage * V_BYTES);
            wgmma_wait_but_last();
            fence_registers(s);
            if (lane == 0) arrive(at.k_empty + 8 * next);
            const bool rescale = softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column);
            wgmma_wait();
            fence_registers(part);
            if (lane == 0) arrive(at.v_empty + 8 * stage);
            #pragma unroll
            for (int j = 0; j < HEAD / 2; j++) o[j] += part[j];
            if (rescale) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            pack(s, high, low);
            stage = next, parity = next_parity;
        }
        if (lane == 0) arrive(at.q_empty + 8 * buffer);
        wait(at.v_full + 8 * stage, parity);
        output(part, high, low, at.v_tiles + stage * V_BYTES);
        wgmma_wait();
        fence_registers(part);
        if (lane == 0) arrive(at.v_empty + 8 * stage);
        #pragma unroll
        for (int j = 0; j < HEAD / 2; j++) o[j] += part[j];
        tile += tiles;

        #pragma unroll
        for (int row = 0; row < 2; row++) {
            const int token = query + 8 * row;
            const float sum = over_row(softmax.sum[row], false), inverse = 1 / sum;
            if (token >= tokens) continue;
            const long long line = ((long long)sample * tokens + token) * heads + head;
            unsigned *to = reinterpret_cast<unsigned *>(out + line * HEAD + column);
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
