// What comes after z in a model that ends in a `Head`, logits = V relu(z) + c under cross-entropy, for rows of z in shared
// memory. It is put before descend.cu and turn.cu, whose `Shared` it is told as S.
//
// Compiled for given sizes: N rows, H columns of z, C classes, PARTS in which a row of z is multiplied with the head, and
// THREADS, at least H.

#define UP4(n) (((n) + 3) / 4 * 4)
#define ODD4(n) (UP4(n) / 4 % 2 ? UP4(n) : UP4(n) + 4)  // a row length that spreads float4 columns over all banks
#define HP ODD4(H)
#define NP UP4(N)
#define CP UP4(C)

__device__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ float4 relu4(float4 a) {
    return make_float4(fmaxf(a.x, 0.f), fmaxf(a.y, 0.f), fmaxf(a.z, 0.f), fmaxf(a.w, 0.f));
}

// The part of the logits that comes from some columns of z.
template <typename S> __device__ void multiply_head(S &s) {
    const int wide = (HP / 4 + PARTS - 1) / PARTS;
    for (int item = threadIdx.x; item < N * PARTS; item += THREADS) {
        const int i = item % N, part = item / N, end = min((part + 1) * wide, HP / 4);
        float sum[C] = {};
        for (int j = part * wide; j < end; j++) {
            const float4 a = relu4(reinterpret_cast<const float4 *>(s.z[i])[j]);
#pragma unroll
            for (int c = 0; c < C; c++) sum[c] += dot4(a, reinterpret_cast<const float4 *>(s.head[c])[j]);
        }
#pragma unroll
        for (int c = 0; c < C; c++) s.parts[part][i][c] = sum[c];
    }
}

// Softmax of so many rows, less the label, times the row's share.
template <typename S> __device__ void compare(S &s, int rows, const long long *y, const float *share) {
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        float out[C], most = -3.402823e38f, all = 0.f, own = 0.f;
#pragma unroll
        for (int c = 0; c < C; c++) {
            out[c] = s.bias[c];
#pragma unroll
            for (int part = 0; part < PARTS; part++) out[c] += s.parts[part][i][c];
            most = fmaxf(most, out[c]);
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            own = c == y[i] ? out[c] - most : own;
            out[c] = expf(out[c] - most);
            all += out[c];
        }
#pragma unroll
        for (int c = 0; c < C; c++) s.at_out[i][c] = (out[c] / all - (c == y[i] ? 1.f : 0.f)) * share[i];
        s.loss[i] = (logf(all) - own) * share[i];
    }
}

// From the gradient at the logits of row i to that at its number in column j of z, whose part of the head is v; what the
// row adds to the gradient of v goes into at_v.
template <typename S>
__device__ float at_column(const S &s, int i, int j, const float (&v)[C], float (&at_v)[C]) {
    const float z = s.z[i][j], active = fmaxf(z, 0.f);
    float at_z = 0.f;
#pragma unroll
    for (int c = 0; c < C; c++) {
        const float at_out = s.at_out[i][c];
        at_z += at_out * v[c];
        at_v[c] += at_out * active;
    }
    return z > 0.f ? at_z : 0.f;
}
