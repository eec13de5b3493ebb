// Attention with float32 accuracy on pairs of float16: qkv (2, N, T, 3, H, d) → out (2, N, T, H, d).
//
// attention/hopper.cuh describes the algorithm. Each of its GEMMs is replaced with three: low·high, high·low, high·high.
// The small ones come first, because a tensor core truncates when it adds to a large sum. Scores are summed in one
// accumulator by 15 MMAs. p·v of a tile has a separate accumulator, which is then added to the output in float32.
// The weights of softmax are split in registers.

struct Split {
    static constexpr int LIFT = 6;  // weights are scaled by 2⁶, with GROWTH by 2¹⁴: float16 then holds small low parts
    unsigned high[KEYS / 4], low[KEYS / 4];  // softmax's weights
    float part[HEAD / 2];                    // p·v of a tile

    // High is truncated to float16, not rounded, so that its float32 value needs no conversion.
    __device__ __forceinline__ void pack(const float (&s)[KEYS / 2]) {
        #pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            const float one = __int_as_float(__float_as_int(s[2 * i]) & 0xFFFFE000);
            const float other = __int_as_float(__float_as_int(s[2 * i + 1]) & 0xFFFFE000);
            high[i] = round_pair(one, other);
            low[i] = round_pair(s[2 * i] - one, s[2 * i + 1] - other);
        }
    }

    __device__ __forceinline__ void scores(float (&s)[KEYS / 2], unsigned q, unsigned q_rest, unsigned k) const {
        multiply_scores(s, q + Q_PART, q_rest + Q_PART, k, 0);
        multiply_scores(s, q, q_rest, k + K_PART, 1);
        multiply_scores(s, q, q_rest, k, 1);
        wgmma_commit();
    }

    __device__ __forceinline__ void output(float (&)[HEAD / 2], unsigned v) {
        multiply_values(part, low, v, 0);
        multiply_values(part, high, v + V_PART, 1);
        multiply_values(part, high, v, 1);
        wgmma_commit();
    }

    __device__ __forceinline__ void fence(float (&)[HEAD / 2]) { fence_registers(part); }

    __device__ __forceinline__ void add(float (&o)[HEAD / 2]) const {
        #pragma unroll
        for (int i = 0; i < HEAD / 2; i++) o[i] += part[i];
    }

    __device__ __forceinline__ static void store(unsigned *to, long long low_plane, float x, float y) {
        const unsigned pair = round_pair(x, y);
        float one, other;
        widen(pair, one, other);
        to[0] = pair;
        to[low_plane] = round_pair(x - one, y - other);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
split_attention(const __grid_constant__ TensorMap main, const __grid_constant__ TensorMap rest,
                unsigned short *__restrict__ out, int samples, int tokens, int heads, int items, float scale) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Shared at((unsigned)__cvta_generic_to_shared(shared));
    attend<Split>(at, warp, lane, main, rest, main, rest, out, tokens, tokens, heads, heads, samples, items, scale);
}
