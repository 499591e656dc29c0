/* Paged attention with an online softmax over blocks of positions.
 *
 * The bits of a row do not depend on the other rows of its tile, nor on the threads: blocks start
 * at multiples of BLOCK; a score adds its products in the order of simd.h; a row adds only the
 * positions that it sees, in order; and its positions are divided into parts by the row alone, which
 * are merged in order. */
#include <stddef.h>

#include "cache_rows.h"
#include "curves.h"
#include "thread_team.h"

extern int omp_get_thread_num(void);

#define BLOCK 64    /* positions */
#define LANES (BLOCK / 16)
#define TILE 64     /* queries (rows times heads of one kv head) that share a block */
#define QUERIES 4   /* queries in registers at once */
#define UNWIDENED 8 /* for more queries, the block is converted to floats first */
#define LEAST_PART 512
#define MOST_PARTS 17 /* parts of a row, which sees at most 16 times the positions of a part */
#define UNITS_PER_THREAD 4     /* enough to keep all threads busy until the end */
#define SPLIT_FLOATS (1 << 19) /* scratch per thread for the states of parts */
#if defined(__AVX512F__)
#define SUMS 16 /* scores in registers at once */
#define IN_REGISTER(v) __asm__("" : "+v"(v)) /* or gcc loads it again for each use */
#else
#define SUMS 4
#define IN_REGISTER(v)
#endif

typedef struct {
    const float *queries; /* [rows][heads][key_dim] */
    const char *keys, *values; /* [pages][page_tokens][kv_heads] rows of key_dim or value_dim elements;
                                * no values: they are the beginnings of keys */
    const int32_t *page_table; /* [slots], table_stride apart */
    const int32_t *row_slot, *visible_begin, *visible_end; /* [rows] */
    const float *sinks; /* [heads], or NULL */
    const float *slopes; /* [heads], or NULL: scores are reduced by slope times distance */
    const int64_t *positions; /* [rows], read with slopes only */
    float *result; /* [rows][heads][value_dim] */
    float *scratch; /* [caravan_attention_scratch] */
    int32_t *tiles; /* [2][rows + 1] */
    int64_t table_stride;
    int32_t type, page_tokens, rows, heads, kv_heads, key_dim, value_dim, threads;
    float scale, softcap; /* softcap 0: none */
} caravan_attention_job;

typedef caravan_attention_job job;

/* The softmax of some queries over some positions, before the division. */
typedef struct {
    float *sums;   /* [queries][value_dim padded] */
    float *totals; /* [queries][16] */
    float *tops;   /* [queries] */
} state;

/* The scratch memory of one thread. */
typedef struct {
    float *queries; /* [queries][key_dim padded] */
    float *keys;    /* [BLOCK][key_dim padded] */
    float *values;  /* [BLOCK][value_dim padded] */
    float *scores;  /* [queries][BLOCK] */
    state part, whole;
} workspace;

/* Where the positions of a block are; elements of type `type`. */
typedef struct {
    int type;
    int64_t key_block, value_block; /* bytes of 32 elements */
    const char *keys[BLOCK], *values[BLOCK];
    const char *const *next; /* the keys to prefetch, or NULL */
} located;

/* Rows [row, end) of one slot for one kv head; together they see [lo, hi). */
typedef struct {
    int row, end, head, queries, lo, hi, part;
} tile;

INLINE int padded(int n) { return (n + 31) / 32 * 32; }
INLINE int most(int a, int b) { return a > b ? a : b; }

static float *carve_state(const job *j, int queries, float *at, state *s) {
    s->sums = at, at += (int64_t)queries * padded(j->value_dim);
    s->totals = at, at += queries * 16;
    s->tops = at, at += queries;
    return at;
}

static int64_t carve(const job *j, float *at, workspace *w) {
    const int queries = most(TILE, j->heads / j->kv_heads);
    float *begin = at;
    w->queries = at, at += (int64_t)queries * padded(j->key_dim);
    w->keys = at, at += BLOCK * padded(j->key_dim);
    w->values = at, at += BLOCK * padded(j->value_dim);
    w->scores = at, at += queries * BLOCK;
    at = carve_state(j, queries, at, &w->part);
    at = carve_state(j, queries, at, &w->whole);
    return (at - begin + 15) / 16 * 16;
}

INLINE int rows_of_tile(const job *j) { return most(1, TILE / (j->heads / j->kv_heads)); }

