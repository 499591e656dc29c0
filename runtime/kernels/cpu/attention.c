/* Paged attention with an online softmax over blocks of positions.
 *
 * Blocks start at multiples of BLOCK in the sequence, and a row adds only what it sees, in the order
 * of positions; so the bits of a row do not depend on the rows in its tile. */
#include <stddef.h>

#include "curves.h"

extern int omp_get_thread_num(void);

#define BLOCK 64    /* positions */
#define LANES (BLOCK / 16)
#define TILE 64     /* queries (rows times heads of one kv head) that share a block */
#define QUERIES 4   /* queries in registers at once */
#define AHEAD 16    /* prefetch distance in positions */

enum { PAGES_F32 = 0, PAGES_F16 = 1, PAGES_BF16 = 2 };

typedef struct {
    const float *queries; /* [rows][heads][key_dim] */
    const void *keys, *values; /* [pages][page_tokens][kv_heads][key_dim or value_dim] */
    const int32_t *page_table; /* [slots], table_stride apart */
    const int32_t *row_slot, *visible_begin, *visible_end; /* [rows] */
    const float *sinks; /* [heads], or NULL */
    float *result; /* [rows][heads][value_dim] */
    int64_t table_stride;
    int32_t type, page_tokens, rows, heads, kv_heads, key_dim, value_dim;
    float scale, softcap; /* softcap 0: none */
} caravan_attention_job;

typedef caravan_attention_job job;

/* The scratch memory of one thread. */
typedef struct {
    float *keys;   /* [key_dim padded][BLOCK] */
    float *some;   /* [16][key_dim padded] */
    float *values; /* [BLOCK][value_dim padded] */
    float *scores; /* [queries][BLOCK] */
    float *sums;   /* [queries][value_dim padded], before the division */
    float *totals; /* [queries][16] */
    float *tops;   /* [queries] */
} workspace;

INLINE int padded(int n) { return (n + 15) / 16 * 16; }
INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE int most(int a, int b) { return a > b ? a : b; }

static int64_t carve(const job *j, float *at, workspace *w) {
    const int group = j->heads / j->kv_heads, queries = most(TILE, group);
    const int key_dim = padded(j->key_dim), value_dim = padded(j->value_dim);
    float *begin = at;
    w->keys = at, at += key_dim * BLOCK;
    w->some = at, at += key_dim * 16;
    w->values = at, at += value_dim * BLOCK;
    w->scores = at, at += queries * BLOCK;
    w->sums = at, at += (int64_t)queries * value_dim;
    w->totals = at, at += queries * 16;
    w->tops = at, at += padded(queries);
    return at - begin;
}

/* n elements of a page as floats, then zeros up to a multiple of 16. */
INLINE void widen(const int type, const void *from, int n, float *to) {
    const int size = type == PAGES_F32 ? 4 : 2;
    for (int i = 0; i < n; i += 16) {
        const char *p = (const char *)from + (ptrdiff_t)i * size;
        char last[64] = {0};
        if (n - i < 16) p = memcpy(last, p, (n - i) * size);
        v_store(to + i, type == PAGES_F32   ? v_load((const float *)p)
                        : type == PAGES_F16 ? v_half(p)
                                            : v_bfloat(p));
    }
}

INLINE int64_t cell_of(const job *j, const int32_t *table, int position) {
    return (int64_t)table[position / j->page_tokens] * j->page_tokens + position % j->page_tokens;
}

/* The heads of a position are adjacent, so consecutive positions of a head are far apart. */
INLINE void prefetch_cell(const job *j, int64_t cell, int head) {
    const int size = j->type == PAGES_F32 ? 4 : 2;
    const char *key = (const char *)j->keys + (cell * j->kv_heads + head) * j->key_dim * size;
    const char *value = (const char *)j->values + (cell * j->kv_heads + head) * j->value_dim * size;
    for (int i = 0; i < j->key_dim * size; i += 64) __builtin_prefetch(key + i);
    for (int i = 0; i < j->value_dim * size; i += 64) __builtin_prefetch(value + i);
}

