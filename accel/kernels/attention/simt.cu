// Attention in float32 without tensor cores, for any GPU (simt.py launches it).
//
// A block computes ROWS queries of a head. It goes over the keys in tiles with an online softmax
// (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). Scores and
// outputs stay in registers.

#define STRIDE (HEAD + 4)         // an odd number of float4, so that rows start in other banks
#define QUADS (HEAD / 32)         // float4 of a thread's output columns
#define SINGLES (HEAD % 32 / 8)   // its other output columns
#define COLUMNS (HEAD / 8)

#define INFINITE __int_as_float(0x7f800000)

// Starts to copy a tile of `rows` rows to shared memory; rows from `count` on become zeros.
__device__ __forceinline__ void load(float* tile, const float* from, int stride, int first,
                                     int count, int rows) {
#pragma unroll 3
    for (int i = threadIdx.x; i < rows * (HEAD / 4); i += THREADS) {
        const int row = i / (HEAD / 4), column = i % (HEAD / 4) * 4;
        const bool inside = first + row < count;
        const float* source = from + (long long)(inside ? first + row : 0) * stride + column;
        float* target = tile + row * STRIDE + column;
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(target)),
                     "l"(source), "r"(inside ? 16 : 0));
#else
        *(float4*)target = inside ? *(const float4*)source : make_float4(0, 0, 0, 0);
#endif
    }
}

// Waits for this thread's copies, then for all threads.
__device__ __forceinline__ void loaded() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A thread has 8 rows, ty + 16i. Of the scores it has keys tx + 8j; the eight threads of a row are
// neighbours in a warp. q, k and v point to the first head; strides are in floats, per token.
extern "C" __global__ void __launch_bounds__(THREADS)
attention(const float* q, const float* k, const float* v, float* out, int queries, int keys,
          int heads, int q_stride, int kv_stride, float scale) {
    extern __shared__ float4 shared[];
    float* q_tile = (float*)shared;
    float* k_tile = q_tile + ROWS * STRIDE;
    float* v_tile = k_tile + KEYS * STRIDE;
    const int tx = threadIdx.x % 8, ty = threadIdx.x / 8;
    const int tiles = (queries + ROWS - 1) / ROWS;
    const int start = blockIdx.x % tiles * ROWS;
    const int head = blockIdx.x / tiles % heads;
    const long long sample = blockIdx.x / tiles / heads;
    q += sample * queries * q_stride + head * HEAD;
    k += sample * keys * kv_stride + head * HEAD;
    v += sample * keys * kv_stride + head * HEAD;
    float o[8][COLUMNS], top[8], sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        top[i] = -INFINITE;
        sum[i] = 0;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[i][c] = 0;
    }
    load(q_tile, q, q_stride, start, queries, ROWS);
    load(k_tile, k, kv_stride, 0, keys, KEYS);
    for (int first = 0; first < keys; first += KEYS) {
        loaded();  // and every thread has used v_tile
        load(v_tile, v, kv_stride, first, keys, KEYS);
        float s[8][8];
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) s[i][j] = 0;
#pragma unroll 2
        for (int d = 0; d < HEAD; d += 4) {
            float4 a[8];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = *(const float4*)(q_tile + (ty + 16 * i) * STRIDE + d);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float4 b = *(const float4*)(k_tile + (tx + 8 * j) * STRIDE + d);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    s[i][j] = fmaf(a[i].x, b.x, s[i][j]);
                    s[i][j] = fmaf(a[i].y, b.y, s[i][j]);
                    s[i][j] = fmaf(a[i].z, b.z, s[i][j]);
                    s[i][j] = fmaf(a[i].w, b.w, s[i][j]);
                }
            }
        }
        if (first + KEYS > keys)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (first + tx + 8 * j >= keys)
#pragma unroll
                    for (int i = 0; i < 8; i++) s[i][j] = -INFINITE;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float most = top[i];
#pragma unroll
            for (int j = 0; j < 8; j++) most = fmaxf(most, s[i][j]);
#pragma unroll
            for (int offset = 4; offset; offset /= 2)
                most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
            float shrink = power_of_2((top[i] - most) * scale);
            float total = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                s[i][j] = power_of_2((s[i][j] - most) * scale);
                total += s[i][j];
            }
            top[i] = most;
            sum[i] = fmaf(sum[i], shrink, total);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) o[i][c] *= shrink;
        }
        loaded();  // and every thread has used k_tile
        if (first + KEYS < keys) load(k_tile, k, kv_stride, first + KEYS, keys, KEYS);
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll 2
            for (int owner = 0; owner < 8; owner++) {
                const float* row = v_tile + (owner + 8 * j) * STRIDE;
                float b[COLUMNS];
#pragma unroll
                for (int g = 0; g < QUADS; g++) {
                    float4 quad = *(const float4*)(row + 32 * g + 4 * tx);
                    b[4 * g] = quad.x;
                    b[4 * g + 1] = quad.y;
                    b[4 * g + 2] = quad.z;
                    b[4 * g + 3] = quad.w;
                }
#pragma unroll
                for (int g = 0; g < SINGLES; g++) b[4 * QUADS + g] = row[32 * QUADS + 8 * g + tx];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float p = __shfl_sync(~0u, s[i][j], owner, 8);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) o[i][c] = fmaf(p, b[c], o[i][c]);
                }
            }
        }
    }
    out += sample * queries * heads * HEAD + head * HEAD;
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int offset = 4; offset; offset /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
        const int row = start + ty + 16 * i;
        if (row >= queries) continue;
        const float factor = 1 / sum[i];
        float* to = out + (long long)row * heads * HEAD;
#pragma unroll
        for (int g = 0; g < QUADS; g++)
            *(float4*)(to + 32 * g + 4 * tx) = make_float4(
                o[i][4 * g] * factor, o[i][4 * g + 1] * factor, o[i][4 * g + 2] * factor,
                o[i][4 * g + 3] * factor);
#pragma unroll
        for (int g = 0; g < SINGLES; g++)
            to[32 * QUADS + 8 * g + tx] = o[i][4 * QUADS + g] * factor;
    }
}
