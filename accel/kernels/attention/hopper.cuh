// softmax(q·kᵀ/√d)·v on Hopper (sm_90a), shared by half precision (hopper.cu) and high/low splits
// (split_attention/hopper.cu).
//
// wgmma takes the inner dimension in 16s and the columns in 8s: d = 72 costs 80 in q·kᵀ and exactly 72 in p·v. TMA
// loads a tile in two parts, 64 columns and the remaining ones, and fills elements outside the head or the sample with
// zeros. One warpgroup (the producer) loads, and the other warpgroups (the consumers) compute. A block is persistent: it
// computes 64 · WARPGROUPS queries of one head after another, and loads run ahead across heads. While one warpgroup
// computes exponentials, another one uses the tensor cores.
//
// Macros defined before this file: HEAD (d), PARTS (1 for half precision and 2 for a high/low split, whose parts are planes of
// the packed tensor: samples 0 to N - 1 high, N to 2N - 1 low), KEYS (keys per tile), WARPGROUPS (number of consumers),
// STAGES (buffers for tiles of keys and values), Q_BUFFERS (buffers for tiles of queries), BLOCKS (per multiprocessor),
// PIPELINED (1: a warpgroup computes the weights of a tile during p·v of the previous tile, which needs more registers),
// REGISTERS and PRODUCER_REGISTERS (per thread). Functions: multiply_qk and multiply_pv (wgmma).

constexpr int QUERIES = 64 * WARPGROUPS;
constexpr int BOX = 32;                                     // tokens per load
constexpr int Q_REST = QUERIES * 128, K_REST = KEYS * 128;  // offset of columns 64 and up; rows of 128 and 32 bytes
constexpr int Q_PART = QUERIES * 160, K_PART = KEYS * 160, V_PART = KEYS * 256;
constexpr int Q_BYTES = PARTS * Q_PART, K_BYTES = PARTS * K_PART, V_BYTES = PARTS * V_PART;
constexpr int HEADER = 1024;
constexpr int THREADS = WARPGROUPS * 128 + 128;  // one thread loads, but setmaxnreg needs a warpgroup

// Addresses in shared memory: a full and an empty barrier per tile, then the tiles.
struct Shared {
    unsigned q_full, q_empty, k_full, k_empty, v_full, v_empty, q_tiles, k_tiles, v_tiles;

    __device__ __forceinline__ Shared(unsigned base) {
        q_full = base, q_empty = q_full + 8 * Q_BUFFERS;
        k_full = q_empty + 8 * Q_BUFFERS, k_empty = k_full + 8 * STAGES;
        v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
        q_tiles = base + HEADER, k_tiles = q_tiles + Q_BUFFERS * Q_BYTES, v_tiles = k_tiles + STAGES * K_BYTES;
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2 * Q_BUFFERS + 4 * STAGES; i++) {
                const bool empty = i >= Q_BUFFERS && i < 2 * Q_BUFFERS ||
                                   i >= 2 * Q_BUFFERS && (i - 2 * Q_BUFFERS) / STAGES % 2;
                init_barrier(base + 8 * i, empty ? 4 * WARPGROUPS : 1);
            }
        }
        fence_barriers();
        __syncthreads();
    }

    // A warpgroup without queries releases every tile.
    __device__ __forceinline__ void release(int buffer, int &tile, int tiles, int lane) const {
        if (lane == 0) arrive(q_empty + 8 * buffer);
        for (int i = 0; i < tiles; i++, tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2;
            wait(k_full + 8 * stage, parity);
            if (lane == 0) arrive(k_empty + 8 * stage);
            wait(v_full + 8 * stage, parity);
            if (lane == 0) arrive(v_empty + 8 * stage);
        }
    }
};

// Load a box of tokens of a head (columns, heads, tokens, samples) by TMA; the barrier counts its bytes.
__device__ __forceinline__ void load(unsigned to, const TensorMap &map, int column, int head, int token, int sample,
                                     unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(head), "r"(token), "r"(sample), "r"(barrier) : "memory");
}

