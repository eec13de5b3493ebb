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

