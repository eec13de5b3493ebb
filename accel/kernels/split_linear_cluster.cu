// y = x·Wᵀ + b at float32 accuracy on Hopper's tensor cores: both operands are two float16 terms, value = (high + low) · a power of two.
//
//     x·w ≈ low·high + high·low + high·high        (low·low is below float32's last bit)
//
// A tensor core truncates where it adds to its accumulator, always towards zero, so that the error of one long sum grows with its length. Here
// an accumulator lives for PROMOTE stages of DEPTH only, the small products go first, when it is small, and it is then added to the sum with
// float32's own rounding. One warpgroup copies; the others compute 64 rows each, and what one adds and stores meanwhile, the others multiply.
//
// Given before this text: ROWS, COLUMNS, DEPTH (of a tile), STAGES, PROMOTE, RESULT (0: float32; 1: two terms; 2: GELU, two terms), and
// multiply (wgmma, 64 × COLUMNS × 16).

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

// To both blocks of a cluster, at the same place in each, counted by the barrier of each.
__device__ __forceinline__ void copy_to_both(unsigned to, const TensorMap &map, int column, int row, int term, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(term), "r"(barrier), "h"((unsigned short)3) : "memory");
}

__device__ __forceinline__ void arrive_at_both(unsigned barrier) {
    #pragma unroll
    for (int rank = 0; rank < 2; rank++)
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
                     :: "r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void wait_for_cluster(unsigned barrier, int parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; @!done bra again; }"
                 :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ unsigned round_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ void widen(unsigned pair, float &low, float &high) {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(low), "=f"(high) : "r"(pair));
}

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 = x/(1 + exp(−2√(2/π)·(x + 0.044715·x³)))
__device__ __forceinline__ float gelu(float x) {
    const float square = x * x;
    return __fdividef(x, 1 + exp2_unit(x * fmaf(-0.1029432397f, square, -2.302208198f)));  // −2√(2/π)/ln 2 times 0.044715 and 1
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
split_linear(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, void *__restrict__ out, const float *__restrict__ row_scale,
             const float *__restrict__ scale, const float *__restrict__ bias, const float *__restrict__ after, int *__restrict__ overflow,
             int rows, int columns, int depth) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned full = base, empty = full + 8 * STAGES, stages = base + HEADER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0)
        for (int i = 0; i < 2 * STAGES; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(base + 8 * i), "r"(i < STAGES ? 1 : 8 * WARPGROUPS) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    meet_cluster();

    // Two blocks take the same columns of two tiles of rows that follow each other: each copies half of the columns' weights to both.
    const int across = (columns + COLUMNS - 1) / COLUMNS, tiles = (rows + 2 * ROWS - 1) / (2 * ROWS) * across, steps = (depth + DEPTH - 1) / DEPTH;
    const int rank = blockIdx.x % 2;
    int turn = 0;  // stages met so far: they give buffer and parity

    if (warp >= 4 * WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 128 * WARPGROUPS)
        for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
            const int row = (tile / across * 2 + rank) * ROWS, column = tile % across * COLUMNS;  // blocks at work share rows: weights stay in the cache
            for (int step = 0; step < steps; step++, turn++) {
                const int stage = turn % STAGES;
                wait_for_cluster(empty + 8 * stage, turn / STAGES % 2 ^ 1);
                arrive_and_expect(full + 8 * stage, STAGE);
                copy(stages + stage * STAGE, a, step * DEPTH, row, full + 8 * stage);
                for (int term = 0; term < 2; term++)
                    copy_to_both(stages + stage * STAGE + 2 * A_TERM + term * B_TERM + rank * B_TERM / 2, b, step * DEPTH, column + rank * COLUMNS / 2, term,
                                 full + 8 * stage);
            }
        }
        __syncwarp();
        meet_cluster();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warpgroup = warp / 4;
    float part[COLUMNS / 2], sum[COLUMNS / 2];
    bool beyond = false;
    for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
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
                if (lane == 0) arrive_at_both(empty + 8 * stage);
                turn++;
            }
            #pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) sum[i] += part[i];
        }

        // Rows of W come permuted within 32s (split_hopper.py), so that a lane's columns of four products lie side by side in memory.
        const int first = tile % across * COLUMNS + lane % 4 * 8;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (tile / across * 2 + rank) * ROWS + warpgroup * 64 + warp % 4 * 16 + lane / 4 + 8 * half;
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
    meet_cluster();  // the other block may still write here
}