// The producer's loop over a block's items. first_key: index of the first head of keys in its map. turn, tile: numbers of
// query and key tiles so far, which determine buffer and parity.
__device__ __forceinline__ void produce(const Shared &at, const TensorMap &q_main, const TensorMap &q_rest,
                                        const TensorMap &main, const TensorMap &rest, int blocks, int tiles, int heads,
                                        int first_key, int samples, int items, int &turn, int &tile) {
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
        const int block = item % blocks, head = item / blocks % heads, sample = item / blocks / heads;
        const int buffer = turn % Q_BUFFERS;
        wait(at.q_empty + 8 * buffer, turn / Q_BUFFERS % 2 ^ 1);
        arrive_and_expect(at.q_full + 8 * buffer, Q_BYTES);
        for (int part = 0; part < PARTS; part++)
            for (int row = 0; row < QUERIES; row += BOX) {
                const unsigned to = at.q_tiles + buffer * Q_BYTES + part * Q_PART;
                const int token = block * QUERIES + row, plane = sample + part * samples;
                load(to + row * 128, q_main, 0, head, token, plane, at.q_full + 8 * buffer);
                load(to + Q_REST + row * 32, q_rest, 64, head, token, plane, at.q_full + 8 * buffer);
            }
        for (int i = 0; i < tiles; i++, tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2 ^ 1;
            wait(at.k_empty + 8 * stage, parity);
            arrive_and_expect(at.k_full + 8 * stage, K_BYTES);
            for (int part = 0; part < PARTS; part++)
                for (int row = 0; row < KEYS; row += BOX) {
                    const unsigned to = at.k_tiles + stage * K_BYTES + part * K_PART;
                    const int token = i * KEYS + row, plane = sample + part * samples;
                    load(to + row * 128, main, 0, first_key + head, token, plane, at.k_full + 8 * stage);
                    load(to + K_REST + row * 32, rest, 64, first_key + head, token, plane, at.k_full + 8 * stage);
                }
            wait(at.v_empty + 8 * stage, parity);
            arrive_and_expect(at.v_full + 8 * stage, V_BYTES);
            for (int part = 0; part < PARTS; part++)
                for (int row = 0; row < KEYS; row += BOX) {
                    const unsigned to = at.v_tiles + stage * V_BYTES + part * V_PART;
                    const int token = i * KEYS + row, plane = sample + part * samples;
                    load(to + row * 128, main, 0, first_key + heads + head, token, plane, at.v_full + 8 * stage);
                    load(to + (KEYS + row) * 128, main, 64, first_key + heads + head, token, plane,
                         at.v_full + 8 * stage);
                }
        }
    }
}

// Sums are rescaled only when a row's maximum has grown by 2⁸. The result does not change, because the factor cancels.
constexpr float GROWTH = 8;

// Each of four neighbouring lanes has a quarter of a row's scores.
__device__ __forceinline__ float over_row(float x, bool maximum) {
    float y = __shfl_xor_sync(~0u, x, 1);
    x = maximum ? fmaxf(x, y) : x + y;
    y = __shfl_xor_sync(~0u, x, 2);
    return maximum ? fmaxf(x, y) : x + y;
}

// Online softmax over tiles of keys. Weights are scaled by 2^LIFT.
template <int LIFT> struct Softmax {
    float top[2], sum[2];  // per row: the current maximum, and this lane's part of the sum

    // Scores → weights 2^(scale · (score − top)), in place. Returns whether the sums must be multiplied by `factor`,
    // uniformly for a warp.
    template <bool FIRST>
    __device__ __forceinline__ bool weigh(float (&s)[KEYS / 2], float (&factor)[2], float scale, int inside,
                                          int column) {
        if (inside < KEYS) {  // the last tile has fewer keys
            #pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                if (i / 4 * 8 + column + i % 2 >= inside) s[i] = __int_as_float(0xff800000);
        }
        float high[2];  // maxima of this lane's scores
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            high[row] = fmaxf(s[2 * row], s[2 * row + 1]);
            #pragma unroll
            for (int i = 4; i < KEYS / 2; i += 4)
                high[row] = fmaxf(high[row], fmaxf(s[i + 2 * row], s[i + 2 * row + 1]));
        }
        // The lanes of a row exchange their maxima only if the current one must change, which is rare.
        const bool rescale = !FIRST && __any_sync(~0u, (high[0] - top[0]) * scale > GROWTH ||
                                                       (high[1] - top[1]) * scale > GROWTH);
        if (FIRST) {
            top[0] = over_row(high[0], true), top[1] = over_row(high[1], true);
            sum[0] = sum[1] = 0;
        } else if (rescale) {
            #pragma unroll
            for (int row = 0; row < 2; row++) {
                high[row] = fmaxf(over_row(high[row], true), top[row]);
                factor[row] = exp2_approx((top[row] - high[row]) * scale);
                top[row] = high[row];
                sum[row] *= factor[row];
            }
        }
        const float offset[2] = {top[0] * scale - LIFT, top[1] * scale - LIFT};
        #pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            const int row = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scale, -offset[row]));
            sum[row] += s[i];
        }
        return rescale;
    }
};

