// Enough of CUDA to run a kernel on a CPU: a block's threads are threads, its barrier is a barrier, and blocks take turns.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

using std::min;

struct Index {
    int x;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static thread_local Index threadIdx, blockIdx;
static std::barrier<> *barrier;
alignas(16) static char memory[256 * 1024];  // of a block: a kernel's `extern __shared__` array

#define __device__ static
#define __global__
#define __launch_bounds__(threads)
#define __shared__
#define __syncthreads() barrier->arrive_and_wait()

// Whether there is room for what the kernel has in shared memory; if not, it is not run.
template <typename Kernel> bool run(int blocks, int threads, size_t bytes, size_t needed, Kernel kernel) {
    if (bytes != needed || bytes > sizeof memory) return false;
    for (int b = 0; b < blocks; b++) {
        memset(memory, 0x7f, sizeof memory);  // large numbers, where nothing was written
        std::barrier<> own(threads);
        barrier = &own;
        std::vector<std::thread> all;
        for (int t = 0; t < threads; t++)
            all.emplace_back([=] {
                blockIdx.x = b, threadIdx.x = t;
                kernel();
                barrier->arrive_and_drop();  // a thread that left early does not keep the others waiting
            });
        for (auto &thread : all) thread.join();
    }
    return true;
}