static void widen_cell(const job *j, const void *pages, int64_t cell, int head, int dim, float *to) {
    const int64_t at = (cell * j->kv_heads + head) * dim;
    if (j->type == PAGES_F32) widen(PAGES_F32, (const float *)pages + at, dim, to);
    else if (j->type == PAGES_F16) widen(PAGES_F16, (const uint16_t *)pages + at, dim, to);
    else widen(PAGES_BF16, (const uint16_t *)pages + at, dim, to);
}

/* from [16][stride] -> to [16][BLOCK], transposed. */
INLINE void transpose(const float *from, int stride, float *to) {
#if defined(__AVX512F__)
    __m512 a[16], b[16];
    UNROLL(16)
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * stride);
    UNROLL(8)
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL(4)
    for (int i = 0; i < 16; i += 4)
        UNROLL(2)
        for (int h = 0; h < 2; h++) {
            const __m512d lower = _mm512_castps_pd(b[i + h]), upper = _mm512_castps_pd(b[i + h + 2]);
            a[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(lower, upper));
            a[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lower, upper));
        }
    /* a[4 q + c] holds column 4 l + c of rows 4 q .. 4 q + 3 in its quarter l */
    UNROLL(4)
    for (int c = 0; c < 4; c++) {
        const __m512 even01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
        const __m512 odd01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        const __m512 odd23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_ps(to + c * BLOCK, _mm512_shuffle_f32x4(even01, even23, 0x88));
        _mm512_storeu_ps(to + (4 + c) * BLOCK, _mm512_shuffle_f32x4(odd01, odd23, 0x88));
        _mm512_storeu_ps(to + (8 + c) * BLOCK, _mm512_shuffle_f32x4(even01, even23, 0xdd));
        _mm512_storeu_ps(to + (12 + c) * BLOCK, _mm512_shuffle_f32x4(odd01, odd23, 0xdd));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int c = 0; c < 16; c++) to[c * BLOCK + i] = from[i * stride + c];
#endif
}

/* Loads the block of positions from `block` on; positions outside [lo, hi) become zeros. */
static void load_block(const job *j, const workspace *w, int slot, int head, int block, int lo, int hi) {
    const int key_dim = padded(j->key_dim), value_dim = padded(j->value_dim);
    const int32_t *table = j->page_table + slot * j->table_stride;
    for (int first = 0; first < BLOCK; first += 16) {
        if (block + first >= hi || block + first + 16 <= lo) {
            for (int d = 0; d < key_dim; d++) memset(w->keys + d * BLOCK + first, 0, 64);
            memset(w->values + first * value_dim, 0, value_dim * 64);
            continue;
        }
        for (int i = 0; i < 16; i++) {
            const int position = block + first + i;
            float *key = w->some + i * key_dim, *value = w->values + (first + i) * value_dim;
            if (position < lo || position >= hi) {
                memset(key, 0, key_dim * 4);
                memset(value, 0, value_dim * 4);
                continue;
            }
            const int64_t cell = cell_of(j, table, position);
            if (position + AHEAD < hi) prefetch_cell(j, cell_of(j, table, position + AHEAD), head);
            widen_cell(j, j->keys, cell, head, j->key_dim, key);
            widen_cell(j, j->values, cell, head, j->value_dim, value);
        }
        for (int d = 0; d < key_dim; d += 16)
            transpose(w->some + d, key_dim, w->keys + d * BLOCK + first);
    }
}

/* scores [n][BLOCK] of n queries against the block. */
INLINE void score(const int n, const job *j, const float *const *queries, const float *keys, float *scores) {
    v16 sum[QUERIES][LANES];
    UNROLL(4)
    for (int q = 0; q < n; q++)
        UNROLL(4)
        for (int l = 0; l < LANES; l++) sum[q][l] = v_zero();
    for (int d = 0; d < j->key_dim; d++) {
        v16 key[LANES];
        UNROLL(4)
        for (int l = 0; l < LANES; l++) key[l] = v_load(keys + d * BLOCK + 16 * l);
        UNROLL(4)
        for (int q = 0; q < n; q++) {
            const v16 query = v_all(queries[q][d]);
            UNROLL(4)
            for (int l = 0; l < LANES; l++) sum[q][l] = v_fma(query, key[l], sum[q][l]);
        }
    }
    UNROLL(4)
    for (int q = 0; q < n; q++)
        UNROLL(4)
        for (int l = 0; l < LANES; l++)
            v_store(scores + q * BLOCK + 16 * l, v_mul(sum[q][l], v_all(j->scale)));
}

