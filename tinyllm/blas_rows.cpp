// Products of few rows, c = alpha a b^T + beta c, in place of the `sgemm` of a BLAS: see blas_rows.py.
//
// Each number of the matrix b is read once, where it stands. The caller and its helpers take blocks of b until none
// is left: a helper whose core is busy with other work takes none, and nobody waits for it.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

constexpr int ROW_MAJOR = 101, AS_IT_IS = 111, TURNED = 112; // as cblas.h has them
constexpr int MOST_ROWS = 8;
constexpr int LEAST_INNER = 256;       // what is shorter is cheap to copy, and dear to sum up
constexpr long BLOCK_BYTES = 1 << 16;  // of b: some microseconds
constexpr long SHARED_BYTES = 1 << 18; // of b: less is done before a helper is awake
constexpr int LANES = 16;

#ifdef __x86_64__ // the best of these that the processor has is chosen as the library is loaded
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE __attribute__((always_inline)) inline

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

using Gemm = void(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

struct Product {
    int m, n, k;
    float alpha;
    const float *a; // (m, k), rows `lda` apart
    int lda;
    const float *b; // (n, k)
    int ldb;
    float beta;
    float *c; // (m, n)
    int ldc;
};

INLINE Lanes load(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// As many rows of a as there are, up to M, times the rows of b from `first` on to `end`, of which N are taken at once.
template <int M, int N>
INLINE void multiply(const Product &p, int first, int end) {
    const float *a[M], *b[N];
    for (int m = 0; m < M; m++)
        a[m] = p.a + long(std::min(m, p.m - 1)) * p.lda; // the last one again: to compute it is quicker than to ask
    for (; first < end; first += N) {
        for (int n = 0; n < N; n++)
            b[n] = p.b + long(std::min(first + n, end - 1)) * p.ldb;
        Lanes sums[M][N] = {};
        int i = 0;
        for (; i + LANES <= p.k; i += LANES)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[m][n] += load(a[m] + i) * load(b[n] + i);
        for (int m = 0; m < std::min(M, p.m); m++)
            for (int n = 0; n < std::min(N, end - first); n++) {
                float total = 0;
                for (int lane = 0; lane < LANES; lane++)
                    total += sums[m][n][lane];
                for (int j = i; j < p.k; j++)
                    total += a[m][j] * b[n][j];
                float &c = p.c[long(m) * p.ldc + first + n];
                c = p.alpha * total + (p.beta == 0 ? 0 : p.beta * c); // what is not used need not hold numbers
            }
    }
}

// Each number is summed up in the same order, whatever m is.
FOR_EACH_PROCESSOR void multiply_block(const Product &p, int first, int end) {
    if (p.m == 1)
        multiply<1, 4>(p, first, end);
    else if (p.m == 2)
        multiply<2, 4>(p, first, end);
    else if (p.m <= 4)
        multiply<4, 4>(p, first, end);
    else
        multiply<MOST_ROWS, 2>(p, first, end);
}

// The caller's helpers, and the product that is open to them: whoever has entered is waited for, and who comes late
// finds it shut.
class Team {
  public:
    std::mutex busy;

    void multiply(const Product &p, int helpers) {
        for (; made < helpers; made++)
            std::thread([this] { help(); }).detach();
        product = p;
        step = int(std::max(1L, BLOCK_BYTES / (p.k * long(sizeof(float)) * 4)) * 4);
        next = 0;
        open = true;
        {
            std::lock_guard<std::mutex> lock(bed);
            round++;
        }
        bell.notify_all();
        work();
        open = false;
        while (inside)
            std::this_thread::yield();
    }

  private:
    Product product;
    int step = 0, made = 0;
    std::atomic<int> next{0}, inside{0};
    std::atomic<bool> open{false};
    std::mutex bed;
    std::condition_variable bell;
    unsigned round = 0;

    void help() {
        for (unsigned seen = 0;;) {
            {
                std::unique_lock<std::mutex> lock(bed);
                bell.wait(lock, [&] { return round != seen; });
                seen = round;
            }
            inside++;
            if (open)
                work();
            inside--;
        }
    }

    void work() {
        for (int first; (first = next.fetch_add(step)) < product.n;)
            multiply_block(product, first, std::min(first + step, product.n));
    }
};

Team &team = *new Team; // never destroyed: helpers sleep when the process ends
Gemm *gemm;
int helpers;

} // namespace

extern "C" void tinyllm_use(Gemm *whole, int threads) {
    gemm = whole;
    helpers = threads - 1;
}

extern "C" void cblas_sgemm(
    int order, int a_form, int b_form, int m, int n, int k,
    float alpha, const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    if (order != ROW_MAJOR || a_form != AS_IT_IS || b_form != TURNED || m > MOST_ROWS || k < LEAST_INNER) {
        gemm(order, a_form, b_form, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    Product product{m, n, k, alpha, a, lda, b, ldb, beta, c, ldc};
    std::unique_lock<std::mutex> lock(team.busy, std::defer_lock);
    if (helpers > 0 && long(n) * k * long(sizeof(float)) >= SHARED_BYTES && lock.try_lock())
        team.multiply(product, helpers);
    else
        multiply_block(product, 0, n);
}