/* Floats of scratch for the parts of rows, besides that of the threads; 0 if there are enough tiles
 * to keep all threads busy, so that rows are not divided. */
static int64_t split_floats(const job *j) {
    const int64_t busy = (int64_t)UNITS_PER_THREAD * j->threads * rows_of_tile(j);
    if (j->threads == 1 || (int64_t)j->rows * j->kv_heads >= busy) return 0;
    const int64_t all = (int64_t)j->rows * j->heads * MOST_PARTS * (padded(j->value_dim) + 17);
    const int64_t most = (int64_t)j->threads * SPLIT_FLOATS;
    return all < most ? all : most;
}

/* The number of positions of each part of a row. */
INLINE int part_of(const job *j, int row) {
    int part = LEAST_PART;
    while ((int64_t)part * (MOST_PARTS - 1) < (int64_t)j->visible_end[row] - j->visible_begin[row]) part *= 2;
    return part;
}

/* The part of the block that a query's row sees: [begin, end), empty if begin >= end. */
INLINE int sight(const job *j, int row, int block, int *end) {
    *end = least(BLOCK, j->visible_end[row] - block);
    return most(0, j->visible_begin[row] - block);
}

INLINE void prefetch(const char *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* Indices outside [begin, end) are replaced by the first one inside; their results are not used. */
static void fill(located *at, int begin, int end) {
    for (int i = 0; i < BLOCK; i++)
        if (i < begin || i >= end) at->keys[i] = at->keys[begin], at->values[i] = at->values[begin];
}

/* Finds the positions of the block in [from, to). */
static void locate(const job *j, const tile *t, int block, int from, int to, located *at) {
    const int lo = most(block, from), hi = least(block + BLOCK, to);
    const int64_t keys = row_bytes(j->type, j->key_dim), values = row_bytes(j->type, j->value_dim);
    const int32_t *table = j->page_table + j->row_slot[t->row] * j->table_stride;
    at->type = j->type;
    at->key_block = row_bytes(j->type, 32), at->value_block = at->key_block;
    at->next = NULL;
    const int page_tokens = j->page_tokens;
    int64_t page = lo / page_tokens, offset = lo % page_tokens;
    for (int i = lo - block; i < hi - block; i++) {
        const int64_t row = (table[page] * (int64_t)page_tokens + offset) * j->kv_heads + t->head;
        at->keys[i] = j->keys + row * keys;
        at->values[i] = j->values ? j->values + row * values : at->keys[i];
        if (++offset == page_tokens) page++, offset = 0;
    }
    fill(at, lo - block, hi - block);
}

/* Converts positions [begin, end) of the block to floats. */
static void widen(const job *j, const workspace *w, int begin, int end, located *at) {
    const int key_dim = padded(j->key_dim), value_dim = padded(j->value_dim);
    const int64_t keys = row_bytes(j->type, j->key_dim), values = row_bytes(j->type, j->value_dim);
    for (int i = begin; i < end; i++) {
        const int ahead = least(i + 8, end - 1);
        prefetch(at->keys[ahead], keys), prefetch(at->values[ahead], values);
        decode_row(j->type, at->keys[i], j->key_dim, w->keys + i * key_dim);
        decode_row(j->type, at->values[i], j->value_dim, w->values + i * value_dim);
        at->keys[i] = (const char *)(w->keys + i * key_dim);
        at->values[i] = (const char *)(w->values + i * value_dim);
    }
    fill(at, begin, end);
    at->type = CACHE_F32;
    at->key_block = at->value_block = 32 * sizeof(float);
}

/* The sums of the lanes of SUMS vectors. */
INLINE void add_lanes(const v16 *sum, v16 *to) {
#if defined(__AVX512F__)
    __m512 a[8], b[4], c[2];
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        const __m512 x = sum[2 * i], y = sum[2 * i + 1];
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const __m512 x = a[2 * i], y = a[2 * i + 1];
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    }
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    *to = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
#else
    float sums[16] = {0};
    for (int i = 0; i < SUMS; i++) sums[i] = v_sum(sum[i]);
    *to = v_load(sums);
#endif
}

/* The vector whose sum `add_lanes` puts into this lane. */
INLINE int slot_of(const int lane) {
#if defined(__AVX512F__)
    return lane % 4 * 4 + lane / 4;
#else
    return lane;
#endif
}