/* scores -> cap tanh(scores / cap) */
static void cap_scores(float cap, int queries, float *scores) {
    for (int i = 0; i < queries * BLOCK; i += 16)
        v_store(scores + i, v_mul(v_tanh(v_div(v_load(scores + i), v_all(cap))), v_all(cap)));
}

/* Scores [begin, end) of a query -> weights relative to its new maximum; rescales its sums. */
static void soften(const job *j, const workspace *w, int query, int begin, int end) {
    const int value_dim = padded(j->value_dim);
    float *scores = w->scores + query * BLOCK, *sums = w->sums + (int64_t)query * value_dim;
    float *total = w->totals + query * 16, *top = w->tops + query;
    for (int i = 0; i < begin; i++) scores[i] = -INFINITY;
    for (int i = end; i < BLOCK; i++) scores[i] = -INFINITY;
    v16 largest = v_load(scores);
    for (int l = 1; l < LANES; l++) largest = v_max(largest, v_load(scores + 16 * l));
    const float here = v_top(largest);
    v16 all = v_load(total);
    if (here > *top) {
        const v16 factor = v_exp(v_all(*top - here));
        for (int d = 0; d < value_dim; d += 16) v_store(sums + d, v_mul(v_load(sums + d), factor));
        all = v_mul(all, factor);
        *top = here;
    }
    for (int l = 0; l < LANES; l++)
        v_store(scores + 16 * l, v_exp(v_add(v_load(scores + 16 * l), v_all(-*top))));
    for (int i = 0; i < begin; i++) scores[i] = 0.0f;
    for (int i = end; i < BLOCK; i++) scores[i] = 0.0f;
    for (int l = 0; l < LANES; l++) all = v_add(all, v_load(scores + 16 * l));
    v_store(total, all);
}

/* Adds the weighted values [begin, end) to the sums of n queries, `lanes` vectors each. */
INLINE void gather(const int n, const int lanes, const float *weights, const float *values, float *sums,
                   int value_dim, int begin, int end) {
    v16 sum[QUERIES][4];
    UNROLL(4)
    for (int q = 0; q < n; q++)
        UNROLL(4)
        for (int l = 0; l < lanes; l++) sum[q][l] = v_load(sums + q * value_dim + 16 * l);
    for (int i = begin; i < end; i++) {
        v16 value[4];
        UNROLL(4)
        for (int l = 0; l < lanes; l++) value[l] = v_load(values + i * value_dim + 16 * l);
        UNROLL(4)
        for (int q = 0; q < n; q++) {
            const v16 weight = v_all(weights[q * BLOCK + i]);
            UNROLL(4)
            for (int l = 0; l < lanes; l++) sum[q][l] = v_fma(weight, value[l], sum[q][l]);
        }
    }
    UNROLL(4)
    for (int q = 0; q < n; q++)
        UNROLL(4)
        for (int l = 0; l < lanes; l++) v_store(sums + q * value_dim + 16 * l, sum[q][l]);
}

INLINE void gather_all(const int n, const job *j, const workspace *w, int query, int begin, int end) {
    const int value_dim = padded(j->value_dim);
    const float *weights = w->scores + query * BLOCK;
    float *sums = w->sums + (int64_t)query * value_dim;
    int d = 0;
    for (; d + 64 <= value_dim; d += 64)
        gather(n, 4, weights, w->values + d, sums + d, value_dim, begin, end);
    for (; d < value_dim; d += 16)
        gather(n, 1, weights, w->values + d, sums + d, value_dim, begin, end);
}

/* The part of the block that a query's row sees: [begin, end), empty if begin >= end. */
INLINE int sight(const job *j, int row, int block, int *end) {
    *end = least(BLOCK, j->visible_end[row] - block);
    return most(0, j->visible_begin[row] - block);
}

