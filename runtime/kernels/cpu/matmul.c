/* Activations times quantised rows: the entry points, and the float kernels of the common types. */
#include "amx_floats.h"
#include "products.h"
#include "thread_team.h"

DEFINE_PLAIN(F32)
DEFINE_PLAIN(F16)
DEFINE_PLAIN(BF16)
DEFINE_PLAIN(BF16_ROUNDED)
DEFINE(Q4_0)
DEFINE(Q8_0)
DEFINE(Q4_K)
DEFINE(Q5_K)
DEFINE(Q6_K)

static const product common[] = {
    ENTRY_PLAIN(F32), ENTRY_PLAIN(F16), ENTRY_PLAIN(BF16), ENTRY_PLAIN(BF16_ROUNDED),
    ENTRY(Q4_0), ENTRY(Q8_0), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K),
};

const product *product_of(int type) {
    const int found = type >= 0 && type < (int)(sizeof common / sizeof *common) && common[type].many;
    return found ? common + type : rare_product(type);
}

/* The nearest bfloat16, ties to even, in the upper half of a word. */
INLINE uint32_t bfloat_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return ((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded) & 0xffff0000;
}

/* The vectors of a block of a plain type, `apart` floats from each other; zeros behind `elements`. */
INLINE void pack_block(const int type, const float *x, float factor, int elements, float *to, ptrdiff_t apart) {
    const int each = block_elements(type);
    float all[32] = {0};
    for (int i = 0; i < each && i < elements; i++) all[i] = x[i] * factor;
    if (type != BF16_ROUNDED) {
        memcpy(to, all, 16 * sizeof(float));
        return;
    }
    for (int i = 0; i < 16; i++) {
        const uint32_t odd = bfloat_of(all[2 * i + 1]), even = bfloat_of(all[2 * i]), both = odd | even >> 16;
        memcpy(to + i, is_paired(type) ? &both : &odd, 4);
        if (!is_paired(type)) memcpy(to + apart + i, &even, 4);
    }
}

/* For few rows: rows one after the other. */
INLINE void pack_in_order(const int type, const float *x, float factor, int elements, int row, void *packed) {
    const int each = block_elements(type);
    float *to = (float *)packed + (ptrdiff_t)row * padded(elements);
    for (int k = 0; k < elements; k += each, to += 16 * block_vectors(type))
        pack_block(type, x + k, factor, elements - k, to, 16);
}

/* For many rows, as panels.h reads them with `at_once` = STEPS, and plain_rows.h with all vectors at once. */
INLINE void pack_in_panels(const int type, int at_once, const float *x, float factor, int elements, int rows, int row,
                           void *packed) {
    const int vectors = row_vectors(type, elements), each = block_vectors(type), first = row / ROWS_TILE * ROWS_TILE;
    const int some = rows - first < ROWS_TILE ? rows - first : ROWS_TILE;
    for (int begin = 0; begin < vectors; begin += at_once) {
        const int steps = vectors - begin < at_once ? vectors - begin : at_once;
        float *to = (float *)packed + ((ptrdiff_t)begin * rows + (ptrdiff_t)first * steps + row - first) * 16;
        for (int s = begin; s < begin + steps; s += each, to += 16 * some * each) {
            const int k = s / each * block_elements(type);
            pack_block(type, x + k, factor, elements - k, to, 16 * some);
        }
    }
}

/* Activations are packed as F32 for all types but BF16_ROUNDED. */
#define DEFINE_PACKS(type)                                                                                            \
    static void type##_in_order(int t, const float *x, float factor, int elements, int rows, int row, void *packed) { \
        (void)t, (void)rows;                                                                                          \
        pack_in_order(type, x, factor, elements, row, packed);                                                        \
    }                                                                                                                 \
    static void type##_in_panels(int t, const float *x, float factor, int elements, int rows, int row,                \
                                 void *packed) {                                                                      \
        (void)t;                                                                                                      \
        pack_in_panels(type, STEPS, x, factor, elements, rows, row, packed);                                          \
    }                                                                                                                 \
    static void type##_in_whole_panels(int t, const float *x, float factor, int elements, int rows, int row,          \
                                       void *packed) {                                                                \
        (void)t;                                                                                                      \
        pack_in_panels(type, row_vectors(type, elements), x, factor, elements, rows, row, packed);                    \
    }
DEFINE_PACKS(F32)
DEFINE_PACKS(BF16_ROUNDED)

/* The way to compute that AUTO stands for. */
static int resolved(int type, int compute) {
    return compute != AUTO ? compute : type == BF16 && HAS_BFLOAT_DOTS && !HAS_AMX ? FAST : FINE;
}

method method_of(int type, int compute, int rows, int outs, int matrices, int threads) {
    compute = resolved(type, compute);
    const method integers = integer_method(type, compute, rows, outs, matrices, threads);
    if (integers.run) return integers;
    const method tiles = amx_float_method(type, compute, outs, matrices, threads);
    if (tiles.run) return tiles;
    const int rounded = type == BF16 && compute == FAST, few = rows <= few_at_most(type);
    const product *const p = product_of(rounded ? BF16_ROUNDED : type);
    if (few && p->few) return (method){p->few, FEW_CHUNK, rounded ? BF16_ROUNDED_in_order : F32_in_order};
    if (p->registers && caravan_expands_in_registers)
        return (method){p->registers, TILE_OUTS, rounded ? BF16_ROUNDED_in_whole_panels : F32_in_whole_panels};
    return (method){p->many, TILE_OUTS, rounded ? BF16_ROUNDED_in_panels : F32_in_panels};
}

int64_t packed_row_bytes(int type, int compute, int elements) {
    const int many = 1024; /* outputs: few are multiplied as floats */
    const int integers = integer_method(type, resolved(type, compute), 1, many, 1, 1).run != NULL;
    return (int64_t)padded(elements) / 32 * (HAS_AMX && integers ? 160 : 128);
}

/* Whether a block type has a kernel; those in tiles have only integer products. */
EXPORT int caravan_matmul_knows(int type, int compute) {
    return product_of(type) || integer_method(type, resolved(type, compute), 1, 1024, 1, 1).run;
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
EXPORT int64_t caravan_packed_bytes(int type, int compute, int rows, int elements) {
    return rows * packed_row_bytes(type, compute, elements);
}

typedef struct { const caravan_matmul_job *of; method how; } packing;

static void pack_rows(const void *argument, const items *mine) {
    const packing *p = argument;
    const caravan_matmul_job *m = p->of;
    for (int begin = (int)mine->begin; begin < mine->end; begin++)
        for (int r = begin; r < packed_until(&p->how, begin, m->rows); r++)
            p->how.pack(m->type, m->x + (int64_t)r * m->elements, 1.0f, m->elements, m->rows, r, m->packed);
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
    if (p.how.pack == F32_in_order && m->elements % 16 == 0) {
        all.j.x = m->x;
        all.j.x_stride = m->elements;
    } else {
        share(threads, floats > WORTH_SHARING, even(m->rows, threads), pack_rows, &p);
    }
    const int parts = (m->outs + p.how.outs_at_once - 1) / p.how.outs_at_once;
    share(threads, floats * m->outs > WORTH_SHARING, (division){parts, 1, 1}, run_parts, &all);
}
