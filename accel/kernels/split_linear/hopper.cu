// y = x·Wᵀ + b on Hopper with float32 accuracy: each operand is a pair of float16, (high + low) · a power of two.
//
//     x·w ≈ low·high + high·low + high·high        (low·low is below float32's last bit)
//
// A tensor core truncates towards zero when it adds to its accumulator, so the error of a sum grows with its length. An
// accumulator is therefore used for one stage of DEPTH only, with the small GEMMs first, and is then added to the sum
// with float32 rounding. One warpgroup (the producer) loads, and each of the other warpgroups (the consumers) computes 64
// rows. While one adds and stores, another multiplies.
//
// bias has `period` rows; row r of x uses its row r % period. Macros defined before this file: ROWS, COLUMNS, DEPTH (of a
// tile), STAGES, PARTS (2, or 1 for high·high only, a GEMM in half precision), RESULT (0: float32; 1: high and low;
// 2: GELU, then high and low), REGISTERS and PRODUCER_REGISTERS (per thread). Function: multiply (wgmma,
// 64 × COLUMNS × 16).

constexpr int WARPGROUPS = ROWS / 64;
constexpr int THREADS = WARPGROUPS * 128 + 128;
constexpr int LINE = DEPTH * 2;  // bytes of a tile's row: 128, the width of TMA's swizzle
constexpr int A_LOW = ROWS * LINE, B_LOW = COLUMNS * LINE, STAGE = PARTS * (A_LOW + B_LOW);  // offsets of low parts
constexpr int HEADER = 1024;
constexpr float LARGEST = 65504;  // largest float16

__device__ __forceinline__ void load(unsigned to, const TensorMap &map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(0), "r"(barrier) : "memory");
}

// Issue one of a stage's three GEMMs.
__device__ __forceinline__ void issue(float (&part)[COLUMNS / 2], unsigned a, unsigned b, bool accumulate) {
    #pragma unroll
    for (int i = 0; i < DEPTH / 16; i++)
        multiply(part, descriptor(a + 32 * i, 0, 8 * LINE, SWIZZLE_128),
                 descriptor(b + 32 * i, 0, 8 * LINE, SWIZZLE_128), accumulate || i > 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
split_linear(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, void *__restrict__ out,
             const float *__restrict__ row_scale, const float *__restrict__ scale, const float *__restrict__ bias,
             const float *__restrict__ after, int *__restrict__ overflow, int rows, int columns, int depth,
             int period) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned full = base, empty = full + 8 * STAGES, stages = base + HEADER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0)
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(base + 8 * i, i < STAGES ? 1 : 4 * WARPGROUPS);
    fence_barriers();
    __syncthreads();

    const int across = (columns + COLUMNS - 1) / COLUMNS, tiles = (rows + ROWS - 1) / ROWS * across;
    const int steps = (depth + DEPTH - 1) / DEPTH;
    int turn = 0;  // number of stages so far, which determines buffer and parity

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (threadIdx.x != 128 * WARPGROUPS) return;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            // Concurrent blocks share rows of x, and the weights stay in the cache.
            const int row = tile / across * ROWS, column = tile % across * COLUMNS;
            for (int step = 0; step < steps; step++, turn++) {
                const int stage = turn % STAGES;
                wait(empty + 8 * stage, turn / STAGES % 2 ^ 1);
                arrive_and_expect(full + 8 * stage, STAGE);
                load(stages + stage * STAGE, a, step * DEPTH, row, full + 8 * stage);
                load(stages + stage * STAGE + PARTS * A_LOW, b, step * DEPTH, column, full + 8 * stage);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    const int warpgroup = warp / 4;
    float part[COLUMNS / 2], sum[COLUMNS / 2];
    bool beyond = false;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        #pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) sum[i] = 0;
        for (int step = 0; step < steps; step++, turn++) {
            const int stage = turn % STAGES;
            wait(full + 8 * stage, turn / STAGES % 2);
            const unsigned high = stages + stage * STAGE + warpgroup * 64 * LINE, low = high + A_LOW;
            const unsigned b_high = stages + stage * STAGE + PARTS * A_LOW, b_low = b_high + B_LOW;
            wgmma_fence();
            if (PARTS == 2) {
                issue(part, low, b_high, false);
                issue(part, high, b_low, true);
            }
            issue(part, high, b_high, PARTS == 2);
            wgmma_commit();
            wgmma_wait();
            fence_registers(part);
            if (lane == 0) arrive(empty + 8 * stage);
            #pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) sum[i] += part[i];
        }

        // W's rows are permuted within 32s (hopper.py): a lane's columns of four MMAs are adjacent in memory.
        const int first = tile % across * COLUMNS + lane % 4 * 8;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = tile / across * ROWS + warpgroup * 64 + warp % 4 * 16 + lane / 4 + 8 * half;
            if (row >= rows) continue;
            const float of_row = row_scale ? row_scale[row] : 1;
            const float *biases = bias + row % period * columns;  // for this row
            #pragma unroll
            for (int group = 0; group < COLUMNS / 32; group++) {
                const int column = first + 32 * group;
                if (column >= columns) continue;
                float y[8];
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float x = sum[16 * group + i / 2 * 4 + 2 * half + i % 2];
                    y[i] = fmaf(x, of_row * scale[column + i], biases[column + i]);
                    if (RESULT == 2) y[i] = gelu(y[i]) * after[column + i];
                    if (RESULT) beyond |= fabsf(y[i]) > LARGEST;
                }
                const long long at = (long long)row * columns + column;
                if (RESULT) {
                    unsigned high[4], low[4];
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float one, other;
                        high[i] = round_pair(y[2 * i], y[2 * i + 1]);
                        widen(high[i], one, other);
                        low[i] = round_pair(y[2 * i] - one, y[2 * i + 1] - other);
                    }
                    unsigned short *to = static_cast<unsigned short *>(out) + at;
                    *reinterpret_cast<uint4 *>(to) = make_uint4(high[0], high[1], high[2], high[3]);
                    to += (long long)rows * columns;
                    *reinterpret_cast<uint4 *>(to) = make_uint4(low[0], low[1], low[2], low[3]);
                } else {
                    float4 *to = reinterpret_cast<float4 *>(static_cast<float *>(out) + at);
                    to[0] = make_float4(y[0], y[1], y[2], y[3]);
                    to[1] = make_float4(y[4], y[5], y[6], y[7]);
                }
            }
        }
    }
    if (RESULT && beyond && overflow) *overflow = 1;
}
