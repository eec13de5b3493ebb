// y = x·Wᵀ + b, and GELU after it, on Hopper in half precision with float32 accumulation, for few tokens.
//
// With few tokens a GEMM is a wave or two of tiles. Tiles come in any eights of columns (XL's sides are multiples of
// 72), so that there are nearly as many as multiprocessors. Blocks of a cluster lie one below the other: each loads a
// share of the weights and multicasts it to all. One warpgroup loads (the producer), the others compute (the
// consumers). The compiler must know the warp's number to be one value for a warp, or every wgmma waits for its
// operands' addresses. Weights do not depend on the kernel before: their first tiles are loaded while that still runs
// (programmatic dependent launch).
//
// Defined before this text: ROWS, COLUMNS (of a block's tile), STAGES (tiles of operands held), WARPGROUPS (consumers,
// which share the tile's rows), CLUSTER (blocks that share columns), CHUNK (columns of one store), ALONE (1: a block
// computes one tile), GELU, REGISTERS and PRODUCER_REGISTERS (of a thread), multiply (wgmma, 64 × COLUMNS × 16), and
// round_pair and widen in the kernel's dtype.

constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int HEIGHT = ROWS / 64 / WARPGROUPS;  // of a warpgroup's part of the tile, in 64s of rows
constexpr int DEPTH = 64, LINE = 128;           // of a stage; its bytes, over which TMA swizzles
constexpr int A_BYTES = ROWS * LINE, B_BYTES = COLUMNS * LINE, STAGE = A_BYTES + B_BYTES;
constexpr int BIAS = 1024, STAGES_AT = BIAS + (2 * WARPGROUPS * COLUMNS * 2 + 1023) / 1024 * 1024;
constexpr int CHUNKS = COLUMNS / CHUNK, CHUNK_BYTES = 16 * CHUNK * 2;  // a warp stores 16 rows at a time

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

__device__ __forceinline__ void store(const TensorMap &map, int column, int row, unsigned from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"(&map), "r"(column), "r"(row), "r"(from) : "memory");
}

