/* The experts of each row and their weights; see runtime/kernels/routing.py. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "curves.h"
#include "jobs.h"
#include "ranks.h"
#include "thread_team.h"

#define MOST 4096 /* experts */

enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SOFTMAX_OF_NEAR };

typedef struct {
    const float *logits; /* [rows][experts] */
    const float *bias;   /* [experts] or NULL: added to scores for the choice only */
    int64_t *chosen;     /* [rows][used] */
    float *weights;      /* [rows][used] */
    float scale, near;
    int32_t rows, experts, used, scores, groups, used_groups, group_pairs, renormalised;
} caravan_routing_job;

typedef caravan_routing_job routing;

/* y[i] = e^(x[i] - the largest x) / their sum, added in order. */
static void softmax(const float *x, int n, float *y) {
    float top = -INFINITY, sum = 0.0f;
    for (int i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    for (int at = 0; at < n; at += 16) {
        float lanes[16] = {0};
        const int some = n - at < 16 ? n - at : 16;
        memcpy(lanes, x + at, some * sizeof(float));
        v_store(lanes, v_exp(v_add(v_load(lanes), v_all(-top))));
        memcpy(y + at, lanes, some * sizeof(float));
    }
    for (int i = 0; i < n; i++) sum += y[i];
    for (int i = 0; i < n; i++) y[i] /= sum;
}

static void sigmoid(const float *x, int n, float *y) {
    for (int at = 0; at < n; at += 16) {
        float lanes[16] = {0};
        const int some = n - at < 16 ? n - at : 16;
        memcpy(lanes, x + at, some * sizeof(float));
        v_store(lanes, v_times_logistic(v_all(1.0f), v_load(lanes)));
        memcpy(y + at, lanes, some * sizeof(float));
    }
}

/* The `count` highest of n values, highest first. */
static void select_highest(const float *values, int n, int count, int64_t *ranks) {
    for (int i = 0; i < count; i++) ranks[i] = rank_of(values[i], i);
    for (int i = count / 2 - 1; i >= 0; i--) sift(ranks, count, i);
    for (int i = count; i < n; i++) {
        const int64_t rank = rank_of(values[i], i);
        if (rank <= ranks[0]) continue;
        ranks[0] = rank;
        sift(ranks, count, 0);
    }
    qsort(ranks, count, sizeof *ranks, descending);
}

/* Makes values outside the best groups the lowest. `ranks` has room for all experts. */
static void limit_to_groups(const routing *j, float *values, int64_t *ranks) {
    const int size = j->experts / j->groups, best = j->group_pairs && size > 1 ? 2 : 1;
    float sums[MOST];
    char kept[MOST] = {0};
    for (int g = 0; g < j->groups; g++) {
        select_highest(values + g * size, size, best, ranks);
        sums[g] = values[g * size + id_of(ranks[0])];
        if (best > 1) sums[g] += values[g * size + id_of(ranks[1])];
    }
    select_highest(sums, j->groups, j->used_groups, ranks);
    for (int i = 0; i < j->used_groups; i++) kept[id_of(ranks[i])] = 1;
    for (int e = 0; e < j->experts; e++)
        if (!kept[e / size]) values[e] = -INFINITY;
}

/* The weight of each chosen expert: its softmax over the experts that are not chosen before it and near
   it. `values` and `scores` have room for all experts. */
static void weigh_near(const routing *j, const float *logits, const int64_t *chosen, float *values,
                       float *scores, float *weights) {
    char before[MOST] = {0};
    for (int u = 0; u < j->used; u++) {
        const float best = logits[chosen[u]];
        for (int e = 0; e < j->experts; e++) {
            const float size = fabsf(logits[e]), far = (best - logits[e]) / (size > best ? size : best);
            values[e] = before[e] || far > j->near ? -INFINITY : logits[e];
        }
        softmax(values, j->experts, scores);
        weights[u] = scores[chosen[u]];
        before[chosen[u]] = 1;
    }
}

static void route(const routing *j, int row) {
    const float *logits = j->logits + (ptrdiff_t)row * j->experts;
    int64_t *chosen = j->chosen + (ptrdiff_t)row * j->used, ranks[MOST];
    float *weights = j->weights + (ptrdiff_t)row * j->used, scores[MOST], values[MOST], total = 0.0f;
    const float *ranked = logits;
    if (j->scores == SOFTMAX) softmax(logits, j->experts, scores);
    if (j->scores == SIGMOID) sigmoid(logits, j->experts, scores);
    if (j->bias || j->used_groups < j->groups) {
        for (int e = 0; e < j->experts; e++) values[e] = j->bias ? scores[e] + j->bias[e] : scores[e];
        if (j->used_groups < j->groups) limit_to_groups(j, values, ranks);
        ranked = values;
    }
    select_highest(ranked, j->experts, j->used, ranks);
    const float *taken = j->scores >= SOFTMAX_OF_CHOSEN ? logits : scores;
    for (int u = 0; u < j->used; u++) {
        chosen[u] = id_of(ranks[u]);
        weights[u] = taken[chosen[u]];
    }
    if (j->scores == SOFTMAX_OF_CHOSEN) softmax(weights, j->used, weights);
    if (j->scores == SOFTMAX_OF_NEAR) weigh_near(j, logits, chosen, values, scores, weights);
    for (int u = 0; u < j->used; u++) total += weights[u];
    for (int u = 0; u < j->used; u++) weights[u] = (j->renormalised ? weights[u] / total : weights[u]) * j->scale;
}

static void route_rows(const void *job, const items *mine) {
    for (int64_t row = mine->begin; row < mine->end; row++) route(job, (int)row);
}

/* Returns 0, or 1 for sizes that are not supported. */
EXPORT int caravan_route(const routing *j, int threads) {
    const int supported = j->experts <= MOST && j->used <= j->experts && j->groups > 0 && j->used_groups > 0 &&
                          j->used_groups <= j->groups && j->experts % j->groups == 0;
    if (!supported || (j->scores >= SOFTMAX_OF_CHOSEN && (j->bias || j->used_groups < j->groups))) return 1;
    const int worth = (int64_t)j->rows * j->experts > WORTH_SHARING / 16;
    share(threads, worth, even(j->rows, threads), route_rows, j);
    return 0;
}
