// y = x·Wᵀ + b at float32 accuracy on Hopper's tensor cores: both operands are two float16 terms, value = (high + low) · a power of two.
//
//     x·w ≈ low·high + high·low + high·high        (low·low is below float32's last bit)
//
// A tensor core truncates where it adds to its accumulator, always towards zero, so that the error of one long sum grows with its length. Here
// an accumulator lives for PROMOTE stages of DEPTH only, the small products go first, when it is small, and it is then added to the sum with
// float32's own rounding. One warpgroup copies; the others compute 64 rows each, and what one adds and stores meanwhile, the others multiply.
//
// Given before this text: ROWS, COLUMNS, DEPTH (of a tile), STAGES, PROMOTE, RESULT (0: float32; 1: two terms; 2: GELU, two terms), REGISTERS
// and COPY_REGISTERS (of a computing and a copying thread), multiply (wgmma, 64 × COLUMNS × 16), round_pair and widen.

constexpr int WARPGROUPS = ROWS / 64;
constexpr int THREADS = WARPGROUPS * 128 + 128;
constexpr int LINE = DEPTH * 2;                                       // bytes of a tile's row: what the copy engine swizzles over
constexpr int A_TERM = ROWS * LINE, B_TERM = COLUMNS * LINE, STAGE = 2 * (A_TERM + B_TERM);
constexpr int HEADER = 1024;
constexpr unsigned long long SWIZZLE = LINE == 128 ? SWIZZLE_128 : SWIZZLE_64;
constexpr float LARGEST = 65504;  // of float16

__device__ __forceinline__ void copy(unsigned to, const TensorMap &map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(0), "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
split_linear(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, void *__restrict__ out, const float *__restrict__ row_scale,
             const float *__restrict__ scale, const float *__restrict__ bias, const float *__restrict__ after, int *__restrict__ overflow,
             int rows, int columns, int depth) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned full = base, empty = full + 8 * STAGES, stages = base + HEADER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0)
        for (int i = 0; i < 2 * STAGES; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(base + 8 * i), "r"(i < STAGES ? 1 : 4 * WARPGROUPS) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();

    const int across = (columns + COLUMNS - 1) / COLUMNS, tiles = (rows + ROWS - 1) / ROWS * across, steps = (depth + DEPTH - 1) / DEPTH;
    int turn = 0;  // stages met so far: they give buffer and parity

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COPY_REGISTERS));
        if (threadIdx.x != 128 * WARPGROUPS) return;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int row = tile / across * ROWS, column = tile % across * COLUMNS;  // blocks at work share rows: weights stay in the cache
            for (int step = 0; step < steps; step++, turn++) {
                const int stage = turn % STAGES;
                wait(empty + 8 * stage, turn / STAGES % 2 ^ 1);
                arrive_and_expect(full + 8 * stage, STAGE);
                copy(stages + stage * STAGE, a, step * DEPTH, row, full + 8 * stage);
                copy(stages + stage * STAGE + 2 * A_TERM, b, step * DEPTH, column, full + 8 * stage);
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
        for (int step = 0; step < steps; step += PROMOTE) {
            #pragma unroll
            for (int inner = 0; inner < PROMOTE; inner++) {
                if (PROMOTE > 1 && step + inner >= steps) break;
                const int stage = turn % STAGES;
                wait(full + 8 * stage, turn / STAGES % 2);
                const unsigned high = stages + stage * STAGE + warpgroup * 64 * LINE, low = high + A_TERM;
                const unsigned b_high = stages + stage * STAGE + 2 * A_TERM, b_low = b_high + B_TERM;
                begin_products();
                #pragma unroll
                for (int i = 0; i < DEPTH / 16; i++)
                    multiply(part, descriptor(low + 32 * i, 0, 8 * LINE, SWIZZLE), descriptor(b_high + 32 * i, 0, 8 * LINE, SWIZZLE), inner + i > 0);
                #pragma unroll
                for (int i = 0; i < DEPTH / 16; i++)
                    multiply(part, descriptor(high + 32 * i, 0, 8 * LINE, SWIZZLE), descriptor(b_low + 32 * i, 0, 8 * LINE, SWIZZLE), 1);
                #pragma unroll
                for (int i = 0; i < DEPTH / 16; i++)
                    multiply(part, descriptor(high + 32 * i, 0, 8 * LINE, SWIZZLE), descriptor(b_high + 32 * i, 0, 8 * LINE, SWIZZLE), 1);
                commit_products();
                finish_products();
                settle(part);
                if (lane == 0) arrive(empty + 8 * stage);
                turn++;
            }
            #pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) sum[i] += part[i];
        }

        // Rows of W come permuted within 32s (split_hopper.py), so that a lane's columns of four products lie side by side in memory.
        const int first = tile % across * COLUMNS + lane % 4 * 8;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = tile / across * ROWS + warpgroup * 64 + warp % 4 * 16 + lane / 4 + 8 * half;
            if (row >= rows) continue;
            const float of_row = row_scale ? row_scale[row] : 1;
            #pragma unroll
            for (int group = 0; group < COLUMNS / 32; group++) {
                const int column = first + 32 * group;
                if (column >= columns) continue;
                float y[8];
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    y[i] = fmaf(sum[16 * group + i / 2 * 4 + 2 * half + i % 2], of_row * scale[column + i], bias[column + i]);
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
                    unsigned short *to = static_cast<unsigned short *>(out);
                    *reinterpret_cast<uint4 *>(to + at) = make_uint4(high[0], high[1], high[2], high[3]);
                    *reinterpret_cast<uint4 *>(to + (long long)rows * columns + at) = make_uint4(low[0], low[1], low[2], low[3]);
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