// Registers go from the producer to the consumers. A single consumer warpgroup has all that a thread can have.
template <bool MORE, int COUNT> __device__ __forceinline__ void move_registers() {
    if (WARPGROUPS == 1) return;
    if (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// Stores 16 rows × CHUNK columns of one warp by way of shared memory. value(j, i): register i of the j-th eight
// columns, as wgmma leaves them.
template <class Value>
__device__ __forceinline__ void finish(const Value &value, unsigned to, const unsigned *bias, const TensorMap &out,
                                       int column, int row, int lane) {
    const int line = lane % 16;  // stmatrix takes an address from each lane: a row, and which eight columns of a pair
    #pragma unroll
    for (int j = 0; j < CHUNK / 8; j += 2) {
        unsigned pairs[4];
        #pragma unroll
        for (int side = 0; side < 2; side++) {
            if (j + side >= CHUNK / 8) break;
            float low, high;
            widen(bias[4 * (j + side) + lane % 4], low, high);
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float y0 = value(j + side, 2 * half) + low, y1 = value(j + side, 2 * half + 1) + high;
                if (GELU) y0 = gelu(y0), y1 = gelu(y1);
                pairs[2 * side + half] = round_pair(y0, y1);
            }
        }
        const int eight = j + lane / 16;
        const unsigned address = to + line * CHUNK * 2 + (CHUNK == 64 ? eight ^ line % 8 : eight) * 16;
        if (j + 1 < CHUNK / 8)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         :: "r"(address), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
        else
            asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                         :: "r"(address), "r"(pairs[0]), "r"(pairs[1]) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
        store(out, column, row, to);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
linear(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
       const __grid_constant__ TensorMap b_less, const __grid_constant__ TensorMap out,
       const unsigned short *__restrict__ bias, int rows, int columns, int depth) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned full = base, empty = full + 8 * STAGES, stages = base + STAGES_AT;
    const unsigned results = ALONE ? stages : stages + STAGES * STAGE;  // ALONE: over operands that are used up
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == CONSUMERS) prefetch(a), prefetch(b), prefetch(out);
    if (threadIdx.x == 0)
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(base + 8 * i, i < STAGES ? 1 : 4 * WARPGROUPS * CLUSTER);
    fence_barriers();
    if (CLUSTER > 1) {  // the others write to this block's memory and barriers
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else __syncthreads();
    start_next();

    const int rank = blockIdx.x % CLUSTER, across = (columns + COLUMNS - 1) / COLUMNS;
    const int tiles = (rows + ROWS * CLUSTER - 1) / (ROWS * CLUSTER) * across;  // of a whole cluster
    const int steps = (depth + DEPTH - 1) / DEPTH;
    int stage = 0, parity = 0;

    if (warp >= 4 * WARPGROUPS) {
        move_registers<false, PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) {
            constexpr int EIGHTS = COLUMNS / 8;  // of the weights' lines; the blocks of a cluster share them out
            const int first = EIGHTS * rank / CLUSTER, count = EIGHTS * (rank + 1) / CLUSTER - first;
            const TensorMap &b_map = count == (EIGHTS + CLUSTER - 1) / CLUSTER ? b : b_less;

            auto load_a = [&](int tile, int step, int stage) {
                load(stages + stage * STAGE, a, step * DEPTH, (tile / across * CLUSTER + rank) * ROWS,
                     full + 8 * stage);
            };
            auto load_b = [&](int tile, int step, int stage) {
                const unsigned to = stages + stage * STAGE + A_BYTES + first * 8 * LINE;
                const int row = tile % across * COLUMNS + first * 8;
                if (CLUSTER > 1) multicast(to, b_map, step * DEPTH, row, full + 8 * stage);
                else load(to, b_map, step * DEPTH, row, full + 8 * stage);
            };

            int tile = blockIdx.x / CLUSTER, step = min(STAGES, steps);
            for (int i = 0; i < step; i++) {
                arrive_and_expect(full + 8 * i, STAGE);
                load_b(tile, i, i);
            }
            await_previous();  // before x is read; consumers wait for x before they write results
            for (int i = 0; i < step; i++) load_a(tile, i, i);
            stage = step % STAGES, parity = step / STAGES;
            for (; tile < tiles; tile += gridDim.x / CLUSTER, step = 0)
                for (; step < steps; step++) {
                    wait(empty + 8 * stage, parity ^ 1);
                    arrive_and_expect(full + 8 * stage, STAGE);
                    load_a(tile, step, stage);
                    load_b(tile, step, stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            if (CLUSTER > 1)  // stay until the others have released every stage
                for (int i = 0; i < STAGES; i++) {
                    wait(empty + 8 * stage, parity ^ 1);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
        }
    } else {
        move_registers<true, REGISTERS>();
        const int warpgroup = warp / 4;
        // All blocks of the cluster load into a stage of this one and must know that it is free: lane i signals the
        // i-th.
        const unsigned empty_there = CLUSTER > 1 && lane < CLUSTER ? in_block(empty, lane) : empty;
        auto release = [&](int stage) {
            if (CLUSTER > 1) {
                if (lane < CLUSTER)
                    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
                                 :: "r"(empty_there + 8 * stage) : "memory");
            } else if (lane == 0) arrive(empty + 8 * stage);
        };

        // Descriptors count in 16 bytes.
        const auto first_a = descriptor(stages + warpgroup * 64 * HEIGHT * LINE, 0, 8 * LINE, SWIZZLE_128);
        const auto first_b = descriptor(stages + A_BYTES, 0, 8 * LINE, SWIZZLE_128);
        float sum[HEIGHT][COLUMNS / 2];
        for (int tile = blockIdx.x / CLUSTER, turn = 0; tile < tiles; tile += gridDim.x / CLUSTER, turn++) {
            const int row = (tile / across * CLUSTER + rank) * ROWS + warpgroup * 64 * HEIGHT + warp % 4 * 16;
            const int column = tile % across * COLUMNS;
            unsigned short *biases =
                reinterpret_cast<unsigned short *>(shared + BIAS) + (turn % 2 * WARPGROUPS + warpgroup) * COLUMNS;
            for (int i = threadIdx.x % 128; i < COLUMNS; i += 128)
                biases[i] = column + i < columns ? bias[column + i] : 0;
            asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");

            // One stage's MMAs run while the next one's are issued; the stage before it is free only then.
            auto issue = [&](int stage, int accumulate) {
                const unsigned long long a = first_a + stage * (STAGE / 16), b = first_b + stage * (STAGE / 16);
                #pragma unroll
                for (int i = 0; i < DEPTH / 16; i++)
                    #pragma unroll
                    for (int m = 0; m < HEIGHT; m++)
                        multiply(sum[m], a + m * (64 * LINE / 16) + 2 * i, b + 2 * i, accumulate || i);
                wgmma_commit();
            };
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
            wgmma_wait();
            #pragma unroll
            for (int m = 0; m < HEIGHT; m++) fence_registers(sum[m]);
            release(last);

            if (ALONE) {  // wait until no warp reads operands any more
                asm volatile("bar.sync 15, %0;" :: "n"(CONSUMERS) : "memory");
            } else {  // wait until the last tile's results are stored
                if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                __syncwarp();
            }
            unsigned to = results + warp * HEIGHT * CHUNKS * CHUNK_BYTES;
            #pragma unroll
            for (int m = 0; m < HEIGHT; m++)
                #pragma unroll
                for (int c = 0; c < CHUNKS; c++, to += CHUNK_BYTES)
                    finish([&](int j, int i) { return sum[m][(c * CHUNK / 8 + j) * 4 + i]; }, to,
                           reinterpret_cast<const unsigned *>(biases) + c * CHUNK / 2, out, column + c * CHUNK,
                           row + 64 * m, lane);
        }
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}