static void attend_block(const job *j, const workspace *w, int row, int head, int queries, int block) {
    const int group = j->heads / j->kv_heads;
    const float *at[QUERIES];
    for (int q = 0; q < queries; q += QUERIES) {
        const int some = least(QUERIES, queries - q);
        for (int i = 0; i < some; i++) {
            const int64_t r = row + (q + i) / group;
            at[i] = j->queries + (r * j->heads + head * group + (q + i) % group) * j->key_dim;
        }
        if (some == QUERIES) score(QUERIES, j, at, w->keys, w->scores + q * BLOCK);
        else for (int i = 0; i < some; i++) score(1, j, at + i, w->keys, w->scores + (q + i) * BLOCK);
    }
    if (j->softcap) cap_scores(j->softcap, queries, w->scores);
    for (int q = 0; q < queries; q++) {
        int end, begin = sight(j, row + q / group, block, &end);
        if (begin < end) soften(j, w, q, begin, end);
    }
    for (int q = 0; q < queries;) {
        int end, begin = sight(j, row + q / group, block, &end), alike = 1;
        while (alike < QUERIES && q + alike < queries) {
            int its_end, its_begin = sight(j, row + (q + alike) / group, block, &its_end);
            if (its_begin != begin || its_end != end) break;
            alike++;
        }
        if (begin >= end) q += alike;
        else if (alike == QUERIES) gather_all(QUERIES, j, w, q, begin, end), q += QUERIES;
        else gather_all(1, j, w, q, begin, end), q++;
    }
}

/* Rows [row, end) of one slot, for one kv head. */
static void attend(const job *j, const workspace *w, int row, int end, int head) {
    const int group = j->heads / j->kv_heads, queries = (end - row) * group;
    const int value_dim = padded(j->value_dim);
    int lo = INT32_MAX, hi = 0;
    for (int r = row; r < end; r++)
        if (j->visible_begin[r] < j->visible_end[r]) {
            lo = least(lo, j->visible_begin[r]);
            hi = most(hi, j->visible_end[r]);
        }
    memset(w->sums, 0, (size_t)queries * value_dim * 4);
    memset(w->totals, 0, (size_t)queries * 64);
    for (int q = 0; q < queries; q++) {
        w->tops[q] = j->sinks ? j->sinks[head * group + q % group] : -INFINITY;
        w->totals[q * 16] = j->sinks ? 1.0f : 0.0f; /* a sink is a score without a value */
    }
    for (int block = lo / BLOCK * BLOCK; block < hi; block += BLOCK) {
        load_block(j, w, j->row_slot[row], head, block, lo, hi);
        attend_block(j, w, row, head, queries, block);
    }
    for (int q = 0; q < queries; q++) {
        const float total = v_sum(v_load(w->totals + q * 16));
        const int seen = j->visible_begin[row + q / group] < j->visible_end[row + q / group];
        float *sums = w->sums + (int64_t)q * value_dim;
        float *to = j->result +
                    ((int64_t)(row + q / group) * j->heads + head * group + q % group) * j->value_dim;
        for (int d = 0; d < j->value_dim; d++) to[d] = seen ? sums[d] / total : 0.0f;
    }
}

/* Floats of scratch per thread. */
EXPORT int64_t caravan_attention_scratch(const job *j) {
    workspace w;
    return carve(j, NULL, &w);
}

/* scratch [threads][caravan_attention_scratch]; tiles [rows + 1]. */
EXPORT void caravan_attention(const job *j, float *scratch, int32_t *tiles, int threads) {
    const int rows_at_most = most(1, TILE / (j->heads / j->kv_heads));
    int count = 0;
    for (int row = 0; row < j->rows; row++)
        if (!row || j->row_slot[row] != j->row_slot[row - 1] || row - tiles[count - 1] == rows_at_most)
            tiles[count++] = row;
    tiles[count] = j->rows;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int unit = 0; unit < count * j->kv_heads; unit++) {
        const int tile = count - 1 - unit / j->kv_heads; /* the last rows see the most positions and start first */
        workspace w;
        const int64_t size = carve(j, scratch, &w);
        carve(j, scratch + size * omp_get_thread_num(), &w);
        attend(j, &w, tiles[tile], tiles[tile + 1], unit % j->kv_heads);
    }
}
