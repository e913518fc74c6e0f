// One step of one client (and start) in one thread block, but for the product with XXᵀ + 1, which takes z on: for clients
// with more rows than descend.cu has room for. z passes through shared memory N rows at a time, and so through the GPU's
// memory once. Each thread has a column of z; only the logits need all.

struct Shared {
    float z[N][HP];
    float head[C][HP];       // V
    float at_out[N][CP];     // the gradient at the logits
    float parts[PARTS][N][CP];
    float bias[CP];
    float loss[N];
};

// The gradient at z is added to total, and pull is -γ times the gradient. head and bias are written over.
extern "C" __global__ void __launch_bounds__(THREADS) turn(
    const float *__restrict__ z, const long long *y, const float *share, const float *rate, double mu, int rows,
    int starts, const float *head_0, const float *bias_0, float *__restrict__ total, float *__restrict__ pull,
    float *head, float *bias, float *loss) {
    extern __shared__ char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const long long b = blockIdx.x, client = b / starts;
    const int j = threadIdx.x;
    const float lr = *rate, prox = mu;
    z += b * rows * H, total += b * rows * H, pull += b * rows * H, y += client * rows, share += client * rows;
    head_0 += b * C * H, head += b * C * H, bias_0 += b * C, bias += b * C;

    for (int at = j; at < N * HP; at += THREADS) s.z[at / HP][at % HP] = 0.f;  // what is behind H stays so
    for (int at = j; at < C * HP; at += THREADS)
        s.head[at / HP][at % HP] = at % HP < H ? head[at / HP * H + at % HP] : 0.f;
    if (j < C) s.bias[j] = bias[j];
    __syncthreads();

    float v[C], at_v[C] = {}, at_bias = 0.f, sum = 0.f;
    if (j < H) {
#pragma unroll
        for (int c = 0; c < C; c++) v[c] = s.head[c][j];
    }
    for (int first = 0; first < rows; first += N) {
        const int some = min(N, rows - first);
        for (int at = j; at < some * H; at += THREADS) s.z[at / H][at % H] = z[first * H + at];
        __syncthreads();
        multiply_head(s);
        __syncthreads();
        compare(s, some, y + first, share + first);
        __syncthreads();
        if (j < C)
            for (int i = 0; i < some; i++) at_bias += s.at_out[i][j];
        if (j == 0)
            for (int i = 0; i < some; i++) sum += s.loss[i];
        if (j < H) {
#pragma unroll 4
            for (int i = 0; i < some; i++) s.z[i][j] = at_column(s, i, j, v, at_v);  // from here on the gradient
        }
        __syncthreads();
#pragma unroll 8
        for (int at = j; at < some * H; at += THREADS) {
            const float so_far = total[first * H + at], down = s.z[at / H][at % H] - prox * lr * so_far;
            total[first * H + at] = so_far + down;
            pull[first * H + at] = -lr * down;
        }
        __syncthreads();
    }
    if (j < H) {
#pragma unroll
        for (int c = 0; c < C; c++) head[c * H + j] = v[c] - lr * (at_v[c] + prox * (v[c] - head_0[c * H + j]));
    }
    if (j < C) bias[j] = s.bias[j] - lr * (at_bias + prox * (s.bias[j] - bias_0[j]));
    if (j == 0) loss[b] = sum;
}
