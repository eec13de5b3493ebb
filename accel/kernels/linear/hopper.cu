// A GEMM y = x·Wᵀ + b on Hopper in half precision with float32 accumulation. An epilogue computes the next operation of
// the network on the accumulators:
//
//     SILU        silu(y)
//     SWIGLU      silu(y₁)·y₂; W consists of two matrices, stacked
//     ROTATE      y consists of queries, keys and values; rotate queries and keys by their token's position
//     MODULATE    t·r·(1 + y₁) + y₂ of the residual stream t, r = 1/√(mean(t²) + ε); W as for SWIGLU
//     RESIDUAL    t ← t + gate·y; also returns the sum of t² over each row of a tile, for MODULATE
//
// One warpgroup (the producer) loads, and the other warpgroups (the consumers) compute. Tiles are processed in bands of
// GROUP rows of tiles, column by column, so that concurrent blocks share operands in the cache. The blocks of a cluster
// compute tiles in the same columns; each loads a part of the weights and multicasts it to the cluster. PINGPONG: each
// consumer computes separate tiles, and runs its epilogue while the other one multiplies; if 0, the consumers share the
// rows of a tile. Weights do not depend on the previous kernel, so their first tiles are loaded while it still runs
// (programmatic dependent launch). The compiler must know that the warp index is uniform in a warp; if it does not,
// every wgmma waits for the addresses of its operands.
//
// If W consists of two matrices, a tile has COLUMNS/2 rows of each, so that a thread has both numbers of a result.
//
// Additional operands of an epilogue: while the GEMM's operands are loaded, other loads take microseconds. So a second
// thread of the producer loads stream and gates by TMA, 32 columns at a time, into separate SLOTS, while the other
// consumer multiplies. Rotation angles are the same in all tiles of a block; they are stored in shared memory as float16.
//
// Macros defined before this file: HEIGHT (rows of a consumer's part of a tile, divided by 64), COLUMNS (of W, per tile),
// STAGES (buffers for tiles of operands), SLOTS, WARPGROUPS (number of consumers), PINGPONG, CLUSTER (blocks per cluster),
// EPILOGUE, HEAD (head dim for ROTATE, else 0), BFLOAT16, REGISTERS and PRODUCER_REGISTERS (per thread). Function:
// multiply (wgmma, 64 × COLUMNS × 16).

constexpr int SILU = 0, SWIGLU = 1, ROTATE = 2, MODULATE = 3, RESIDUAL = 4;  // EPILOGUE
constexpr bool TWO = EPILOGUE == SWIGLU || EPILOGUE == MODULATE;             // W consists of two matrices
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int ROWS = 64 * HEIGHT * (PINGPONG ? 1 : WARPGROUPS);  // per tile
constexpr int RESULTS = TWO ? COLUMNS / 2 : COLUMNS;             // result columns per tile
constexpr int DEPTH = 64, LINE = 128;                            // columns of a stage; bytes per row, the width of TMA's swizzle
constexpr int A_BYTES = ROWS * LINE, B_BYTES = COLUMNS * LINE, STAGE = A_BYTES + B_BYTES;
constexpr int BIAS = 1024, STAGES_AT = BIAS + (2 * WARPGROUPS * COLUMNS * 4 + 1023) / 1024 * 1024;
// A slot has 32 columns of the stream, then 32 of the gates.
constexpr int GATES_AT = ROWS * 128, SLOT = GATES_AT + (EPILOGUE == RESIDUAL ? ROWS * 64 : 0);
constexpr bool BESIDE = EPILOGUE == MODULATE || EPILOGUE == RESIDUAL;
constexpr int SLOTS_AT = STAGES_AT + STAGES * STAGE;
constexpr int TABLE_AT = SLOTS_AT;
constexpr int TABLE_LINE = HEAD / 2 + (36 - HEAD / 2 % 32) % 32;  // words per row; eight rows use different banks
constexpr int GROUP = 8;  // number of cluster tiles per band
static_assert(COLUMNS % 16 == 0 && RESULTS % 32 == 0 && CLUSTER <= 2 && WARPGROUPS > 1, "as the code below has it");

