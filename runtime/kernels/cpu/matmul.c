/* Activations times quantised rows: the entry points and the common types; see products.h. */
#include "products.h"

DEFINE(F32)
DEFINE(F16)
DEFINE(BF16)
DEFINE(Q4_0)
DEFINE(Q8_0)
DEFINE(Q4_K)
DEFINE(Q5_K)
DEFINE(Q6_K)

static const product common[] = {
    ENTRY(F32), ENTRY(F16), ENTRY(BF16), ENTRY(Q4_0),
    ENTRY(Q8_0), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K),
};

const product *product_of(int type) {
    const int found = type >= 0 && type < (int)(sizeof common / sizeof *common) && common[type].many;
    return found ? common + type : rarer_product(type);
}

static void pack(const float *x, int rows, int elements, int threads, float *packed) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < elements; k += TILE_K) {
            const int some = elements - k < TILE_K ? elements - k : TILE_K;
            float *to = packed + ((ptrdiff_t)(k / TILE_K) * rows + r) * TILE_K;
            memcpy(to, x + (ptrdiff_t)r * elements + k, some * sizeof(float));
            if (some % 16) memset(to + some, 0, (16 - some % 16) * sizeof(float));
        }
}

/* Floats of scratch that caravan_matmul needs. */
EXPORT int64_t caravan_matmul_scratch(int rows, int elements) {
    return (int64_t)rows * ((elements + TILE_K - 1) / TILE_K) * TILE_K;
}

static void run(part part, const job *j, int parts, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int i = 0; i < parts; i++) part(j, i);
}

/* Whether a block type has a kernel. */
EXPORT int caravan_matmul_knows(int type) {
    return product_of(type) != NULL;
}

/* x [rows][elements], weight [outs][row_bytes], y [rows][outs] with rows y_stride floats apart;
 * scratch [caravan_matmul_scratch]. */
EXPORT void caravan_matmul(int type, const float *x, const uint8_t *weight, int64_t row_bytes, int rows,
                           int outs, int elements, float *y, int64_t y_stride, float *scratch, int threads) {
    const product *const p = product_of(type);
    job j = {weight, row_bytes, rows, outs, elements, x, elements, y, y_stride};
    if (rows > few_at_most(type) || !p->few) {
        pack(x, rows, elements, threads, scratch);
        j.x = scratch;
        run(p->many, &j, (outs + TILE_OUTS - 1) / TILE_OUTS, threads);
        return;
    }
    if (elements % 16) {
        j.x = scratch;
        j.x_stride = (elements + 15) / 16 * 16;
        memset(scratch, 0, (size_t)rows * j.x_stride * sizeof(float));
        for (int r = 0; r < rows; r++)
            memcpy(scratch + r * j.x_stride, x + (ptrdiff_t)r * elements, elements * sizeof(float));
    }
    run(p->few, &j, (outs + FEW_CHUNK - 1) / FEW_CHUNK, threads);
}
