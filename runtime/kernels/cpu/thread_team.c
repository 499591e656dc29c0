/* See thread_team.h. */
#define _GNU_SOURCE
#include "thread_team.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

/* Called here rather than by pragmas, for which clang needs a runtime that torch does not bring; libgomp and LLVM's
 * libomp have both functions. Runs region(data) in `threads` threads, or in fewer if there are no more. */
extern void GOMP_parallel(void (*region)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);

#define SPINS 1000 /* iterations before a thread sleeps; more would delay other processes */
#define PARTS_PER_THREAD 4
#define CACHE_LINE __attribute__((aligned(64)))

/* A number that threads wait to change. */
typedef struct { _Atomic uint32_t value, sleeping; } event;

typedef struct {
    /* The offer: the number of items in the upper half, of taken items in the lower half. A thread that takes
     * some reads the rest of the offer afterwards, which stays until all items are computed. */
    CACHE_LINE _Atomic uint64_t offer;
    int64_t at_once;
    work run;
    const void *job;
    int foreseen;
    CACHE_LINE _Atomic int64_t computed; /* items */
    event progress;                      /* all items are computed */
    CACHE_LINE event offers;
    _Atomic int over;
} team;

static __thread team *led; /* by this thread */

static void sleep_on(event *e, uint32_t value) {
    atomic_fetch_add(&e->sleeping, 1);
    syscall(SYS_futex, &e->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0); /* if it still is `value` */
    atomic_fetch_sub(&e->sleeping, 1);
}

static void change(event *e) {
    atomic_fetch_add(&e->value, 1);
    if (atomic_load(&e->sleeping)) syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Waits until it is no longer `value`. */
static void await(event *e, uint32_t value) {
    for (int spins = 0; atomic_load_explicit(&e->value, memory_order_acquire) == value; spins++) {
        if (spins < SPINS) PAUSE();
        else sleep_on(e, value);
    }
}

/* Takes items; returns the first one and sets *end behind the last. -1 if none are left. */
static int64_t take(team *t, int64_t *end) {
    uint64_t offer = atomic_load_explicit(&t->offer, memory_order_acquire);
    for (;;) {
        const int64_t count = (int64_t)(offer >> 32), begin = (int64_t)(uint32_t)offer;
        if (begin == count) return -1;
        /* If at_once belongs to another offer, the exchange fails. */
        const int64_t at_once = __atomic_load_n(&t->at_once, __ATOMIC_RELAXED);
        *end = begin + at_once < count ? begin + at_once : count;
        const uint64_t taken = (uint64_t)count << 32 | (uint64_t)*end;
        if (atomic_compare_exchange_weak(&t->offer, &offer, taken)) return begin;
    }
}

/* Computes items until none are left. */
static void compute(team *t) {
    items mine = {.next = -1}, later = {.next = -1};
    mine.begin = take(t, &mine.end);
    while (mine.begin >= 0) {
        const int64_t count = (int64_t)(atomic_load_explicit(&t->offer, memory_order_relaxed) >> 32);
        const int64_t some = mine.end - mine.begin;
        later.foreseen = t->foreseen;
        if (later.foreseen) mine.next = later.begin = take(t, &later.end);
        t->run(t->job, &mine);
        if (atomic_fetch_add(&t->computed, some) + some == count) change(&t->progress);
        if (!later.foreseen) later.begin = take(t, &later.end); /* perhaps of the next offer */
        mine = later;
    }
}

static void help(team *t) {
    for (;;) {
        const uint32_t seen = atomic_load(&t->offers.value);
        compute(t);
        if (atomic_load(&t->over)) return;
        await(&t->offers, seen);
    }
}

static void offer(team *t, division how, work run, const void *job) {
    const uint32_t before = atomic_load(&t->progress.value);
    t->run = run, t->job = job, t->foreseen = how.foreseen;
    __atomic_store_n(&t->at_once, how.at_once, __ATOMIC_RELAXED);
    atomic_store(&t->computed, 0);
    atomic_store_explicit(&t->offer, (uint64_t)how.count << 32, memory_order_release);
    change(&t->offers);
    compute(t);
    await(&t->progress, before);
}

typedef struct { team t; void (*lead)(void *); void *argument; } region;

static void enter(void *data) {
    region *r = data;
    if (omp_get_thread_num()) {
        help(&r->t);
        return;
    }
    led = &r->t;
    r->lead(r->argument);
    led = NULL;
    atomic_store(&r->t.over, 1);
    change(&r->t.offers);
}

void with_team(int threads, void (*lead)(void *), void *argument) {
    region r = {.lead = lead, .argument = argument};
    GOMP_parallel(enter, &r, (unsigned)threads, 0);
}

typedef struct { division how; work run; const void *job; } single;

static void lead_single(void *argument) {
    const single *s = argument;
    offer(led, s->how, s->run, s->job);
}

void share(int threads, int worth, division how, work run, const void *job) {
    single s = {how, run, job};
    if (!worth || threads == 1 || how.count <= how.at_once) run(job, &(items){0, how.count, -1, 0});
    else if (led) offer(led, how, run, job);
    else with_team(threads, lead_single, &s);
}

division even(int64_t count, int threads) {
    const int64_t each = count / (PARTS_PER_THREAD * threads);
    return (division){count, each < 1 ? 1 : each, 0};
}
