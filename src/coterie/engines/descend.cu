// All τ steps of one client (and start) in one thread block: what descent.py's `descend` does in the dual form, for a
// model that ends in a `Head` (head.cu). There, each step passes every client's z through the GPU's memory some fifteen
// times; here a client's z never leaves its multiprocessor. Each thread has a column of z; only the logits need all.

struct Shared {
    float z[N][HP];
    float head[C][HP];       // V
    float total[N][HP];      // -B/γ: the sum of the gradients at z
    float kernel[N][NP];     // XXᵀ + 1
    float at_out[N][CP];     // the gradient at the logits
    float parts[PARTS][N][CP];
    float bias[CP];
    float loss[N];
};

// From the gradient at the logits to that at a column of z; the column's part of the head takes its step.
__device__ void turn(Shared &s, int j, float lr, float prox, const float *head_0, float (&down)[NP]) {
    float v[C], at_v[C] = {};
#pragma unroll
    for (int c = 0; c < C; c++) v[c] = s.head[c][j];
#pragma unroll
    for (int i = 0; i < N; i++) {
        down[i] = at_column(s, i, j, v, at_v) - prox * lr * s.total[i][j];
        s.total[i][j] += down[i];
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
        if (prox != 0.f) at_v[c] += prox * (v[c] - head_0[c * H + j]);
        s.head[c][j] = v[c] - lr * at_v[c];
    }
}

// γ · kernel · down, taken off a column of z.
__device__ void pull(Shared &s, int j, float lr, const float (&down)[NP]) {
#pragma unroll 4
    for (int i = 0; i < N; i++) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < NP / 4; k++) {
            const float4 w = reinterpret_cast<const float4 *>(s.kernel[i])[k];
            sum += w.x * down[4 * k] + w.y * down[4 * k + 1] + w.z * down[4 * k + 2] + w.w * down[4 * k + 3];
        }
        s.z[i][j] -= lr * sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) descend(
    const float *z, const float *kernel, const long long *y, const float *share, const float *head_0,
    const float *bias_0, const float *rate, double mu, int tau, int starts, float *moved, float *head, float *bias,
    float *loss) {
    extern __shared__ char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const long long b = blockIdx.x, client = b / starts;
    const float lr = *rate, prox = mu;
    z += b * N * H, moved += b * N * H, kernel += client * N * N, y += client * N, share += client * N;
    head_0 += b * C * H, head += b * C * H, bias_0 += b * C, bias += b * C;

    for (int at = threadIdx.x; at < N * HP; at += THREADS) {
        s.z[at / HP][at % HP] = at % HP < H ? z[at / HP * H + at % HP] : 0.f;
        s.total[at / HP][at % HP] = 0.f;
    }
    for (int at = threadIdx.x; at < N * NP; at += THREADS)
        s.kernel[at / NP][at % NP] = at % NP < N ? kernel[at / NP * N + at % NP] : 0.f;
    for (int at = threadIdx.x; at < C * HP; at += THREADS)
        s.head[at / HP][at % HP] = at % HP < H ? head_0[at / HP * H + at % HP] : 0.f;
    if (threadIdx.x < C) s.bias[threadIdx.x] = bias_0[threadIdx.x];
    __syncthreads();

    for (int q = 0; q < tau; q++) {
        multiply_head(s);
        __syncthreads();
        compare(s, N, y, share);
        __syncthreads();
        if (q == 0 && threadIdx.x == 0) {
            float sum = 0.f;
            for (int i = 0; i < N; i++) sum += s.loss[i];
            loss[b] = sum;
        }
        if (threadIdx.x < C) {
            float sum = 0.f;
            for (int i = 0; i < N; i++) sum += s.at_out[i][threadIdx.x];
            const float own = s.bias[threadIdx.x];
            s.bias[threadIdx.x] = own - lr * (sum + prox * (own - bias_0[threadIdx.x]));
        }
        if (threadIdx.x < H) {
            float down[NP] = {};
            turn(s, threadIdx.x, lr, prox, head_0, down);
            if (q < tau - 1) pull(s, threadIdx.x, lr, down);
        }
        __syncthreads();
    }
    for (int at = threadIdx.x; at < N * H; at += THREADS) moved[at] = -lr * s.total[at / H][at % H];
    for (int at = threadIdx.x; at < C * H; at += THREADS) head[at] = s.head[at / H][at % H];
    if (threadIdx.x < C) bias[threadIdx.x] = s.bias[threadIdx.x];
}
