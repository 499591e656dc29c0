/* Products with the chosen experts of each row: the matrix of each used expert is read once. */
#include "curves.h"
#include "jobs.h"
#include "thread_team.h"

/* A pair is a row and one of its experts. Pairs are sorted by expert; those of an expert are a group. */
typedef struct {
    const float *x;       /* [pairs / share][elements]: pair p has row p / share */
    const float *scales;  /* [pairs]: factors of the rows of pairs, or NULL */
    const int64_t *chosen; /* [pairs]: experts; NULL: each row has all of them in order */
    const uint8_t *weight; /* [experts], expert_bytes apart: [outs], row_bytes apart */
    const float *bias;    /* [experts][outs] or NULL */
    float *y;             /* [pairs][outs] */
    void *packed;         /* caravan_packed_bytes for this number of rows */
    int32_t *places;      /* caravan_experts_places numbers */
    int64_t expert_bytes, row_bytes;
    int32_t type, compute, pairs, share, experts, outs, elements;
} caravan_experts_job;

/* Views of `places`. Group g: sorted pairs starts[g] .. starts[g + 1] - 1 of expert used[g], whose
 * outs are parts first[g] .. first[g + 1] - 1. */
typedef struct { int32_t *order, *group_of, *starts, *used, *first; int groups, threads; } groups;

EXPORT int64_t caravan_experts_places(int pairs, int experts) {
    const int most = pairs < experts ? pairs : experts;
    return 2 * (int64_t)pairs + 3 * most + 2 + experts;
}

static method method_for(const caravan_experts_job *j, const groups *g, int rows) {
    const int matrices = j->pairs < j->experts ? j->pairs : j->experts; /* at most */
    return method_of(j->type, j->compute, rows, j->outs, matrices, g->threads);
}

static int64_t choice(const caravan_experts_job *j, int pair) {
    return j->chosen ? j->chosen[pair] : pair % j->experts;
}

/* A counting sort, which keeps the order of an expert's pairs; 0 if a choice is out of range. */
static int sort(const caravan_experts_job *j, groups *g) {
    const int most = j->pairs < j->experts ? j->pairs : j->experts;
    int32_t *group_at = j->places; /* [experts]: number of pairs, then index of the group */
    g->order = group_at + j->experts;
    g->group_of = g->order + j->pairs;
    g->starts = g->group_of + j->pairs;
    g->used = g->starts + most + 1;
    g->first = g->used + most;
    memset(group_at, 0, j->experts * sizeof *group_at);
    for (int i = 0; i < j->pairs; i++) {
        const int64_t expert = choice(j, i);
        if (expert < 0 || expert >= j->experts) return 0;
        group_at[expert]++;
    }
    g->starts[0] = g->first[0] = 0;
    for (int e = 0; e < j->experts; e++) {
        const int rows = group_at[e], n = g->groups;
        if (!rows) continue;
        const int at_once = method_for(j, g, rows).outs_at_once;
        g->used[n] = e;
        g->starts[n + 1] = g->starts[n] + rows;
        g->first[n + 1] = g->first[n] + (j->outs + at_once - 1) / at_once;
        group_at[e] = g->groups++;
    }
    /* During the sort, starts[n] is the place of the next pair of group n. */
    for (int i = 0; i < j->pairs; i++) {
        const int n = group_at[choice(j, i)], at = g->starts[n]++;
        g->order[at] = i;
        g->group_of[at] = n;
    }
    for (int n = g->groups; n > 0; n--) g->starts[n] = g->starts[n - 1];
    g->starts[0] = 0;
    return 1;
}

/* The packed rows of a group. */
static void *packed_of(const caravan_experts_job *j, const groups *g, int n) {
    return (char *)j->packed + g->starts[n] * packed_row_bytes(j->type, j->compute, j->elements);
}

/* Copies the row of a sorted pair to its place in the packed rows of its group, and those that are packed with it. */
static void pack_row(const caravan_experts_job *j, const groups *g, int at) {
    const int n = g->group_of[at], begin = g->starts[n], rows = g->starts[n + 1] - begin;
    const method how = method_for(j, g, rows);
    for (int row = at - begin; row < packed_until(&how, at - begin, rows); row++) {
        const int pair = g->order[begin + row];
        const float *x = j->x + (ptrdiff_t)(pair / j->share) * j->elements;
        how.pack(j->type, x, j->scales ? j->scales[pair] : 1.0f, j->elements, rows, row, packed_of(j, g, n));
    }
}

/* Outputs [begin, end) of a group. */
static void add_bias(const caravan_experts_job *j, const groups *g, int n, int begin, int end) {
    const float *bias = j->bias + (ptrdiff_t)g->used[n] * j->outs;
    for (int at = g->starts[n]; at < g->starts[n + 1]; at++) {
        float *y = j->y + (ptrdiff_t)g->order[at] * j->outs;
        for (int o = begin; o < end; o++) y[o] += bias[o];
    }
}

typedef struct { const caravan_experts_job *of; const groups *g; } grouped;

static void pack_rows(const void *argument, const items *mine) {
    const grouped *p = argument;
    for (int64_t at = mine->begin; at < mine->end; at++) pack_row(p->of, p->g, (int)at);
}

/* The group of a part. */
static int group_with(const groups *g, int64_t index) {
    int n = 0, behind = g->groups;
    while (behind - n > 1) {
        const int middle = (n + behind) / 2;
        if (g->first[middle] <= index) n = middle;
        else behind = middle;
    }
    return n;
}

