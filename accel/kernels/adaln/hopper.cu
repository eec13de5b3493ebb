// The fused adaLN kernel for few tokens on Hopper: a warp computes a token, a block eight.
//
// With few tokens a launch costs as much as its work. This kernel is set up while the GEMM before it still runs, and
// lets the next one be set up while it runs itself (programmatic dependent launch). Blocks ask for so much shared
// memory that they spread over all multiprocessors: small ones, set up early, would gather on those that are free
// first.
//
// Defined before this text: WIDTH (of a token), BRANCHES (0 to 2), UPDATE (1: the sum is written back), WIDE (1: the
// result is float32), EPS, and round_pair and widen in the dtype of branches and result.

constexpr int VECTORS = WIDTH / 128;  // of four columns, a lane's share of a token

__device__ __forceinline__ float over_warp(float x) {
    #pragma unroll
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

__device__ __forceinline__ void add(float4 &total, float4 gate, uint2 branch) {
    float b[4];
    widen(branch.x, b[0], b[1]);
    widen(branch.y, b[2], b[3]);
    total.x = fmaf(gate.x, b[0], total.x), total.y = fmaf(gate.y, b[1], total.y);
    total.z = fmaf(gate.z, b[2], total.z), total.w = fmaf(gate.w, b[3], total.w);
}

extern "C" __global__ void __launch_bounds__(256, 2)
adaln(float4 *__restrict__ x, const uint2 *__restrict__ first, const uint2 *__restrict__ second,
      void *__restrict__ out, const float4 *__restrict__ table, const long long *__restrict__ entry,
      long long entry_stride, int rows, int tokens, int shift, int scale, int gate1, int gate2) {
    start_next();
    await_previous();
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const int at = row * (WIDTH / 4) + lane;
    float4 total[VECTORS];
    uint2 one[VECTORS], other[VECTORS];
    #pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        total[i] = x[at + 32 * i];
        if (BRANCHES > 0) one[i] = first[at + 32 * i];
        if (BRANCHES > 1) other[i] = second[at + 32 * i];
    }
    const float4 *vectors = table + entry[row / tokens] * (entry_stride / 4) + lane;
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (BRANCHES > 0) add(total[i], vectors[gate1 * (WIDTH / 4) + 32 * i], one[i]);
        if (BRANCHES > 1) add(total[i], vectors[gate2 * (WIDTH / 4) + 32 * i], other[i]);
        if (UPDATE) x[at + 32 * i] = total[i];
        sum += total[i].x + total[i].y + (total[i].z + total[i].w);
    }
    const float mean = over_warp(sum) / WIDTH;
    float square = 0;
    #pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float4 &t = total[i];
        t.x -= mean, t.y -= mean, t.z -= mean, t.w -= mean;
        square += t.x * t.x + t.y * t.y + (t.z * t.z + t.w * t.w);
    }
    const float scaling = rsqrtf(over_warp(square) / WIDTH + EPS);
    #pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const float4 s = vectors[scale * (WIDTH / 4) + 32 * i], b = vectors[shift * (WIDTH / 4) + 32 * i], t = total[i];
        const float4 y = make_float4(fmaf(t.x * scaling, 1 + s.x, b.x), fmaf(t.y * scaling, 1 + s.y, b.y),
                                     fmaf(t.z * scaling, 1 + s.z, b.z), fmaf(t.w * scaling, 1 + s.w, b.w));
        if (WIDE) static_cast<float4 *>(out)[at + 32 * i] = y;
        else static_cast<uint2 *>(out)[at + 32 * i] = make_uint2(round_pair(y.x, y.y), round_pair(y.z, y.w));
    }
}
