/* Drawing tokens from logits: greedily, or from the most likely ones; see runtime/worker/sampler.py. */
#include <stddef.h>
#include <stdlib.h>

#include "ranks.h"
#include "thread_team.h"

#define MOST 256  /* maximum number of tokens of a row that are ordered */
#define CHUNK 64  /* logits compared at a time */
#define ONE 0x1p40 /* weight of the most likely token */

enum { TEMPERATURE, TOP_P, MIN_P, FLOATS = 6 };
enum { SEED, TOP_K, DROPPED = 4, INTS };

typedef struct {
    const float *logits;  /* [rows][vocab] */
    const int64_t *slots, *positions; /* [rows] */
    const float *floats;  /* [slots][FLOATS] */
    const int64_t *ints;  /* [slots][INTS] */
    int32_t *history;     /* [slots], history_stride apart: the tokens of each position */
    int64_t *tokens;      /* [rows] */
    uint8_t *finite;      /* [rows]: whether the largest logit is finite */
    int64_t history_stride;
    int32_t rows, vocab;
} caravan_draw_job;

typedef caravan_draw_job job;

/* The `count` highest ranks of a row, unordered. After the first `count` ids, only values larger than
 * the smallest one found matter, because equal values with larger ids rank below it. */
static void select_top(const float *logits, int vocab, int count, int64_t *heap) {
    for (int i = 0; i < count; i++) heap[i] = rank_of(logits[i], i);
    for (int i = count / 2 - 1; i >= 0; i--) sift(heap, count, i);
    float least = logits[id_of(heap[0])];
    for (int begin = count; begin < vocab; begin += CHUNK) {
        const int end = vocab - begin < CHUNK ? vocab : begin + CHUNK;
        int larger = 0;
        for (int i = begin; i < end; i++) larger |= !(logits[i] <= least);
        if (!larger) continue;
        for (int i = begin; i < end; i++) {
            const int64_t rank = logits[i] <= least ? INT64_MIN : rank_of(logits[i], i);
            if (rank <= heap[0]) continue;
            heap[0] = rank;
            sift(heap, count, 0);
            least = logits[id_of(heap[0])];
        }
    }
}

static uint64_t mixed(uint64_t state) {
    state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    state = (state ^ state >> 27) * 0x94d049bb133111eb;
    return state ^ state >> 31;
}

/* In [0, 1): output number `position` of splitmix64 from the mixed seed. */
static double uniform(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9e3779b97f4a7c15;
    const uint64_t state = mixed((uint64_t)seed + golden) + ((uint64_t)position + 1) * golden;
    return (double)(mixed(state) >> 11) * 0x1p-53;
}

/* The column that a row draws from its `count` largest logits, in descending order; the first one is
 * finite. Each filter keeps a prefix, so one running sum serves all filters. */
static int pick(const float *logits, const int64_t *ranks, int count, const float *floats, double noise) {
    int64_t sums[MOST], weights[MOST], total = 0, kept = 0;
    float odds[MOST];
    const float top = logits[id_of(ranks[0])];
    for (int i = 0; i < count; i++) {
        odds[i] = expf((logits[id_of(ranks[i])] - top) / floats[TEMPERATURE]);
        weights[i] = (int64_t)(odds[i] * (float)ONE);
        sums[i] = total += weights[i];
    }
    const int64_t limit = (int64_t)((double)total * (double)floats[TOP_P]);
    for (int i = 0; i < count; i++)
        if (sums[i] - weights[i] <= limit && odds[i] >= floats[MIN_P]) kept = sums[i];
    int64_t target = (int64_t)(noise * (double)kept);
    if (target > kept - 1) target = kept - 1;
    for (int i = 0; i < count; i++)
        if (sums[i] > target) return i;
    return count - 1;
}

static void draw_row(const job *j, int row) {
    const float *logits = j->logits + (ptrdiff_t)row * j->vocab;
    const int64_t slot = j->slots[row], position = j->positions[row], *ints = j->ints + slot * INTS;
    int64_t ranks[MOST];
    const int count = ints[TOP_K] < j->vocab ? (int)ints[TOP_K] : j->vocab;
    select_top(logits, j->vocab, count, ranks);
    qsort(ranks, count, sizeof *ranks, descending);
    const int finite = isfinite(logits[id_of(ranks[0])]);
    const double noise = uniform(ints[SEED], position + ints[DROPPED]);
    const int column = finite ? pick(logits, ranks, count, j->floats + slot * FLOATS, noise) : 0;
    j->tokens[row] = id_of(ranks[column]);
    j->finite[row] = (uint8_t)finite;
    j->history[slot * j->history_stride + position] = (int32_t)j->tokens[row];
}

#define WORD 32 /* tokens per mask word */

INLINE void forbid_word(float *logits, uint32_t word, const int count) {
    for (int i = 0; i < count; i++) logits[i] = word & (uint32_t)1 << i ? logits[i] : -INFINITY;
}

/* A shortcut for words without forbidden tokens, which masks of free text consist of mostly. */
static void forbid_row(float *logits, const uint32_t *words, int vocab) {
    const int whole = vocab / WORD;
    for (int i = 0; i < whole; i++)
        if (words[i] != UINT32_MAX) forbid_word(logits + i * WORD, words[i], WORD);
    if (vocab % WORD) forbid_word(logits + whole * WORD, words[whole], vocab % WORD);
}

typedef struct {
    float *logits;         /* [rows][vocab] */
    const int64_t *masked; /* the rows that have masks, each once */
    const uint32_t *words; /* [masked][ceil(vocab / WORD)] */
    int vocab;
} masks;

static void forbid_rows(const void *argument, const items *mine) {
    const masks *m = argument;
    const ptrdiff_t row_words = (m->vocab + WORD - 1) / WORD;
    for (int64_t i = mine->begin; i < mine->end; i++)
        forbid_row(m->logits + (ptrdiff_t)m->masked[i] * m->vocab, m->words + i * row_words, m->vocab);
}

/* In the `count` distinct rows `masked` of logits [rows][vocab], sets the logits of tokens whose bits in words
 * [count][ceil(vocab / WORD)] are not set to minus infinity. Returns 1 if a row is out of range. */
EXPORT int caravan_forbid(float *logits, int64_t rows, int vocab, const int64_t *masked, int count,
                          const uint32_t *words, int threads) {
    for (int i = 0; i < count; i++)
        if (masked[i] < 0 || masked[i] >= rows) return 1;
    const masks m = {logits, masked, words, vocab};
    share(threads, (int64_t)count * vocab > 1 << 20, even(count, threads), forbid_rows, &m);
    return 0;
}

static void draw_rows(const void *argument, const items *mine) {
    for (int64_t row = mine->begin; row < mine->end; row++) draw_row(argument, (int)row);
}

/* Every row has a top_k from 1, which is greedy, to MOST. The bits of a row do not depend on other rows. */
EXPORT void caravan_draw(const job *j, int threads) {
    share(threads, j->rows > 1 && j->vocab > 4096, even(j->rows, threads), draw_rows, j);
}