/* scores [n][BLOCK] of n queries for positions [begin, end); may also write neighbouring scores. */
INLINE void score(const int type, const int n, const job *j, const located *at, const workspace *w,
                  int query, int begin, int end) {
    const int m = SUMS / n, stride = padded(j->key_dim);
    const int64_t ahead = !query && at->next ? j->value_dim / 32 * at->value_block : 0;
    const float *queries = w->queries + query * stride;
    float *scores = w->scores + query * BLOCK;
    for (int p = begin / m * m; p < end; p += m) {
        const char *key[SUMS];
        v16 sum[SUMS];
        UNROLL(16)
        for (int i = 0; i < m; i++) key[i] = at->keys[p + i];
        UNROLL(16)
        for (int i = 0; i < SUMS; i++) sum[i] = v_zero();
        for (int i = 0; ahead && i < m; i++) prefetch(at->values[p + i], ahead);
        for (int d = 0; d < stride; d += 32)
            UNROLL(2)
            for (int half = 0; half < 32; half += 16)
            {
                v16 query[QUERIES];
                UNROLL(4)
                for (int q = 0; q < n; q++) {
                    query[q] = v_load(queries + q * stride + d + half);
                    IN_REGISTER(query[q]);
                }
                UNROLL(16)
                for (int i = 0; i < m; i++) {
                    const v16 elements = elements_of(type, key[i] + d / 32 * at->key_block, half);
                    UNROLL(4)
                    for (int q = 0; q < n; q++) {
                        v16 *to = sum + slot_of(q * m + i);
                        *to = v_fma(query[q], elements, *to);
                    }
                }
            }
        v16 all;
        add_lanes(sum, &all);
        float lanes[16];
        v_store(lanes, v_mul(all, v_all(j->scale)));
        UNROLL(4)
        for (int q = 0; q < n; q++) memcpy(scores + q * BLOCK + p, lanes + q * m, m * sizeof(float));
    }
}

/* scores -> cap tanh(scores / cap) */
static void cap_scores(float cap, int queries, float *scores) {
    for (int i = 0; i < queries * BLOCK; i += 16)
        v_store(scores + i, v_mul(v_tanh(v_div(v_load(scores + i), v_all(cap))), v_all(cap)));
}

/* score -> score - slope |position of the row - position of the key| */
static void reduce_scores(const job *j, const workspace *w, const tile *t, int block) {
    const int group = t->queries / (t->end - t->row);
    for (int q = 0; q < t->queries; q++) {
        const float slope = j->slopes[t->head * group + q % group];
        const int own = (int)(j->positions[t->row + q / group] - block);
        float *scores = w->scores + q * BLOCK;
        for (int i = 0; i < BLOCK; i++) scores[i] -= slope * (float)(own < i ? i - own : own - i);
    }
}

