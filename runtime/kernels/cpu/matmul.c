/* Activations times quantised rows: the entry points, and the float kernels of the common types. */
#include "products.h"
#include "team.h"

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

method method_of(int type, int compute, int rows, int outs, int matrices, int threads) {
    const method integers = integer_method(type, compute, outs, matrices, threads);
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

typedef struct { const caravan_matmul_job *of; method how; } packing;

static void pack_rows(const void *argument, const items *mine) {
    const packing *p = argument;
    const caravan_matmul_job *m = p->of;
    for (int64_t r = mine->begin; r < mine->end; r++)
        p->how.pack(m->type, m->x + r * m->elements, 1.0f, m->elements, m->rows, (int)r, m->packed);
}

typedef struct { job j; part run; } product_parts;

static void run_parts(const void *argument, const items *mine) {
    const product_parts *p = argument;
    const int end = (int)mine->end;
    for (int i = (int)mine->begin; i < end; i++)
        p->run(&p->j, i, i + 1 < end ? i + 1 : (int)mine->next, i > mine->begin || mine->foreseen);
}

EXPORT void caravan_matmul(const caravan_matmul_job *m, int threads) {
    const packing p = {m, method_of(m->type, m->compute, m->rows, m->outs, 1, threads)};
    const int64_t floats = (int64_t)m->rows * m->elements;
    product_parts all = {{
        .weight = m->weight, .row_bytes = m->row_bytes, .rows = m->rows, .outs = m->outs,
        .elements = m->elements, .outs_at_once = p.how.outs_at_once, .x = m->packed, .x_stride = padded(m->elements),
        .y = m->y, .y_stride = m->y_stride,
    }, p.how.run};
    if (p.how.pack == pack_few && m->elements % 16 == 0) {
        all.j.x = m->x;
        all.j.x_stride = m->elements;
    } else {
        share(threads, floats > WORTH_SHARING, even(m->rows, threads), pack_rows, &p);
    }
    const int parts = (m->outs + p.how.outs_at_once - 1) / p.how.outs_at_once;
    share(threads, floats * m->outs > WORTH_SHARING, (division){parts, 1, 1}, run_parts, &all);
}
