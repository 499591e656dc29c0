/* Replays recorded kernel calls. */
#include <stdint.h>

#include "simd.h"
#include "thread_team.h"

#define INTEGERS 14
#define FLOATS 4

/* A kernel with its arguments: integers and addresses in one list, floats in another, each in the order of
 * the declaration. `checked`: the kernel returns an int, 0 on success. */
typedef struct {
    void *kernel;
    int64_t integers[INTEGERS];
    float floats[FLOATS];
    int64_t checked;
} caravan_call;

/* In the calling conventions of Linux on x86-64 and arm64, integers and floats are numbered separately, an
 * int is the low half of a register or of eight bytes of the stack, and surplus arguments are ignored. So
 * this type can call every kernel with at most this many arguments. */
typedef int (*any_kernel)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float);

typedef struct {
    const caravan_call *calls;
    int64_t count, failed;
} recording;

static void call_all(void *argument) {
    recording *r = argument;
    for (int64_t c = 0; c < r->count; c++) {
        const int64_t *i = r->calls[c].integers;
        const float *f = r->calls[c].floats;
        const int result = ((any_kernel)r->calls[c].kernel)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8],
                                                            i[9], i[10], i[11], i[12], i[13], f[0], f[1], f[2], f[3]);
        if (r->calls[c].checked && result) {
            r->failed = c;
            return;
        }
    }
}

/* Returns the index of the first call that failed, else -1. `threads`: number of threads of each call. Kernels
 * that do not divide their work by `share` run on one thread here. */
EXPORT int64_t caravan_replay(const caravan_call *calls, int64_t count, int threads) {
    recording r = {calls, count, -1};
    if (threads > 1) with_team(threads, call_all, &r);
    else call_all(&r);
    return r.failed;
}
