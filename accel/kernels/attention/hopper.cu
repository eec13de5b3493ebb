// Attention in half precision with float32 accumulation (hopper.cuh), of the packed projection (N, T, 3, H, d), or
// of its queries with separate keys and values (N, T', 2, H, d).

struct Half {
    static constexpr int LIFT = 0;
    unsigned p[KEYS / 4];  // softmax's weights

    __device__ __forceinline__ void pack(const float (&s)[KEYS / 2]) {
        #pragma unroll
        for (int i = 0; i < KEYS / 4; i++) p[i] = round_pair(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) const {
        multiply_scores(s, q, q_rest, k, 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void output(float (&o)[HEAD / 2], unsigned v) const {
        multiply_values(o, p, v, 1);
        wgmma_commit();
    }

    __device__ __forceinline__ void fence(float (&o)[HEAD / 2]) const { fence_registers(o); }
    __device__ __forceinline__ void add(float (&)[HEAD / 2]) const {}  // the MMAs accumulate into the output

    __device__ __forceinline__ static void store(unsigned *to, long long, float x, float y) { *to = round_pair(x, y); }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(const __grid_constant__ TensorMap q_main, const __grid_constant__ TensorMap q_rest,
          const __grid_constant__ TensorMap main, const __grid_constant__ TensorMap rest,
          unsigned short *__restrict__ out, int queries, int tokens, int heads, int first_key, int items, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // The shuffle tells the compiler that the value is uniform in a warp, so that it computes addresses in advance, in
    // uniform registers.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Shared at((unsigned)__cvta_generic_to_shared(shared));
    start_next();
    attend<Half>(at, warp, lane, q_main, q_rest, main, rest, out, queries, tokens, heads, first_key, 0, items, scale);
}