// Compute the scores of a tile with one GEMM.
__device__ __forceinline__ void multiply_scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k,
                                                int accumulate) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        multiply_qk(s, descriptor(q + 32 * i, 0, 1024, SWIZZLE_128), descriptor(k + 32 * i, 0, 1024, SWIZZLE_128),
                    accumulate + i > 0);
    multiply_qk(s, descriptor(q_rest, 0, 256, SWIZZLE_32), descriptor(k + K_REST, 0, 256, SWIZZLE_32), 1);
}

// Compute p·v of a tile with one GEMM.
__device__ __forceinline__ void multiply_values(float (&o)[HEAD / 2], const unsigned (&p)[KEYS / 4], unsigned v,
                                                int accumulate) {
    #pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        multiply_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                    descriptor(v + 2048 * i, 128 * KEYS, 1024, SWIZZLE_128), accumulate + i > 0);
}

// The kernel's body. Arithmetic contains the weights of a tile, which `pack` computes from scores. `scores` and `output`
// issue MMAs. Reads of output's result must come after `fence`. `add` adds it to the sum if the MMAs did not.
template <class Arithmetic>
__device__ __forceinline__ void attend(const Shared &at, int warp, int lane, const TensorMap &q_main,
                                       const TensorMap &q_rest_map, const TensorMap &main, const TensorMap &rest,
                                       unsigned short *out, int queries, int tokens, int heads, int first_key,
                                       int samples, int items, float scale) {
    const int blocks = (queries + QUERIES - 1) / QUERIES, tiles = (tokens + KEYS - 1) / KEYS;
    int tile = 0, turn = 0;  // numbers of key and query tiles so far

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 128 * WARPGROUPS)
            produce(at, q_main, q_rest_map, main, rest, blocks, tiles, heads, first_key, samples, items, turn, tile);
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    const int warpgroup = warp / 4, column = lane % 4 * 2;
    float s[KEYS / 2], o[HEAD / 2], factor[2];
    Arithmetic arithmetic;
    Softmax<Arithmetic::LIFT> softmax;
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
        const auto compute_scores = [&] {
            wait(at.k_full + 8 * stage, parity);
            wgmma_fence();
            arithmetic.scores(s, q, q_rest, at.k_tiles + stage * K_BYTES);
            wgmma_wait();
            fence_registers(s);
            if (lane == 0) arrive(at.k_empty + 8 * stage);
        };
        const auto compute_output = [&] {
            wait(at.v_full + 8 * stage, parity);
            wgmma_fence();
            arithmetic.output(o, at.v_tiles + stage * V_BYTES);
            wgmma_wait();
            arithmetic.fence(o);
            if (lane == 0) arrive(at.v_empty + 8 * stage);
        };
        compute_scores();
        softmax.weigh<true>(s, factor, scale, tokens, column);
        arithmetic.pack(s);
        for (int i = 1; i < tiles; i++) {
#if PIPELINED
            // Issue this tile's scores first, then p·v of the previous tile, which runs during this tile's softmax.
            const int next = (tile + i) % STAGES;
            wait(at.v_full + 8 * stage, parity);
            wait(at.k_full + 8 * next, (tile + i) / STAGES % 2);
            wgmma_fence();
            arithmetic.scores(s, q, q_rest, at.k_tiles + next * K_BYTES);
            if (PARTS == 2) wgmma_fence();  // faster, measured
            arithmetic.output(o, at.v_tiles + stage * V_BYTES);
            wgmma_wait_but_last();
            fence_registers(s);
            if (lane == 0) arrive(at.k_empty + 8 * next);
            const bool rescale = softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column);
            wgmma_wait();
            arithmetic.fence(o);
            if (lane == 0) arrive(at.v_empty + 8 * stage);
            stage = next, parity = (tile + i) / STAGES % 2;
#else
            compute_output();
            stage = (tile + i) % STAGES, parity = (tile + i) / STAGES % 2;
            compute_scores();
            const bool rescale = softmax.weigh<false>(s, factor, scale, tokens - i * KEYS, column);
#endif
            arithmetic.add(o);
            if (rescale) {
                #pragma unroll
                for (int j = 0; j < HEAD / 2; j++) o[j] *= factor[j / 2 % 2];
            }
            arithmetic.pack(s);
        }
        if (lane == 0) arrive(at.q_empty + 8 * buffer);
        compute_output();
        arithmetic.add(o);
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
                Arithmetic::store(to + 4 * j, (long long)samples * queries * heads * (HEAD / 2),
                                  o[4 * j + 2 * row] * inverse, o[4 * j + 2 * row + 1] * inverse);
        }
    }
}