/* Computes a part. `next`: the part that this thread computes after it, or -1. */
static void run_part(const caravan_experts_job *j, const groups *g, int index, int64_t next, int foreseen) {
    const int n = group_with(g, index);
    const int begin = g->starts[n], rows = g->starts[n + 1] - begin, part = index - g->first[n];
    const method how = method_for(j, g, rows);
    const job of_group = {
        .weight = j->weight + g->used[n] * j->expert_bytes, .row_bytes = j->row_bytes,
        .rows = rows, .outs = j->outs, .elements = j->elements,
        .outs_at_once = how.outs_at_once, .x = packed_of(j, g, n), .x_stride = padded(j->elements),
        .y = j->y, .y_stride = j->outs, .y_rows = g->order + begin,
    };
    const int follows = next >= 0 && next < g->first[n + 1];
    how.run(&of_group, part, follows ? (int)next - g->first[n] : -1, foreseen && part > 0);
    const int from = part * how.outs_at_once;
    const int to = from + how.outs_at_once < j->outs ? from + how.outs_at_once : j->outs;
    if (j->bias) add_bias(j, g, n, from, to);
}

static void run_parts(const void *argument, const items *mine) {
    const grouped *p = argument;
    for (int64_t i = mine->begin; i < mine->end; i++)
        run_part(p->of, p->g, (int)i, i + 1 < mine->end ? i + 1 : mine->next, i > mine->begin || mine->foreseen);
}

/* Returns 0, or 1 if a choice is out of range. */
EXPORT int caravan_experts(const caravan_experts_job *j, int threads) {
    groups g = {.threads = threads};
    if (!sort(j, &g)) return 1;
    const grouped all = {j, &g};
    const int64_t floats = (int64_t)j->pairs * j->elements;
    share(threads, floats > WORTH_SHARING, even(j->pairs, threads), pack_rows, &all);
    share(threads, floats * j->outs > WORTH_SHARING, (division){g.first[g.groups], 1, 1}, run_parts, &all);
    return 0;
}

typedef struct {
    const float *x, *weights, *scales;
    const int64_t *chosen;
    float *y;
    int used, n;
} sum_job;

static void sum_tokens(const void *job, const items *mine) {
    const sum_job *j = job;
    for (int64_t t = mine->begin; t < mine->end; t++) {
        float *to = j->y + t * j->n;
        memset(to, 0, j->n * sizeof(float));
        for (int u = 0; u < j->used; u++) {
            const int64_t pair = t * j->used + u;
            const float *from = j->x + pair * j->n;
            const float factor = (j->weights ? j->weights[pair] : 1.0f) * (j->scales ? j->scales[j->chosen[pair]] : 1.0f);
            for (int i = 0; i < j->n; i++) to[i] += factor * from[i];
        }
    }
}

/* y[t][i] = sum over u of weights[t][u] * scales[chosen[t][u]] * x[t][u][i], in the order of u; x [tokens][used][n].
 * Without weights or scales (NULL) these are 1. Returns 0, or 1 if a choice is not below `experts`. */
EXPORT int caravan_weighted_sum(const float *x, const float *weights, const int64_t *chosen, const float *scales,
                                int experts, int tokens, int used, int n, float *y, int threads) {
    const sum_job j = {x, weights, scales, chosen, y, used, n};
    for (int64_t i = 0; scales && i < (int64_t)tokens * used; i++)
        if (chosen[i] < 0 || chosen[i] >= experts) return 1;
    share(threads, (int64_t)tokens * used * n > WORTH_SHARING, even(tokens, threads), sum_tokens, &j);
    return 0;
}

typedef struct {
    const float *gate, *up;
    float *y, limit, slope;
    int curved_first;
    int64_t n;
} swiglu_job;

INLINE v16 v_at_most(v16 x, float limit) {
    return v_negative(v_max(v_all(-limit), v_negative(x)));
}

static void swiglu_vectors(const void *job, const items *mine) {
    const swiglu_job *j = job;
    for (int64_t at = 16 * mine->begin; at < j->n && at < 16 * mine->end; at += 16) {
        float lanes[3][16] = {{0}};
        const int some = j->n - at < 16 ? (int)(j->n - at) : 16;
        memcpy(lanes[0], j->gate + at, some * sizeof(float));
        memcpy(lanes[1], j->up + at, some * sizeof(float));
        const v16 gate = v_load(lanes[0]), u = v_clamp(v_load(lanes[1]), j->limit);
        if (j->curved_first) {
            v_store(lanes[2], v_mul(v_at_most(v_times_logistic(gate, gate), j->limit), u));
        } else {
            const v16 g = v_at_most(gate, j->limit);
            v_store(lanes[2], v_mul(v_times_logistic(g, v_mul(g, v_all(j->slope))), v_add(u, v_all(1.0f))));
        }
        memcpy(j->y + at, lanes[2], some * sizeof(float));
    }
}

/* y = g sigmoid(slope g) (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit);
 * if `curved_first`, y = min(gate sigmoid(gate), limit) u */
EXPORT void caravan_clamped_swiglu(const float *gate, const float *up, float limit, float slope, int curved_first,
                                   int64_t n, float *y, int threads) {
    const swiglu_job j = {gate, up, y, limit, slope, curved_first, n};
    share(threads, n > WORTH_SHARING / 4, even((n + 15) / 16, threads), swiglu_vectors, &j);
}
