// Device code shared by the kernels for Hopper: barriers, warpgroup MMA (wgmma), conversions, dependent launch.
// The macro HALF is "f16" or "bf16".

struct alignas(64) TensorMap { unsigned char opaque[128]; };

__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
                 "@!done bra again; }" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_but_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// Prevent the compiler from moving reads of these registers above this point: it assumes that an issued wgmma is done.
template <int N> __device__ __forceinline__ void fence_registers(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

// TMA's swizzle modes, as encoded in wgmma descriptors.
constexpr unsigned long long SWIZZLE_128 = 1ull << 62, SWIZZLE_32 = 3ull << 62;

__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading, unsigned stride,
                                                         unsigned long long swizzle) {
    return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(leading >> 4) << 16 |
           (unsigned long long)(stride >> 4) << 32 | swizzle;
}

// Convert two floats to two halves in a register.
__device__ __forceinline__ unsigned round_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Convert two float16 in a register to two floats.
__device__ __forceinline__ void widen(unsigned pair, float &low, float &high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high) : "r"(pair));
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 = x/(1 + exp(−2√(2/π)·(x + 0.044715·x³)))
__device__ __forceinline__ float gelu(float x) {
    const float square = x * x;
    // −2√(2/π)/ln 2, times 0.044715 and times 1
    return __fdividef(x, 1 + exp2_approx(x * fmaf(-0.1029432397f, square, -2.302208198f)));
}

// Programmatic dependent launch. After start_next the stream's next kernel may start. await_previous waits until the
// previous kernel has finished and its writes are visible. Every block calls it, so that earlier kernels are done too.
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Map an address in this block's shared memory to the same address in another block of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned address, int block) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}