/* Scores [begin, end) of a query -> weights relative to its new maximum; rescales its sums. */
static void soften(const job *j, const workspace *w, const state *s, int query, int begin, int end) {
    const int value_dim = padded(j->value_dim);
    float *scores = w->scores + query * BLOCK, *sums = s->sums + (int64_t)query * value_dim;
    float *total = s->totals + query * 16, *top = s->tops + query;
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

/* Adds the weighted values [begin, end) to the sums of n queries: elements d to d + 16 lanes. */
INLINE void gather(const int type, const int n, const int lanes, const located *at, const float *weights,
                   int d, int64_t ahead, float *sums, int value_dim, int begin, int end) {
    v16 sum[QUERIES][4];
    UNROLL(4)
    for (int q = 0; q < n; q++)
        UNROLL(4)
        for (int l = 0; l < lanes; l++) sum[q][l] = v_load(sums + q * value_dim + 16 * l);
    for (int i = begin; i < end; i++) {
        const char *row = at->values[i] + d / 32 * at->value_block;
        if (ahead) prefetch(at->next[i], ahead);
        v16 value[4];
        UNROLL(4)
        for (int l = 0; l < lanes; l++)
            value[l] = elements_of(type, row + l / 2 * at->value_block, l % 2 * 16);
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

INLINE void gather_all(const int type, const int n, const job *j, const workspace *w, const state *s,
                       const located *at, int query, int begin, int end) {
    const int value_dim = padded(j->value_dim);
    const float *weights = w->scores + query * BLOCK;
    float *sums = s->sums + (int64_t)query * value_dim;
    if (begin >= end) return;
    int64_t ahead = !query && at->next ? j->key_dim / 32 * at->key_block : 0;
    int d = 0;
    for (; d + 64 <= value_dim; d += 64, ahead = 0)
        gather(type, n, 4, at, weights, d, ahead, sums + d, value_dim, begin, end);
    if (d < value_dim) gather(type, n, 2, at, weights, d, ahead, sums + d, value_dim, begin, end);
}

/* Adds values for n queries: positions that all of them see at once, the others query by query. */
INLINE void gather_group(const int type, const int n, const job *j, const workspace *w, const state *s,
                         const located *at, const tile *t, int query, int block) {
    const int group = t->queries / (t->end - t->row);
    int begins[QUERIES], ends[QUERIES], begin = 0, end = BLOCK;
    for (int q = 0; q < n; q++) {
        begins[q] = sight(j, t->row + (query + q) / group, block, ends + q);
        begin = most(begin, begins[q]), end = least(end, ends[q]);
    }
    const int together = begin < end;
    for (int q = 0; n > 1 && q < n; q++)
        gather_all(type, 1, j, w, s, at, query + q, begins[q], together ? begin : ends[q]);
    if (together) gather_all(type, n, j, w, s, at, query, begin, end);
    for (int q = 0; n > 1 && together && q < n; q++)
        gather_all(type, 1, j, w, s, at, query + q, end, ends[q]);
}

/* Computes a block. `begin`, `end`: the range of its positions that any row sees. */
INLINE void attend_block(const int type, const job *j, const workspace *w, const state *s, const tile *t,
                         const located *at, int block, int begin, int end) {
    const int group = t->queries / (t->end - t->row);
    const int fours = t->queries / QUERIES * QUERIES;
    for (int q = 0; q < fours; q += QUERIES)
        score(type, QUERIES, j, at, w, q, begin, end);
    for (int q = fours; q < t->queries; q++)
        score(type, 1, j, at, w, q, begin, end);
    if (j->softcap) cap_scores(j->softcap, t->queries, w->scores);
    if (j->slopes) reduce_scores(j, w, t, block);
    for (int q = 0; q < t->queries; q++) {
        int its_end, its_begin = sight(j, t->row + q / group, block, &its_end);
        if (its_begin < its_end) soften(j, w, s, q, its_begin, its_end);
    }
    for (int q = 0; q < fours; q += QUERIES) gather_group(type, QUERIES, j, w, s, at, t, q, block);
    for (int q = fours; q < t->queries; q++) gather_group(type, 1, j, w, s, at, t, q, block);
}

/* Computes the state of one part, positions [from, to), into s. */
static void attend_part(const job *j, const workspace *w, const tile *t, int from, int to, const state *s) {
    const int plain = j->key_dim % 32 == 0 && j->value_dim % 32 == 0;
    const int direct = plain && t->queries <= UNWIDENED;
    memset(s->sums, 0, (size_t)t->queries * padded(j->value_dim) * sizeof(float));
    memset(s->totals, 0, (size_t)t->queries * 16 * sizeof(float));
    for (int q = 0; q < t->queries; q++) s->tops[q] = -INFINITY;
    located both[2], *at = both, *next = both + 1;
    locate(j, t, from / BLOCK * BLOCK, from, to, at);
    for (int block = from / BLOCK * BLOCK; block < to; block += BLOCK) {
        const int begin = most(0, from - block), end = least(BLOCK, to - block);
        if (block + BLOCK < to) locate(j, t, block + BLOCK, from, to, next);
        if (direct) at->next = block + BLOCK < to ? next->keys : at->keys;
        else widen(j, w, begin, end, at);
        switch (at->type) {
#define CASE(type) case type: attend_block(type, j, w, s, t, at, block, begin, end); break;
            CASE(CACHE_F32)
            CASE(CACHE_F16)
            CASE(CACHE_BF16)
            CASE(CACHE_Q8_0)
            CASE(CACHE_Q4_0)
#undef CASE
        }
        located *done = at;
        at = next, next = done;
    }
}

/* Adds a part, of the positions [from, to), to the whole. */
static void merge(const job *j, const tile *t, int from, int to, const state *part, const state *whole) {
    const int group = t->queries / (t->end - t->row), value_dim = padded(j->value_dim);
    for (int q = 0; q < t->queries; q++) {
        const int row = t->row + q / group;
        if (most(from, j->visible_begin[row]) >= least(to, j->visible_end[row])) continue;
        const float *more = part->sums + (int64_t)q * value_dim;
        float *sums = whole->sums + (int64_t)q * value_dim, *total = whole->totals + q * 16;
        const float top = whole->tops[q] > part->tops[q] ? whole->tops[q] : part->tops[q];
        const v16 keep = v_exp(v_all(whole->tops[q] - top)), take = v_exp(v_all(part->tops[q] - top));
        for (int d = 0; d < value_dim; d += 16)
            v_store(sums + d, v_fma(v_load(more + d), take, v_mul(v_load(sums + d), keep)));
        v_store(total, v_fma(v_load(part->totals + q * 16), take, v_mul(v_load(total), keep)));
        whole->tops[q] = top;
    }
}

/* The state before the first part: a sink is a score without a value. */
static void begin_whole(const job *j, const tile *t, const state *whole) {
    const int group = t->queries / (t->end - t->row);
    memset(whole->sums, 0, (size_t)t->queries * padded(j->value_dim) * sizeof(float));
    memset(whole->totals, 0, (size_t)t->queries * 16 * sizeof(float));
    for (int q = 0; q < t->queries; q++) {
        whole->tops[q] = j->sinks ? j->sinks[t->head * group + q % group] : -INFINITY;
        whole->totals[q * 16] = j->sinks ? 1.0f : 0.0f;
    }
}

static void write_result(const job *j, const tile *t, const state *whole) {
    const int group = t->queries / (t->end - t->row), value_dim = padded(j->value_dim);
    for (int q = 0; q < t->queries; q++) {
        const int row = t->row + q / group, seen = j->visible_begin[row] < j->visible_end[row];
        const float total = v_sum(v_load(whole->totals + q * 16));
        const float *sums = whole->sums + (int64_t)q * value_dim;
        float *to = j->result + ((int64_t)row * j->heads + t->head * group + q % group) * j->value_dim;
        for (int d = 0; d < j->value_dim; d++) to[d] = seen ? sums[d] / total : 0.0f;
    }
}

static void copy_queries(const job *j, const workspace *w, const tile *t) {
    const int group = t->queries / (t->end - t->row), key_dim = padded(j->key_dim);
    for (int q = 0; q < t->queries; q++) {
        const int64_t row = t->row + q / group, head = t->head * group + q % group;
        memcpy(w->queries + q * key_dim, j->queries + (row * j->heads + head) * j->key_dim,
               j->key_dim * sizeof(float));
        memset(w->queries + q * key_dim + j->key_dim, 0, (key_dim - j->key_dim) * sizeof(float));
    }
}

static tile tile_of(const job *j, int number, int head) {
    tile t = {j->tiles[number], j->tiles[number + 1], head, 0, INT32_MAX, 0, part_of(j, j->tiles[number])};
    t.queries = (t.end - t.row) * (j->heads / j->kv_heads);
    for (int r = t.row; r < t.end; r++)
        if (j->visible_begin[r] < j->visible_end[r]) {
            t.lo = least(t.lo, j->visible_begin[r]);
            t.hi = most(t.hi, j->visible_end[r]);
        }
    if (t.lo > t.hi) t.lo = t.hi;
    return t;
}

INLINE int parts_of(const tile *t) {
    return t->lo < t->hi ? (t->hi - 1) / t->part - t->lo / t->part + 1 : 0;
}

/* Positions of the number-th part: begin, and *end. */
INLINE int bounds_of(const tile *t, int number, int *end) {
    const int begin = (t->lo / t->part + number) * t->part;
    *end = least(begin + t->part, t->hi);
    return most(begin, t->lo);
}

/* Divides rows into tiles: rows of one slot with parts of one size, at most TILE queries. Writes
 * where tiles begin, and returns their number. */
static int divide(const job *j) {
    const int rows_at_most = rows_of_tile(j);
    int count = 0;
    for (int row = 0; row < j->rows; row++)
        if (!row || j->row_slot[row] != j->row_slot[row - 1] || part_of(j, row) != part_of(j, row - 1) ||
            row - j->tiles[count - 1] == rows_at_most)
            j->tiles[count++] = row;
    j->tiles[count] = j->rows;
    return count;
}

static void attend_whole(const job *j, const workspace *w, const tile *t) {
    copy_queries(j, w, t);
    begin_whole(j, t, &w->whole);
    for (int part = 0; part < parts_of(t); part++) {
        int end, begin = bounds_of(t, part, &end);
        attend_part(j, w, t, begin, end, &w->part);
        merge(j, t, begin, end, &w->part, &w->whole);
    }
    write_result(j, t, &w->whole);
}

/* How the work is divided among threads. */
typedef struct {
    const job *of;
    int tiles, parts; /* `parts` of all tiles together */
    int64_t part_floats; /* floats of a part's state; 0 if threads compute whole tiles */
    int64_t scratch; /* floats per thread */
} plan;

static plan divide_work(const job *j) {
    const int queries = j->heads / j->kv_heads;
    workspace w;
    plan all = {j, divide(j), 0, 0, carve(j, NULL, &w)};
    int32_t *before = j->tiles + j->rows + 1; /* parts before each tile */
    int rows = 1;
    for (int n = 0; n < all.tiles; n++) {
        const tile t = tile_of(j, n, 0);
        before[n] = all.parts, all.parts += parts_of(&t);
        rows = most(rows, t.end - t.row);
    }
    before[all.tiles] = all.parts;
    const int64_t floats = (int64_t)rows * queries * (padded(j->value_dim) + 17);
    const int idle = all.tiles * j->kv_heads < UNITS_PER_THREAD * j->threads;
    if (idle && all.parts > all.tiles && all.parts * j->kv_heads * floats <= split_floats(j))
        all.part_floats = floats;
    return all;
}

static void carve_own(const plan *all, workspace *w) {
    carve(all->of, all->of->scratch + all->scratch * omp_get_thread_num(), w);
}

/* The state of a part of a tile, for one kv head. */
static void carve_part(const plan *all, const tile *t, int64_t part, state *s) {
    float *const shared = all->of->scratch + all->scratch * all->of->threads;
    carve_state(all->of, t->queries, shared + (part * all->of->kv_heads + t->head) * all->part_floats, s);
}

/* Tiles, the last ones first: they see the most positions. */
static void attend_tiles(const void *argument, const items *mine) {
    const plan *all = argument;
    const job *j = all->of;
    workspace w;
    carve_own(all, &w);
    for (int unit = (int)mine->begin; unit < (int)mine->end; unit++) {
        const tile t = tile_of(j, all->tiles - 1 - unit / j->kv_heads, unit % j->kv_heads);
        attend_whole(j, &w, &t);
    }
}

static void attend_parts(const void *argument, const items *mine) {
    const plan *all = argument;
    const job *j = all->of;
    const int32_t *before = j->tiles + j->rows + 1;
    workspace w;
    carve_own(all, &w);
    for (int unit = (int)mine->begin; unit < (int)mine->end; unit++) {
        int n = 0, end;
        while (before[n + 1] <= unit / j->kv_heads) n++;
        const tile t = tile_of(j, n, unit % j->kv_heads);
        const int begin = bounds_of(&t, unit / j->kv_heads - before[n], &end);
        state part;
        carve_part(all, &t, unit / j->kv_heads, &part);
        copy_queries(j, &w, &t);
        attend_part(j, &w, &t, begin, end, &part);
    }
}

static void merge_parts(const void *argument, const items *mine) {
    const plan *all = argument;
    const job *j = all->of;
    const int32_t *before = j->tiles + j->rows + 1;
    workspace w;
    carve_own(all, &w);
    for (int unit = (int)mine->begin; unit < (int)mine->end; unit++) {
        const int n = unit / j->kv_heads;
        const tile t = tile_of(j, n, unit % j->kv_heads);
        begin_whole(j, &t, &w.whole);
        for (int number = 0; number < parts_of(&t); number++) {
            int end, begin = bounds_of(&t, number, &end);
            state part;
            carve_part(all, &t, before[n] + number, &part);
            merge(j, &t, begin, end, &part, &w.whole);
        }
        write_result(j, &t, &w.whole);
    }
}

/* Floats of scratch that these rows and threads need with any pages. */
EXPORT int64_t caravan_attention_scratch(const job *j) {
    workspace w;
    return carve(j, NULL, &w) * j->threads + split_floats(j);
}

EXPORT void caravan_attention(const job *j) {
    const plan all = divide_work(j);
    const division tiles = {(int64_t)all.tiles * j->kv_heads, 1, 0}, parts = {(int64_t)all.parts * j->kv_heads, 1, 0};
    if (all.part_floats) {
        share(j->threads, 1, parts, attend_parts, &all);
        share(j->threads, 1, tiles, merge_parts, &all);
    } else {
        share(j->threads, 1, tiles, attend_tiles, &all);
    }
}
