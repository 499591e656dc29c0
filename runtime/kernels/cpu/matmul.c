/* Activations times quantised rows: the entry points, and the float kernels of the common types. */
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

static int padded(int elements) { return (elements + TILE_K - 1) / TILE_K * TILE_K; }

/* For few rows: rows one after the other, ends of vectors filled with zeros. */
static void pack_few(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    (void)type, (void)rows;
    float *const to = (float *)packed + (ptrdiff_t)row * padded(elements);
    for (int k = 0; k < elements; k++) to[k] = x[k] * factor;
    if (elements % 16) memset(to + elements, 0, (16 - elements % 16) * sizeof(float));
}

/* For many rows: [k block][row][TILE_K]. */
static void pack_many(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    (void)type;
    for (int k = 0; k < elements; k += TILE_K) {
        const int some = elements - k < TILE_K ? elements - k : TILE_K;
        float *const to = (float *)packed + ((ptrdiff_t)(k / TILE_K) * rows + row) * TILE_K;
        for (int i = 0; i < some; i++) to[i] = x[k + i] * factor;
        if (some % 16) memset(to + some, 0, (16 - some % 16) * sizeof(float));
    }
}

method method_of(int type, int compute, int rows, int outs, int threads) {
    const method integers = integer_method(type, compute, outs, threads);
    if (integers.run) return integers;
    const product *const p = product_of(type);
    if (rows > few_at_most(type) || !p->few) return (method){p->many, TILE_OUTS, pack_many};
    return (method){p->few, FEW_CHUNK, pack_few};
}

int64_t packed_row_bytes(int elements) { return (int64_t)padded(elements) * sizeof(float); }

/* Whether a block type has a kernel. */
EXPORT int caravan_matmul_knows(int type) {
    return product_of(type) != NULL;
}

typedef struct {
    const float *x;        /* [rows][elements] */
    const uint8_t *weight; /* [outs], row_bytes apart */
    float *y;              /* [rows], y_stride floats apart: [outs] */
    void *packed;          /* caravan_packed_bytes */
    int64_t row_bytes, y_stride;
    int32_t type, compute, rows, outs, elements;
} caravan_matmul_job;

/* Bytes of scratch for the products of so many rows. */
EXPORT int64_t caravan_packed_bytes(int rows, int elements) { return rows * packed_row_bytes(elements); }

EXPORT void caravan_matmul(const caravan_matmul_job *m, int threads) {
    const method how = method_of(m->type, m->compute, m->rows, m->outs, threads);
    const int64_t floats = (int64_t)m->rows * m->elements;
    job j = {
        .weight = m->weight, .row_bytes = m->row_bytes, .rows = m->rows, .outs = m->outs,
        .elements = m->elements, .outs_at_once = how.outs_at_once, .x = m->packed, .x_stride = padded(m->elements),
        .y = m->y, .y_stride = m->y_stride,
    };
    if (how.pack == pack_few && m->elements % 16 == 0) {
        j.x = m->x;
        j.x_stride = m->elements;
    } else {
#pragma omp parallel for num_threads(threads) schedule(static) if (floats > WORTH_SHARING)
        for (int r = 0; r < m->rows; r++)
            how.pack(m->type, m->x + (ptrdiff_t)r * m->elements, 1.0f, m->elements, m->rows, r, m->packed);
    }
    const int parts = (m->outs + how.outs_at_once - 1) / how.outs_at_once;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (floats * m->outs > WORTH_SHARING)
    for (int i = 0; i < parts; i++) how.run(&j, i);
}