__device__ __forceinline__ void load(unsigned to, const TensorMap &map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void multicast(unsigned to, const TensorMap &map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
                 : "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

__device__ __forceinline__ float to_float(unsigned short half) {
    if (BFLOAT16) return __uint_as_float((unsigned)half << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

// Like round_pair, but always to float16.
__device__ __forceinline__ unsigned round_float16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1 + exp2_approx(-1.4426950409f * x)); }

// Transpose words among four neighbouring lanes: lane i gets the i-th word of each lane.
__device__ __forceinline__ void transpose(unsigned (&word)[4], int lane) {
    #pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        const bool upper = lane & distance;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & distance) continue;
            unsigned &low = word[i], &high = word[i | distance];
            const unsigned received = __shfl_xor_sync(~0u, upper ? low : high, distance);
            if (upper) low = received;
            else high = received;
        }
    }
}

// Position of a tile: its row in units of a block's tiles, its column in units of RESULTS.
struct Place {
    int row, column;

    __device__ __forceinline__ Place(int tile, int down, int across, int rank) {
        const int band = tile / (GROUP * across) * GROUP, height = min(GROUP, down - band);
        const int inside = tile % (GROUP * across);
        row = (band + inside % height) * CLUSTER + rank;
        column = inside / height;
    }
};

