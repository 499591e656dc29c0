/* Rows of a quantised matrix as floats. */
#include <stddef.h>

#include "blocks.h"

INLINE void expand_into(const int type, const uint8_t *p, int elements, float *to) {
    const int vectors = block_vectors(type), bytes = block_bytes(type);
    const int blocks = elements / (16 * vectors), tail = elements % (16 * vectors);
    for (int b = 0; b < blocks; b++, p += bytes) {
        float scales[SCALES];
        block_scales(type, p, scales);
        for (int part = 0; part < block_parts(type); part++, to += 16 * part_vectors(type)) {
            v16 expanded[4];
            expand_part(type, p, scales, part, expanded);
            for (int i = 0; i < part_vectors(type); i++) v_store(to + 16 * i, expanded[i]);
        }
    }
    if (tail) {
        v16 last;
        expand_tail(type, p, tail, &last);
        memcpy(to, &last, tail * sizeof(float));
    }
}

#define EACH(X) \
    X(F32) X(F16) X(BF16) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) \
    X(IQ4_NL) X(IQ4_XS) X(TQ2_0) X(MXFP4) X(MXFP4_PAIRS) X(NVFP4)
#define DEFINE(type) \
    static void type##_row(const uint8_t *p, int elements, float *to) { expand_into(type, p, elements, to); }
#define ENTRY(type) [type] = type##_row,

EACH(DEFINE)
typedef void (*expander)(const uint8_t *, int, float *);
static const expander expanders[] = {EACH(ENTRY)};

static expander expander_of(int type) {
    return type >= 0 && type < (int)(sizeof expanders / sizeof *expanders) ? expanders[type] : NULL;
}

/* Whether rows of a block type can be expanded. */
EXPORT int caravan_embedding_knows(int type) { return expander_of(type) != NULL; }

/* y[i] = row ids[i] of weight [rows], row_bytes apart, with `elements` each. Returns 1 if an id is outside. */
EXPORT int caravan_embedding(int type, const uint8_t *weight, int64_t row_bytes, int64_t rows,
                             const int64_t *ids, int count, int elements, float *y) {
    const expander expand = expander_of(type);
    for (int i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= rows) return 1;
        expand(weight + ids[i] * row_bytes, elements, y + (ptrdiff_t)i * elements);
    }
    return 0;
}

/* y[i] = ids[i] / each, or 0 where that is not below `rows`. */
EXPORT void caravan_table_rows(const int64_t *ids, int64_t count, int64_t each, int64_t rows, int64_t *y) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = ids[i] / each;
        y[i] = row < rows ? row : 0;
    }
}
