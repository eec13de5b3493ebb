// What every kernel for Hopper here is made of: barriers, warpgroup products, descriptors of tiles in shared memory.

struct alignas(64) TensorMap { unsigned char opaque[128]; };

__device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
                 :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

__device__ __forceinline__ void await_all_but_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// Nothing that reads these registers may move above this point: to the compiler a product is done when it is issued.
template <int N> __device__ __forceinline__ void settle(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

// Swizzles of the copy engine as the products' descriptors name them.
constexpr unsigned long long SWIZZLE_128 = 1ull << 62, SWIZZLE_64 = 2ull << 62, SWIZZLE_32 = 3ull << 62;

__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading, unsigned stride, unsigned long long swizzle) {
    return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 | swizzle;
}

__device__ __forceinline__ float exp2_unit(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void arrive_and_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 = x/(1 + exp(−2√(2/π)·(x + 0.044715·x³)))
__device__ __forceinline__ float gelu(float x) {
    const float square = x * x;
    return __fdividef(x, 1 + exp2_unit(x * fmaf(-0.1029432397f, square, -2.302208198f)));  // −2√(2/π)/ln 2 times 0.044715 and 1
}

// Programmatic dependent launch: the next kernel of the stream may be set up from here on; the previous one, whole, and its memory are awaited
// here. Every block awaits, so that kernels that lie further back are done as well.
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ unsigned in_block(unsigned address, int block) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

constexpr float GROWTH = 8;  // a maximum may fall behind by 2⁸ before the sums are rescaled: exact, since it cancels, and seldom

// A quarter of a row's scores sit in each of four neighbouring lanes.
__device__ __forceinline__ float over_row(float x, bool maximum) {
    float y = __shfl_xor_sync(~0u, x, 1);
    x = maximum ? fmaxf(x, y) : x + y;
    y = __shfl_xor_sync(~0u, x, 2);
    return maximum ? fmaxf(x, y) : x + y;
}

// Of a tile of TILE keys, in attention; weights are 2^LIFT times as large.
template <int TILE, int LIFT> struct Softmax {
    float top[2], sum[2];  // per row: the maximum in use, this lane's share of the sum

    // Scores → weights 2^(scale · (score − top)), in place. Returns whether the sums must be scaled by `factor`; the same for a whole warp.
    template <bool FIRST> __device__ __forceinline__ bool weigh(float (&s)[TILE / 2], float (&factor)[2], float scale, int inside, int column) {
        if (inside < TILE) {  // the last tile's end
            #pragma unroll
            for (int i = 0; i < TILE / 2; i++)
                if (i / 4 * 8 + column + i % 2 >= inside) s[i] = __int_as_float(0xff800000);
        }
        float high[2];  // of what this lane holds
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            high[row] = fmaxf(s[2 * row], s[2 * row + 1]);
            #pragma unroll
            for (int i = 4; i < TILE / 2; i += 4) high[row] = fmaxf(high[row], fmaxf(s[i + 2 * row], s[i + 2 * row + 1]));
        }
        // A row's lanes agree on its maximum only when it is to change: a step that seldom waits for its neighbours.
        const bool rescale = !FIRST && __any_sync(~0u, (high[0] - top[0]) * scale > GROWTH || (high[1] - top[1]) * scale > GROWTH);
        if (FIRST) {
            top[0] = over_row(high[0], true), top[1] = over_row(high[1], true);
            sum[0] = sum[1] = 0;
        } else if (rescale) {
            #pragma unroll
            for (int row = 0; row < 2; row++) {
                high[row] = fmaxf(over_row(high[row], true), top[row]);
                factor[row] = exp2_unit((top[row] - high[row]) * scale);
                top[row] = high[row];
                sum[row] *= factor[row];
            }
        }
        const float offset[2] = {top[0] * scale - LIFT, top[1] * scale - LIFT};
        #pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int row = i / 2 % 2;
            const float x = fmaf(s[i], scale, -offset[row]);
            s[i] = exp2_unit(x);
            sum[row] += s[i];
        }
        return rescale;
    }
};