// Load a float that the previous kernel has written. It may still have been running when this kernel started, so the load
// must not use the read-only cache, which the compiler would choose.
__device__ __forceinline__ float load_float(const float *from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ float2 read_pair(unsigned from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ unsigned read_word(unsigned from) {
    unsigned x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// Sum over the four lanes that share a row.
__device__ __forceinline__ float over_lanes(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
linear(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
       const __grid_constant__ TensorMap old_stream, const __grid_constant__ TensorMap gates,
       unsigned short *__restrict__ out, const unsigned short *__restrict__ bias, const float2 *__restrict__ rotation,
       float *__restrict__ stream, float *__restrict__ squares, int rows, int columns, int depth, int tokens,
       int first_token, int parts, float eps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned full = base, empty = full + 8 * STAGES, stages = base + STAGES_AT;
    const unsigned slot_full = empty + 8 * STAGES, slot_empty = slot_full + 8 * SLOTS;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == CONSUMERS) prefetch(a), prefetch(b);
    constexpr int WARPS = 4 * (PINGPONG ? 1 : WARPGROUPS);  // number that read a stage or a slot
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(base + 8 * i, i < STAGES ? 1 : WARPS * CLUSTER);
        for (int i = 0; i < 2 * SLOTS; i++) init_barrier(slot_full + 8 * i, i < SLOTS ? 1 : WARPS);
    }
    fence_barriers();
    if (CLUSTER > 1) {  // other blocks write to this block's memory and barriers
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else __syncthreads();
    start_next();

    // columns: number of result columns.
    const int rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
    const int across = (columns + RESULTS - 1) / RESULTS, down = (rows + ROWS * CLUSTER - 1) / (ROWS * CLUSTER);
    const int tiles = down * across, steps = (depth + DEPTH - 1) / DEPTH;
    int stage = 0, parity = 0;

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (threadIdx.x == CONSUMERS) {
            const int second = TWO ? columns : COLUMNS / 2;  // offset from a tile's first half of W's rows to its second
            auto load_a = [&](const Place &at, int step, int stage) {
                load(stages + stage * STAGE, a, step * DEPTH, at.row * ROWS, full + 8 * stage);
            };
            auto load_b = [&](const Place &at, int step, int stage) {
                const unsigned to = stages + stage * STAGE + A_BYTES;
                const int row = at.column * RESULTS;
                if (CLUSTER > 1)
                    multicast(to + rank * B_BYTES / 2, b, step * DEPTH, row + rank * second, full + 8 * stage);
                else {
                    load(to, b, step * DEPTH, row, full + 8 * stage);
                    load(to + B_BYTES / 2, b, step * DEPTH, row + second, full + 8 * stage);
                }
            };

            const Place start(cluster, down, across, rank);
            int step = min(STAGES, steps);
            for (int i = 0; i < step; i++) {
                arrive_and_expect(full + 8 * i, STAGE);
                load_b(start, i, i);
            }
            await_previous();  // before reading x; consumers wait for x before they write results
            for (int i = 0; i < step; i++) load_a(start, i, i);
            stage = step % STAGES, parity = step / STAGES;
            for (int tile = cluster; tile < tiles; tile += clusters, step = 0) {
                const Place at(tile, down, across, rank);
                for (; step < steps; step++) {
                    wait(empty + 8 * stage, parity ^ 1);
                    arrive_and_expect(full + 8 * stage, STAGE);
                    load_a(at, step, stage);
                    load_b(at, step, stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
            if (CLUSTER > 1)  // do not exit before all blocks have released every stage
                for (int i = 0; i < STAGES; i++) {
                    wait(empty + 8 * stage, parity ^ 1);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
        }
        if (BESIDE && threadIdx.x == CONSUMERS + 32) {
            await_previous();
            int slot = 0, slot_parity = 0;
            for (int tile = cluster; tile < tiles; tile += clusters) {
                const Place at(tile, down, across, rank);
                for (int group = 0; group < RESULTS / 32; group++) {
                    const unsigned to = base + SLOTS_AT + slot * SLOT, barrier = slot_full + 8 * slot;
                    const int column = at.column * RESULTS + 32 * group, row = at.row * ROWS;
                    wait(slot_empty + 8 * slot, slot_parity ^ 1);
                    arrive_and_expect(barrier, SLOT);
                    load(to, old_stream, column, row, barrier);
                    if (EPILOGUE == RESIDUAL) load(to + GATES_AT, gates, column, row, barrier);
                    if (++slot == SLOTS) slot = 0, slot_parity ^= 1;
                }
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    const int warpgroup = warp / 4;
    // All blocks of the cluster load into this block's stages and must know when one is free: lane i signals block i.
    const unsigned empty_there = CLUSTER > 1 && lane < CLUSTER ? in_block(empty, lane) : empty;
    auto release = [&](int stage) {
        if (CLUSTER > 1) {
            if (lane < CLUSTER)
                asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(empty_there + 8 * stage) : "memory");
        } else if (lane == 0) arrive(empty + 8 * stage);
    };

    // Descriptors have units of 16 bytes.
    const int part = PINGPONG ? 0 : warpgroup * 64 * HEIGHT;  // of the tile's rows
    const auto first_a = descriptor(stages + part * LINE, 0, 8 * LINE, SWIZZLE_128);
    const auto first_b = descriptor(stages + A_BYTES, 0, 8 * LINE, SWIZZLE_128);
    float sum[HEIGHT][COLUMNS / 2];
    int slot = 0, slot_parity = 0;
    auto skip = [&](int tiles) {  // skip the stages and slots of other consumers' tiles
        stage += tiles * steps;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
        if (!BESIDE) return;
        slot += tiles * (RESULTS / 32);
        slot_parity ^= slot / SLOTS & 1;
        slot %= SLOTS;
    };
    // Consumers alternate between MMAs and epilogues. Without that, a consumer could fall two fillings of a stage or slot
    // behind, and a barrier's parity cannot distinguish those.
    constexpr int TURNS = PINGPONG ? WARPGROUPS : 1, MULTIPLY = 4, FINISH = 6;  // barrier indices
    auto await_turn = [&](int to_do) { asm volatile("bar.sync %0, 256;" :: "r"(to_do + warpgroup) : "memory"); };
    auto pass_turn = [&](int to_do) { asm volatile("bar.arrive %0, 256;" :: "r"(to_do + 1 - warpgroup) : "memory"); };
    if (PINGPONG) {
        skip(warpgroup);
        if (warpgroup == 1) {
            pass_turn(MULTIPLY);
            if (BESIDE) pass_turn(FINISH);
        }
    }
    if (EPILOGUE == MODULATE) await_previous();  // it wrote the sums of squares
    if (EPILOGUE == ROTATE) {  // all tiles of a block have the same positions
        unsigned *table = reinterpret_cast<unsigned *>(shared + TABLE_AT);
        constexpr int PAIRS = HEAD > 0 ? HEAD / 2 : 1;
        #pragma unroll 8
        for (int i = threadIdx.x; i < ROWS * PAIRS; i += CONSUMERS) {
            const int row = i / PAIRS, position = first_token + (rank * ROWS + row) % tokens;
            const float2 angle = __ldg(rotation + position * PAIRS + i % PAIRS);
            table[row * TABLE_LINE + i % PAIRS] = round_float16(angle.x, angle.y);
        }
        asm volatile("bar.sync 3, %0;" :: "n"(CONSUMERS) : "memory");
    }
    // A thread's part of a tile's biases, loaded one tile in advance.
    constexpr int SHARE = (COLUMNS + 127) / 128;
    unsigned short fetched[SHARE];
    auto fetch = [&](int tile) {
        if (tile >= tiles) return;
        const int column = Place(tile, down, across, rank).column * RESULTS;
        #pragma unroll
        for (int j = 0; j < SHARE; j++) {
            const int i = threadIdx.x % 128 + 128 * j, inside = column + i % RESULTS;
            fetched[j] = i < COLUMNS && inside < columns ? __ldg(bias + i / RESULTS * columns + inside) : 0;
        }
    };
    const int first_tile = cluster + (PINGPONG ? warpgroup * clusters : 0);
    fetch(first_tile);
    for (int tile = first_tile, turn = 0; tile < tiles; tile += TURNS * clusters, turn ^= 1) {
        const Place at(tile, down, across, rank);
        const int column = at.column * RESULTS;
        float *biases = reinterpret_cast<float *>(shared + BIAS) + (turn * WARPGROUPS + warpgroup) * COLUMNS;
        #pragma unroll
        for (int j = 0; j < SHARE; j++)
            if (threadIdx.x % 128 + 128 * j < COLUMNS) biases[threadIdx.x % 128 + 128 * j] = to_float(fetched[j]);
        fetch(tile + TURNS * clusters);
        // A lane has columns 2c and 2c + 1 of every eight, c = lane % 4, in two rows of each 64 that are 8 apart.
        const int top = part + warp % 4 * 16 + lane / 4, pair = lane % 4 * 2;  // of the tile's rows
        auto row_of = [&](int i) { return at.row * ROWS + top + i / 2 * 64 + i % 2 * 8; };
        float factor[2 * HEIGHT];  // per row: r, or the sum of t²
        #pragma unroll
        for (int i = 0; i < 2 * HEIGHT; i++) factor[i] = 0;
        if (EPILOGUE == MODULATE) {
            for (int first = lane % 4; first < parts; first += 32) {  // eight of a row are loaded at once
                float shares[2 * HEIGHT][8];
                #pragma unroll
                for (int i = 0; i < 2 * HEIGHT; i++)
                    #pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float *share = squares + (long long)(first + 4 * j) * rows + row_of(i);
                        shares[i][j] = first + 4 * j < parts && row_of(i) < rows ? load_float(share) : 0;
                    }
                #pragma unroll
                for (int i = 0; i < 2 * HEIGHT; i++)
                    #pragma unroll
                    for (int j = 0; j < 8; j++) factor[i] += shares[i][j];
            }
            #pragma unroll
            for (int i = 0; i < 2 * HEIGHT; i++) factor[i] = rsqrtf(over_lanes(factor[i]) / columns + eps);
        }
        asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");

        // MMAs of the next stage are issued while those of one stage run; the stage is released after that.
        auto issue = [&](int stage, int accumulate) {
            const unsigned long long a = first_a + stage * (STAGE / 16), b = first_b + stage * (STAGE / 16);
            #pragma unroll
            for (int i = 0; i < DEPTH / 16; i++)
                #pragma unroll
                for (int m = 0; m < HEIGHT; m++)
                    multiply(sum[m], a + m * (64 * LINE / 16) + 2 * i, b + 2 * i, accumulate || i);
            wgmma_commit();
        };
        if (PINGPONG) await_turn(MULTIPLY);
        wait(full + 8 * stage, parity);
        wgmma_fence();
        issue(stage, 0);
        int last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
        for (int step = 1; step < steps; step++) {
            wait(full + 8 * stage, parity);
            wgmma_fence();
            issue(stage, 1);
            wgmma_wait_but_last();
            release(last);
            last = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        const bool others_turn = PINGPONG && tile + clusters < tiles;
        if (others_turn) pass_turn(MULTIPLY);
        wgmma_wait();
        #pragma unroll
        for (int m = 0; m < HEIGHT; m++) fence_registers(sum[m]);
        release(last);

        if (PINGPONG && BESIDE) await_turn(FINISH);
        #pragma unroll
        for (int group = 0; group < RESULTS / 32; group++) {
            // TMA has swizzled the 16-byte units of a slot's rows.
            const unsigned in_slot = base + SLOTS_AT + slot * SLOT + top * 128;
            const unsigned in_gates = base + SLOTS_AT + slot * SLOT + GATES_AT + top * 64;
            if (BESIDE) wait(slot_full + 8 * slot, slot_parity);
            #pragma unroll
            for (int m = 0; m < HEIGHT; m++) {
                unsigned word[2][4];
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int number = 4 * group + i, eight = column + 8 * number;
                    const float2 *of_eight = reinterpret_cast<const float2 *>(biases + 8 * number + pair);
                    const float2 bias = of_eight[0], other_bias = TWO ? of_eight[RESULTS / 2] : bias;
                    #pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int line = top + 64 * m + 8 * half;
                        const int place = 4 * number + 2 * half;
                        float2 y = make_float2(sum[m][place] + bias.x, sum[m][place + 1] + bias.y), z = y, t = y;
                        if (TWO) z = make_float2(sum[m][RESULTS / 2 + place] + other_bias.x,
                                                 sum[m][RESULTS / 2 + place + 1] + other_bias.y);
                        if (BESIDE)
                            t = read_pair(in_slot + (64 * m + 8 * half) * 128 +
                                          ((2 * i + pair / 4) ^ lane / 4) * 16 + pair % 4 * 4);
                        if (EPILOGUE == SILU) y = make_float2(silu(y.x), silu(y.y));
                        if (EPILOGUE == SWIGLU) y = make_float2(silu(y.x) * z.x, silu(y.y) * z.y);
                        if (EPILOGUE == ROTATE && eight < columns / 3 * 2) {  // q and k
                            const unsigned *angles = reinterpret_cast<const unsigned *>(shared + TABLE_AT) +
                                                     line * TABLE_LINE + eight % (HEAD + !HEAD) / 2 + lane % 4;
                            float cosine, sine;
                            widen(*angles, cosine, sine);
                            y = make_float2(y.x * cosine - y.y * sine, y.x * sine + y.y * cosine);
                        }
                        if (EPILOGUE == MODULATE) {
                            const float r = factor[2 * m + half];
                            y = make_float2(fmaf(t.x * r, 1 + y.x, z.x), fmaf(t.y * r, 1 + y.y, z.y));
                        }
                        if (EPILOGUE == RESIDUAL) {
                            const unsigned both = read_word(in_gates + (64 * m + 8 * half) * 64 +
                                                            (i ^ lane / 8) * 16 + 2 * pair);
                            t.x = fmaf(to_float((unsigned short)both), y.x, t.x);
                            t.y = fmaf(to_float((unsigned short)(both >> 16)), y.y, t.y);
                            const int row = at.row * ROWS + line;
                            if (row < rows && eight < columns) {
                                *reinterpret_cast<float2 *>(stream + (long long)row * columns + eight + pair) = t;
                                factor[2 * m + half] += t.x * t.x + t.y * t.y;
                            }
                        }
                        word[half][i] = round_pair(y.x, y.y);
                    }
                }
                if (EPILOGUE == RESIDUAL) continue;
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = row_of(2 * m + half), to = column + 32 * group + 8 * (lane % 4);
                    auto store = [&](unsigned (&words)[4], unsigned short *plane) {
                        transpose(words, lane);
                        if (row < rows && to < columns)
                            *reinterpret_cast<uint4 *>(plane + (long long)row * columns + to) =
                                make_uint4(words[0], words[1], words[2], words[3]);
                    };
                    store(word[half], out);
                }
            }
            if (BESIDE) {
                __syncwarp();
                if (lane == 0) arrive(slot_empty + 8 * slot);
                if (++slot == SLOTS) slot = 0, slot_parity ^= 1;
            }
        }
        if (BESIDE && others_turn) pass_turn(FINISH);
        if (EPILOGUE == RESIDUAL) {
            #pragma unroll
            for (int i = 0; i < 2 * HEIGHT; i++) {
                const float total = over_lanes(factor[i]);
                if (lane % 4 == 0 && row_of(i) < rows) squares[(long long)at.column * rows + row_of(i)] = total;
            }
        }
        if (PINGPONG) skip(WARPGROUPS - 1);
    }
}
